"""Callbacks of this pack."""

from lightning_memmap.callbacks.prediction_table import PredictionTable
from lightning_memmap.callbacks.row_results import RowResults

__all__ = ["PredictionTable", "RowResults"]


def __dir__() -> list[str]:
    return __all__
