"""The strategies of this pack, one file each; what one of them is made of, in a folder."""

from lightning_memmap.strategies._fsdp2_wrap import consolidate_checkpoint
from lightning_memmap.strategies._member_results import MemberResult, MemberResults, read_results
from lightning_memmap.strategies._registry import STRATEGIES, register
from lightning_memmap.strategies.data_parallel import DataParallelStrategy
from lightning_memmap.strategies.fsdp2 import FSDP2Strategy
from lightning_memmap.strategies.independent import IndependentStrategy
from lightning_memmap.strategies.model_parallel import LocalModelParallelStrategy
from lightning_memmap.strategies.pipeline import PipelineStrategy
from lightning_memmap.strategies.superbatch import SuperBatchStrategy
from lightning_memmap.strategies.superbatch_ddp import SuperBatchDDPStrategy

__all__ = [
    "STRATEGIES",
    "DataParallelStrategy",
    "FSDP2Strategy",
    "IndependentStrategy",
    "LocalModelParallelStrategy",
    "MemberResult",
    "MemberResults",
    "PipelineStrategy",
    "SuperBatchDDPStrategy",
    "SuperBatchStrategy",
    "consolidate_checkpoint",
    "read_results",
    "register",
]
