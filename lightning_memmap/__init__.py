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

#: Modules with public names of their own.
_MODULES = (
    "callbacks", "compare", "errors", "loading", "sampling", "schema", "store", "strategies",
    "transforms",
)  # fmt: skip


def __dir__() -> list[str]:
    return [*__all__, *(name for name in _MODULES if name in globals())]


register()
