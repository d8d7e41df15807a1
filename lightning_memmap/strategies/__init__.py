"""The strategies of this pack, one file each."""

from lightning_memmap.strategies._registry import STRATEGIES, register
from lightning_memmap.strategies.consolidate import consolidate_checkpoint
from lightning_memmap.strategies.fsdp2 import FSDP2Strategy
from lightning_memmap.strategies.pipeline import PipelineStrategy
from lightning_memmap.strategies.superbatch import SuperBatchStrategy
from lightning_memmap.strategies.superbatch_ddp import SuperBatchDDPStrategy

__all__ = [
    "STRATEGIES",
    "FSDP2Strategy",
    "PipelineStrategy",
    "SuperBatchDDPStrategy",
    "SuperBatchStrategy",
    "consolidate_checkpoint",
    "register",
]
