"""Checksums: the XXH3 of each chunk of a store's files, so that any range of bytes can be verified.

Each shard of a file is cut into chunks of `CHUNK_BYTES` from its first byte on. The last chunk of a
shard may be shorter, so that no chunk crosses a shard or a file. The manifest stores the checksums
of a field as one byte string, file after file. With chunks of 8 bytes:

    file      shards                 chunks                         checksums
    x.index   [0, 16)  [16, 24)      [0, 8)  [8, 16)  [16, 24)      0 1 2
    x.values  [0, 12)  [12, 17)      [0, 8)  [8, 12)  [12, 17)      3 4 5

Shard 0 of this field has the chunks 0, 1, 3 and 4. Shards and files without bytes have no chunk.
"""

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from lightning_memmap.sampling.rows import Integers
from lightning_memmap.store.columns import Column, FixedColumn
from lightning_memmap.store.files import make_unreadable_error, open_plain
from lightning_memmap.store.workers import start_threads

#: Bytes that one checksum covers. Doubled until a store has at most `MAX_CHECKSUMS` of them.
CHUNK_BYTES = 8 * 2**20
#: A manifest has at most this many checksums: 4 TiB have them for chunks of 8 MiB.
MAX_CHECKSUMS = 2**19
#: Bytes of one checksum.
CHECKSUM_BYTES = 8
# Read at once, into memory that is used again: new memory costs more than the read. In between,
# Python's lock is released to a training that may be running.
_READ_BYTES = 2**20
#: The progress bar is updated after this many bytes: an update takes longer than a small read.
_SHOWN_BYTES = 2**23


class Chunk(NamedTuple):
    """A range of bytes of one shard that has a checksum."""

    shard: int
    file: str
    start: int
    """The first byte of the chunk in its file."""
    stop: int
    """One past the last byte."""
    checksum: bytes


class _FileChunks(NamedTuple):
    """The chunks of one file."""

    name: str
    bounds: Integers
    """The bytes at which the shards start, and the size of the file, int64 of shape (C + 1,)."""
    edges: Integers
    """The bytes at which the chunks start, and the size of the file, int64 of shape (chunks + 1,).
    """
    first: int
    """The number of the first chunk within the column."""


class ColumnChunks:
    """The chunks of one column and their checksums.

    Args:
        column: The column.
        chunk_bytes: The size of a chunk; see `choose_chunk_bytes`.
        checksums: The checksums, file after file.
    """

    def __init__(self, column: Column, chunk_bytes: int, checksums: bytes) -> None:
        self._checksums = checksums
        self._files = list[_FileChunks]()
        first = 0
        for name, bounds in column.bounds.items():
            edges = _compute_edges(bounds, chunk_bytes)
            self._files.append(_FileChunks(name, bounds, edges, first))
            first += len(edges) - 1

    def of_shard(self, shard: int) -> list[Chunk]:
        """Return the chunks of one shard, file after file."""
        chunks = list[Chunk]()
        for file in self._files:
            start, stop = np.searchsorted(file.edges, file.bounds[shard : shard + 2]).tolist()
            if file.bounds[shard] < file.bounds[shard + 1]:
                chunks += [self._chunk(file, index, shard) for index in range(start, stop)]
        return chunks

    def differing(self, checksums: bytes) -> list[Chunk]:
        """Return the chunks whose checksums differ from the manifest."""
        expected = np.frombuffer(self._checksums, np.uint64)
        is_wrong = expected != np.frombuffer(checksums, np.uint64)
        chunks = list[Chunk]()
        for file in self._files:
            for index in np.flatnonzero(is_wrong[file.first :][: len(file.edges) - 1]).tolist():
                # Empty shards start at the same byte: the last one has the chunk.
                shard = int(np.searchsorted(file.bounds, file.edges[index], side="right")) - 1
                chunks.append(self._chunk(file, index, shard))
        return chunks

    def _chunk(self, file: _FileChunks, index: int, shard: int) -> Chunk:
        start = CHECKSUM_BYTES * (file.first + index)
        checksum = self._checksums[start : start + CHECKSUM_BYTES]
        return Chunk(shard, file.name, int(file.edges[index]), int(file.edges[index + 1]), checksum)


def merge_chunks(chunks: Sequence[Chunk]) -> list[tuple[int, str, int, int]]:
    """Merge chunks that follow one another: the shard, file, start and stop of each range."""
    ranges = list[tuple[int, str, int, int]]()
    for chunk in chunks:
        if ranges and (*ranges[-1][:2], ranges[-1][3]) == (chunk.shard, chunk.file, chunk.start):
            ranges[-1] = (*ranges[-1][:3], chunk.stop)
        else:
            ranges.append(chunk[:4])
    return ranges


def num_chunks(column: Column, chunk_bytes: int) -> int:
    """Return the number of checksums of one column."""
    return sum(int(_counts(bounds, chunk_bytes).sum()) for bounds in column.bounds.values())


def choose_chunk_bytes(columns: Sequence[Column]) -> int:
    """Return the size of the chunks of a store: `CHUNK_BYTES`, or more for a very large one."""
    chunk_bytes = CHUNK_BYTES
    while sum(num_chunks(column, chunk_bytes) for column in columns) > MAX_CHECKSUMS:
        chunk_bytes *= 2
    return chunk_bytes


def _counts(bounds: Integers, chunk_bytes: int) -> Integers:
    return -(-np.diff(bounds) // chunk_bytes)


def _compute_edges(bounds: Integers, chunk_bytes: int) -> Integers:
    """Return the bytes at which chunks start, and the last one ends."""
    counts = _counts(bounds, chunk_bytes)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(bounds[:-1], counts) + (np.arange(len(first)) - first) * chunk_bytes
    return np.append(starts, bounds[-1])


def compute_checksums(
    directory: Path,
    columns: Sequence[Column],
    *,
    num_threads: int,
    advance: Callable[[int], None],
) -> dict[str, bytes]:
    """Read all files of a store and hash each chunk, by field."""
    chunk_bytes = choose_chunk_bytes(columns)
    sums = dict[str, bytes]()
    with start_threads(num_threads) as pool:
        for column in columns:
            # Not through the mapping: a read error here is an OSError, there it is a SIGBUS.
            with ExitStack() as stack:
                column_sums = b""
                for name in column.file_bytes:
                    path = directory / name
                    edges = _compute_edges(column.bounds[name], chunk_bytes)
                    try:
                        opened = stack.enter_context(open(open_plain(path), "rb", buffering=0))
                        # Several chunks at once: there may be many that are small.
                        step = -(-(len(edges) - 1) // (2 * num_threads))
                        groups = [
                            edges[at : at + step + 1] for at in range(0, len(edges) - 1, step)
                        ]
                        hash_group = partial(_hash_chunks, opened.fileno(), advance)
                        column_sums += b"".join(pool.map(hash_group, groups))
                    except OSError as error:
                        raise make_unreadable_error(path, error) from error
                sums[column.field.name] = column_sums
    return sums


def hash_in_memory(column: FixedColumn, data: memoryview, chunk_bytes: int) -> bytes:
    """Hash the chunks of a column whose file is in memory."""
    edges = _compute_edges(column.bounds[column.rows_name], chunk_bytes)
    chunks = (data[start:stop] for start, stop in pairwise(edges.tolist()))
    return b"".join(xxhash.xxh3_64_digest(chunk) for chunk in chunks)


def _hash_chunks(file: int, advance: Callable[[int], None], edges: Integers) -> bytes:
    """Hash chunks that follow one another in a file."""
    hashes = list[bytes]()
    num_read = 0
    memory = memoryview(bytearray(_READ_BYTES))
    for start, stop in pairwise(edges.tolist()):
        digest = xxhash.xxh3_64()
        while start < stop:
            if not (count := os.preadv(file, [memory[: stop - start]], start)):
                raise OSError(errno.EIO, f"it ends at byte {start}, and should have {stop}")
            digest.update(memory[:count])
            start += count
            num_read += count
            if num_read >= _SHOWN_BYTES:
                advance(num_read)
                num_read = 0
        hashes.append(digest.digest())
    advance(num_read)
    return b"".join(hashes)
