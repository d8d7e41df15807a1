"""Checksums: XXH3 of each shard of each field, computed by reading the files."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path

import xxhash

from lightning_memmap.sampling import shard_rows, shard_starts
from lightning_memmap.schema import Schema
from lightning_memmap.store.manifest import field_path, open_plain, unreadable

_READ_BYTES = 8 * 2**20


def compute_checksums(
    directory: Path,
    schema: Schema,
    num_rows: int,
    num_shards: int,
    *,
    num_threads: int = 2,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> dict[str, tuple[str, ...]]:
    """Read all files of a store and hash each shard.

    Args:
        directory: Where the files are.
        schema: The fields, one file each.
        num_rows: Rows of the store.
        num_shards: Shards of the store.
        num_threads: Threads that read and hash; XXH3 releases the interpreter lock.
        advance: Called with the bytes read since the last call.

    Returns:
        By field name, one hexadecimal hash of 64 bits for each shard.

    Raises:
        StoreError: A file is a link or no plain file, or cannot be read.
    """
    starts, rows = shard_starts(num_rows, num_shards), shard_rows(num_rows, num_shards)
    ranges = list(zip(starts.tolist(), rows.tolist(), strict=True))
    # Several shards at once: there may be many that are small, or empty.
    step = -(-num_shards // (4 * num_threads))
    parts = [ranges[first : first + step] for first in range(0, num_shards, step)]
    sums = {}
    with ThreadPoolExecutor(num_threads) as pool:
        for field in schema.fields:
            size = field.row_bytes
            if not size:
                sums[field.name] = (xxhash.xxh3_64_hexdigest(b""),) * num_shards
                continue
            path = field_path(directory, field)
            # Not through the mapping: a read error here is an OSError, there it is a SIGBUS.
            try:
                with open(open_plain(path), "rb", buffering=0) as file:
                    hash_ranges = partial(_hash_ranges, file.fileno(), size, advance)
                    sums[field.name] = tuple(chain(*pool.map(hash_ranges, parts)))
            except OSError as error:
                raise unreadable(path, error) from error
    return sums


def _hash_ranges(
    descriptor: int, row_bytes: int, advance: Callable[[int], None], ranges: list[tuple[int, int]]
) -> list[str]:
    """The hashes of ranges of rows, each given as its first row and its number of rows."""
    return [
        _hash_bytes(descriptor, first * row_bytes, (first + num_rows) * row_bytes, advance)
        for first, num_rows in ranges
    ]


def _hash_bytes(descriptor: int, start: int, end: int, advance: Callable[[int], None]) -> str:
    digest = xxhash.xxh3_64()
    while start < end:
        data = os.pread(descriptor, min(_READ_BYTES, end - start), start)
        if not data:
            break
        digest.update(data)
        start += len(data)
        advance(len(data))
    return digest.hexdigest()
