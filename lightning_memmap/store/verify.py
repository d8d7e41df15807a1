"""Verify a store: read every byte and compare it with the checksums."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning_memmap.store.checksums import compute_checksums
from lightning_memmap.store.manifest import MANIFEST, Manifest, check_files, field_path
from lightning_memmap.store.recovery import finish_interrupted


@dataclass(frozen=True)
class Damage:
    """A shard of a field whose bytes are not those that were written.

    Args:
        field: Name of the field.
        shard: Index of the shard.
        path: The field's file.
    """

    field: str
    shard: int
    path: Path

    def __str__(self) -> str:
        return f"field {self.field!r}, shard {self.shard} is damaged ({self.path})"


def verify_store(
    path: str | Path,
    *,
    num_threads: int = 2,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> list[Damage]:
    """Check the manifest, the sizes of the files, and every checksum.

    Args:
        path: Directory of the store.
        num_threads: Threads that read and hash.
        advance: Called with the bytes read since the last call.

    Returns:
        The damaged shards; empty where all is well.

    Raises:
        StoreNotFoundError: There is no store at this path.
        StoreError: The manifest is damaged, or a file is missing, has the wrong size, or cannot
            be read.
    """
    directory = finish_interrupted(Path(os.path.realpath(path)))
    manifest = Manifest.read(directory)
    check_files(directory, manifest)
    found = compute_checksums(
        directory,
        manifest.schema,
        manifest.num_rows,
        manifest.num_shards,
        num_threads=num_threads,
        advance=advance,
    )
    return [
        Damage(field.name, shard, field_path(directory, field))
        for field in manifest.schema.fields
        for shard, expected in enumerate(manifest.checksums[field.name])
        if found[field.name][shard] != expected
    ]


def unknown_files(directory: Path, manifest: Manifest) -> list[str]:
    """Names of what lies in a store and is no part of it. This package reads none of it."""
    known = {MANIFEST, *(field_path(Path(), field).name for field in manifest.schema.fields)}
    return sorted(set(os.listdir(directory)) - known)
