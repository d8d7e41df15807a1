"""Checksums: XXH3 of each shard of each field, computed by reading the files."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import xxhash

from lightning_memmap.order import shard_rows, shard_starts
from lightning_memmap.schema import Schema
from lightning_memmap.store.manifest import field_path

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
    """
    starts, rows = shard_starts(num_rows, num_shards), shard_rows(num_rows, num_shards)
    ranges = list(zip(starts.tolist(), rows.tolist(), strict=True))
    sums = {}
    with ThreadPoolExecutor(num_threads) as pool:
        for field in schema.fields:
            size = field.row_bytes
            path = field_path(directory, field) if size else Path(os.devnull)
            # Not through the mapping: a read error here is an OSError, there it is a SIGBUS.
            with open(path, "rb", buffering=0) as file:
                hash_part = partial(_hash_range, file.fileno(), advance)
                parts = [(start * size, count * size) for start, count in ranges]
                sums[field.name] = tuple(pool.map(hash_part, parts))
    return sums


def _hash_range(descriptor: int, advance: Callable[[int], None], part: tuple[int, int]) -> str:
    digest = xxhash.xxh3_64()
    start, end = part[0], sum(part)
    while start < end:
        data = os.pread(descriptor, min(_READ_BYTES, end - start), start)
        if not data:
            break
        digest.update(data)
        start += len(data)
        advance(len(data))
    return digest.hexdigest()
