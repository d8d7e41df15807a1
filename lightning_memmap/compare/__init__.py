"""Compare variants: the same rows, the same losses and weights, and what each one costs."""

from lightning_memmap.compare.command import compare

__all__ = ["compare"]


def __dir__() -> list[str]:
    return __all__
