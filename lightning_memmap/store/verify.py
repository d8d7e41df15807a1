"""Checksums: XXH3 of each shard of each field, and the bytes of a store compared with them."""

import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import xxhash

from lightning_memmap.store.columns import Column, FileRange
from lightning_memmap.store.files import open_plain, unreadable
from lightning_memmap.store.manifest import MANIFEST
from lightning_memmap.store.remote.cache import RemoteStore, open_store
from lightning_memmap.store.workers import threads

Advance = Callable[[int], None]

#: Read at once, into memory that is used again: new memory costs more than the read.
_READ_BYTES = 2**18
#: The progress bar moves on after so many, since that takes longer than to read a small shard.
_SHOWN_BYTES = 2**23


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
    path: str | Path, *, num_threads: int = 2, advance: Advance = lambda num_bytes: None
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
    return [
        # A field without bytes has no file, only its checksums in the manifest.
        Damage(name, shard, store.files / next(iter(column.file_bytes), f"../{MANIFEST}"))
        for column, (name, sums) in zip(manifest.columns, found.items(), strict=True)
        for shard, computed in enumerate(sums)
        if computed != manifest.checksums[name][shard]
    ]


def compute_checksums(
    directory: Path, columns: Sequence[Column], *, num_threads: int, advance: Advance
) -> dict[str, tuple[str, ...]]:
    """Read all files of a store and hash each shard."""
    sums = {}
    with threads(num_threads) as pool:
        for column in columns:
            path, ranges = directory, column.shard_ranges()
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


def _hash_shards(
    files: Mapping[str, int], advance: Advance, shards: Iterable[Sequence[FileRange]]
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
