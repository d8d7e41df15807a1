"""Callbacks of this pack."""

from lightning_memmap.callbacks.prediction_table import PredictionTable
from lightning_memmap.callbacks.row_results import RowResults
from lightning_memmap.callbacks.step_seeder import StepSeeder

__all__ = ["PredictionTable", "RowResults", "StepSeeder"]


def __dir__() -> list[str]:
    return __all__
