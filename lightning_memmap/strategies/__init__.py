"""The strategies of this pack, one file each."""

from lightning_memmap.strategies._registry import STRATEGIES, register
from lightning_memmap.strategies.superbatch import SuperBatchStrategy

__all__ = ["STRATEGIES", "SuperBatchStrategy", "register"]
