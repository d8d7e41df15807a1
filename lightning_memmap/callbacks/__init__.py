"""Callbacks of this pack, one file each."""

from lightning_memmap.callbacks.prediction_table import PredictionTable
from lightning_memmap.callbacks.run_summary import RunSummary

__all__ = ["PredictionTable", "RunSummary"]


def __dir__() -> list[str]:
    return __all__
