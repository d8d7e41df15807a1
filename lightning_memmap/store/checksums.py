"""Checksums: XXH3 of each shard of each field, computed by reading the files."""

import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path

import xxhash

from lightning_memmap.store.columns import Column
from lightning_memmap.store.files import open_plain, unreadable
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
