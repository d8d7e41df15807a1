"""Datasets resident on every device for PyTorch Lightning.

Importing registers the strategy names with ``lightning.pytorch.Trainer``.
"""

from lightning_memmap.datamodule import MemmapDataModule
from lightning_memmap.store import (
    ColumnDataset,
    ImageFolder,
    Store,
    TarDataset,
    build_store,
    open_store,
    verify_store,
)
from lightning_memmap.strategies import register

__all__ = [
    "ColumnDataset",
    "ImageFolder",
    "MemmapDataModule",
    "Store",
    "TarDataset",
    "build_store",
    "open_store",
    "verify_store",
]

register()
