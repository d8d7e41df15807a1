"""Datasets resident on every device for PyTorch Lightning.

Importing registers the strategy names with ``lightning.pytorch.Trainer``.
"""

from lightning_memmap.data.module import MemmapDataModule
from lightning_memmap.store import (
    ColumnDataset,
    ImageFolder,
    Store,
    TarDataset,
    append_store,
    build_part,
    build_store,
    finish_store,
    open_store,
    pull_store,
    push_store,
    verify_store,
)
from lightning_memmap.strategies import register

__all__ = [
    "ColumnDataset",
    "ImageFolder",
    "MemmapDataModule",
    "Store",
    "TarDataset",
    "append_store",
    "build_part",
    "build_store",
    "finish_store",
    "open_store",
    "pull_store",
    "push_store",
    "verify_store",
]

register()
