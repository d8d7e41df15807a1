"""Callbacks of this pack."""

from lightning_memmap.callbacks.prediction_table import PredictionTable

__all__ = ["PredictionTable"]


def __dir__() -> list[str]:
    return __all__
