"""Compare strategies and feeds: the same rows, the same losses and weights, and what each costs."""

from lightning_memmap.compare.advise_command import advise
from lightning_memmap.compare.command import compare

__all__ = ["advise", "compare"]
