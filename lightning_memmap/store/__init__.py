"""A store: a directory that holds one dataset as memory-mapped tensors. No Lightning here."""

from lightning_memmap.store.reader import Store, open_store
from lightning_memmap.store.sources import ColumnDataset, ImageFolder, TarDataset
from lightning_memmap.store.verify import Damage, verify_store
from lightning_memmap.store.writer import build_store

__all__ = [
    "ColumnDataset",
    "Damage",
    "ImageFolder",
    "Store",
    "TarDataset",
    "build_store",
    "open_store",
    "verify_store",
]
