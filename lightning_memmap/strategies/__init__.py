"""The strategies of this pack, one file each."""

from lightning_memmap.strategies._registry import STRATEGIES, register
from lightning_memmap.strategies.consolidate import consolidate_checkpoint
from lightning_memmap.strategies.data_parallel import DataParallelStrategy
from lightning_memmap.strategies.fsdp2 import FSDP2Strategy
from lightning_memmap.strategies.model_parallel import LocalModelParallelStrategy
from lightning_memmap.strategies.superbatch import SuperBatchStrategy
from lightning_memmap.strategies.superbatch_ddp import SuperBatchDDPStrategy

__all__ = [
    "STRATEGIES",
    "DataParallelStrategy",
    "FSDP2Strategy",
    "LocalModelParallelStrategy",
    "SuperBatchDDPStrategy",
    "SuperBatchStrategy",
    "consolidate_checkpoint",
    "register",
]
