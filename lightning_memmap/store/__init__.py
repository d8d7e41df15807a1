"""A store: a directory that holds one dataset as memory-mapped tensors. No Lightning here."""

from lightning_memmap.store.build import append_store, build_part, build_store, finish_store
from lightning_memmap.store.checksums import Damage
from lightning_memmap.store.remote.cache import open_store, verify_store
from lightning_memmap.store.remote.transfer import pull_store, push_store
from lightning_memmap.store.sources.column_dataset import ColumnDataset
from lightning_memmap.store.sources.image_folder import ImageFolder
from lightning_memmap.store.sources.tar_dataset import TarDataset, TarStream
from lightning_memmap.store.sources.token_stream import TokenStream
from lightning_memmap.store.store import Store

__all__ = [
    "ColumnDataset",
    "Damage",
    "ImageFolder",
    "Store",
    "TarDataset",
    "TarStream",
    "TokenStream",
    "append_store",
    "build_part",
    "build_store",
    "finish_store",
    "open_store",
    "pull_store",
    "push_store",
    "verify_store",
]


def __dir__() -> list[str]:
    return __all__
