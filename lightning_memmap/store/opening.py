"""Open a store, wherever it is."""

from pathlib import Path

from lightning_memmap.store.places import StoreUrl, place_of
from lightning_memmap.store.remote.store import RemoteStore
from lightning_memmap.store.store import Store, open_directory


def open_store(path: str | Path) -> Store:
    """Open a store for reading.

    Of a store at a URL, the manifest is read now, and each shard when a row of it is needed, once:
    it is kept in a cache on this machine. The environment variable ``LIGHTNING_MEMMAP_CACHE`` names
    its directory, by default ``~/.cache/lightning_memmap``, and ``LIGHTNING_MEMMAP_CACHE_SIZE`` the
    most bytes in it, such as ``500GiB``. Where nobody answers at the URL, or
    ``LIGHTNING_MEMMAP_OFFLINE`` is ``1``, the store is opened in the version in the cache that its
    server gave last.

    Args:
        path: Directory of the store, or its URL, such as ``s3://bucket/stores/train``.

    Returns:
        The store, its files mapped and no row read.

    Raises:
        StoreNotFoundError: There is no store at this path.
        StoreError: The manifest is damaged or of another version, or a file is missing, linked, of
            the wrong size, or cannot be read; or the URL cannot be reached.
        ValueError: No library knows the protocol of the URL.
    """
    place = place_of(path)
    return RemoteStore(place) if isinstance(place, StoreUrl) else open_directory(place)
