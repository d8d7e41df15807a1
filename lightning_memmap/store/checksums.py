"""Checksums: XXH3 of each shard of each field, computed by reading the files, and compared."""

import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import xxhash

from lightning_memmap.store.columns import Column
from lightning_memmap.store.files import open_plain, unreadable
from lightning_memmap.store.manifest import (
    GENERATION,
    MANIFEST,
    Manifest,
    check_files,
)
from lightning_memmap.store.places import store_directory
from lightning_memmap.store.workers import threads

#: Read at once, into memory that is used again: new memory costs more than the read.
_READ_BYTES = 2**18
#: The progress bar moves on after so many, since that takes longer than to read a small shard.
_SHOWN_BYTES = 2**23


def compute_checksums(
    directory: Path,
    columns: Sequence[Column],
    *,
    num_threads: int = 2,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> dict[str, tuple[str, ...]]:
    """Read all files of a store and hash each shard."""
    sums = {}
    with threads(num_threads) as pool:
        for column in columns:
            path = directory
            ranges = column.shard_ranges()
            # Several shards at once: there may be many that are small, or empty.
            step = -(-len(ranges) // (2 * num_threads))
            groups = [ranges[first : first + step] for first in range(0, len(ranges), step)]
            # Not through the mapping: a read error here is an OSError, there it is a SIGBUS.
            try:
                with ExitStack() as stack:
                    files = {}
                    for name in column.file_bytes:
                        path = directory / name
                        file = stack.enter_context(open(open_plain(path), "rb", buffering=0))
                        files[name] = file.fileno()
                    hash_group = partial(_hash_shards, files, advance)
                    sums[column.field.name] = tuple(chain(*pool.map(hash_group, groups)))
            except OSError as error:
                raise unreadable(path, error) from error
    return sums


def hashed_bytes(columns: Sequence[Column]) -> int:
    """The bytes that `compute_checksums` reads."""
    pieces = chain.from_iterable(chain.from_iterable(c.shard_ranges() for c in columns))
    return sum(end - start for _, start, end in pieces)


def _hash_shards(
    files: Mapping[str, int],
    advance: Callable[[int], None],
    shards: Iterable[Sequence[tuple[str, int, int]]],
) -> list[str]:
    """The hashes of shards, each given as pieces of files."""
    hashes, num_read = [], 0
    memory = memoryview(bytearray(_READ_BYTES))
    for pieces in shards:
        digest = xxhash.xxh3_64()
        for name, start, end in pieces:
            while start < end:
                if not (count := os.preadv(files[name], [memory[: end - start]], start)):
                    raise OSError(errno.EIO, f"it ends at byte {start}, and should have {end}")
                digest.update(memory[:count])
                start += count
                num_read += count
                if num_read >= _SHOWN_BYTES:
                    advance(num_read)
                    num_read = 0
        hashes.append(digest.hexdigest())
    advance(num_read)
    return hashes


@dataclass(frozen=True)
class Damage:
    """A shard of a field whose bytes have changed since they were written.

    Args:
        field: Name of the field.
        shard: Index of the shard.
        path: The first of the field's files.
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
    """Compare every byte of a store with its checksums, and find what is damaged.

    Args:
        path: Directory of the store.
        num_threads: Threads that read and hash.
        advance: Called with the number of bytes read since the last call, from these threads.

    Returns:
        The damaged shards by field and shard; empty if there is no damage.

    Raises:
        StoreNotFoundError: There is no store at this path.
        ValueError: ``path`` is a URL. What is fetched from there is compared when it arrives.
        StoreError: The manifest is damaged, or a file is missing, has the wrong size, or cannot be
            read.
    """
    store = store_directory(path)
    manifest = Manifest.read(store)
    directory = store / manifest.generation
    check_files(directory, manifest)
    found = compute_checksums(directory, manifest.columns, num_threads=num_threads, advance=advance)
    damages = []
    for column in manifest.columns:
        name = column.field.name
        # A field without bytes has no file, only its checksums in the manifest.
        file = directory / next(iter(column.file_bytes), f"../{MANIFEST}")
        pairs = zip(manifest.checksums[name], found[name], strict=True)
        damages += [
            Damage(name, shard, file)
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
