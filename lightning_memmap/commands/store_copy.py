"""``lightning-memmap store push`` and ``store pull``."""

from pathlib import Path

from lightning_memmap.commands.store_find import find_stores
from lightning_memmap.commands.store_options import print_line
from lightning_memmap.store import pull_store, push_store
from lightning_memmap.store.paths import store_directory


def push(path: str, url: str, *, overwrite: bool = False) -> int:
    """Copy a store to a URL, such as s3://bucket/stores.

    Args:
        path: Directory of a store, or of one store per split.
        url: The URL to copy to.
        overwrite: Replace existing stores.
    """
    for name, location in find_stores(str(store_directory(path))).items():
        target = f"{url.rstrip('/')}/{name}" if name else url
        push_store(location, target, overwrite=overwrite)
        print_line(target)
    return 0


def pull(url: str, path: str, *, overwrite: bool = False) -> int:
    """Copy a store from a URL, and check every byte.

    Args:
        url: URL of a store, or of one store per split.
        path: The directory to copy to.
        overwrite: Replace existing stores.
    """
    for name, location in find_stores(url).items():
        store = pull_store(str(location), Path(path) / name, overwrite=overwrite)
        print_line(store.path)
    return 0
