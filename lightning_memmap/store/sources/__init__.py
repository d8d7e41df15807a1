"""Sources: datasets whose rows are read many at once, and datasets of our own."""

from lightning_memmap.store.sources.column_dataset import ColumnDataset
from lightning_memmap.store.sources.image_folder import ImageFolder
from lightning_memmap.store.sources.source import Source, in_turn, source_of, telling_samples
from lightning_memmap.store.sources.tar_dataset import TarDataset

__all__ = [
    "ColumnDataset",
    "ImageFolder",
    "Source",
    "TarDataset",
    "in_turn",
    "source_of",
    "telling_samples",
]
