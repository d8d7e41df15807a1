"""Verify a store: read every byte and compare it with the checksums."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from lightning_memmap.store.columns import compute_checksums
from lightning_memmap.store.manifest import MANIFEST
from lightning_memmap.store.remote.cache import RemoteStore, open_store


@dataclass(frozen=True)
class Damage:
    """A shard of a field whose bytes have changed since they were written.

    Args:
        field: Name of the field.
        shard: Index of the shard.
        path: The first of the field's files; of a store at a URL, the URL.
    """

    field: str
    shard: int
    path: Path | str

    def __str__(self) -> str:
        return f"field {self.field!r}, shard {self.shard} is damaged ({self.path})"


def verify_store(
    path: str | Path,
    *,
    num_threads: int = 2,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> list[Damage]:
    """Compare every byte of a store with its checksums, and find what is damaged.

    Of a store at a URL, these are the bytes that this machine would use: those in the cache, and
    for shards that are not there, those of the server. What is damaged in the cache is fetched
    again when it is next needed.

    Args:
        path: Directory of the store, or its URL.
        num_threads: Threads that read and hash.
        advance: Called with the number of bytes read since the last call, from these threads.

    Returns:
        The damaged shards by field and shard; empty if there is no damage.

    Raises:
        StoreNotFoundError: There is no store at this path.
        StoreError: The manifest is damaged, or a file is missing, has the wrong size, or cannot be
            read; or the URL cannot be reached.
    """
    store = open_store(path)
    if isinstance(store, RemoteStore):
        damaged = store.damaged(num_threads, advance)
        return [Damage(name, shard, store.location) for name, shard in damaged]
    manifest = store.manifest
    found = compute_checksums(
        store.files, manifest.columns, num_threads=num_threads, advance=advance
    )
    hashes = partial(np.frombuffer, dtype=np.uint64)
    return [
        # A field without bytes has no file, only its checksums in the manifest.
        Damage(name, shard, store.files / next(iter(column.file_bytes), f"../{MANIFEST}"))
        for column, (name, sums) in zip(manifest.columns, found.items(), strict=True)
        for shard in np.flatnonzero(hashes(sums) != hashes(manifest.checksums[name])).tolist()
    ]
