"""Verify a store: read every byte and compare it with the checksums."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning_memmap.store.checksums import compute_checksums
from lightning_memmap.store.manifest import (
    GENERATION,
    MANIFEST,
    Manifest,
    check_files,
)
from lightning_memmap.store.places import StoreUrl, place_of
from lightning_memmap.store.remote.cache import RemoteStore


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
    place = place_of(path)
    if isinstance(place, StoreUrl):
        found_there = RemoteStore(place).damaged(num_threads, advance)
        return [Damage(name, shard, place) for name, shard in found_there]
    store = Path(os.path.realpath(place))
    manifest = Manifest.read(store)
    directory = store / manifest.generation
    check_files(directory, manifest)
    found = compute_checksums(directory, manifest.columns, num_threads=num_threads, advance=advance)
    damages = []
    for column in manifest.columns:
        name = column.field.name
        # A field without bytes has no file, only its checksums in the manifest.
        path = directory / next(iter(column.file_bytes), f"../{MANIFEST}")
        pairs = zip(manifest.checksums[name], found[name], strict=True)
        damages += [
            Damage(name, shard, path)
            for shard, (expected, sum_of_shard) in enumerate(pairs)
            if expected != sum_of_shard
        ]
    return damages


def unknown_files(directory: Path, manifest: Manifest) -> list[str]:
    """List what lies in the directory of a store without being part of it, or of a build."""
    names = {name for name in os.listdir(directory) if not GENERATION.fullmatch(name)}
    inside = set(os.listdir(directory / manifest.generation)) - manifest.file_bytes.keys()
    return sorted(
        {*(names - {MANIFEST, ".lock"}), *(f"{manifest.generation}/{name}" for name in inside)}
    )
