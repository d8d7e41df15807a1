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
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from lightning_memmap.integers import Integers, ceil_div, group_of, index_in_group
from lightning_memmap.store.columns import Column, FixedColumn
from lightning_memmap.store.files import make_unreadable_error, open_plain
from lightning_memmap.store.paths import StoreUrl
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


class ColumnChunks:
    """The chunks of one column and their checksums.

    Args:
        column: The column.
        chunk_bytes: The size of a chunk; see `choose_chunk_bytes`.
        checksums: The checksums, file after file.
    """

    def __init__(self, column: Column, chunk_bytes: int, checksums: bytes) -> None:
        self._checksums = checksums
        cuts = [
            (name, *_cut_into_chunks(bounds, chunk_bytes)) for name, bounds in column.bounds.items()
        ]
        #: By chunk: its file, shard, first byte, and one past its last byte.
        self._files = [name for name, shards, _ in cuts for _ in shards]
        self._shards = np.concatenate([shards for _, shards, _ in cuts])
        self._starts = np.concatenate([bounds[:-1] for *_, bounds in cuts])
        self._stops = np.concatenate([bounds[1:] for *_, bounds in cuts])

    def of_shard(self, shard: int) -> list[Chunk]:
        """Return the chunks of one shard, file after file."""
        return self._list_chunks(self._shards == shard)

    def differing(self, checksums: bytes) -> list[Chunk]:
        """Return the chunks whose checksums differ from the manifest."""
        expected = np.frombuffer(self._checksums, np.uint64)
        return self._list_chunks(expected != np.frombuffer(checksums, np.uint64))

    def _list_chunks(self, is_listed: NDArray[np.bool_]) -> list[Chunk]:
        return [
            Chunk(
                int(self._shards[index]),
                self._files[index],
                int(self._starts[index]),
                int(self._stops[index]),
                self._checksums[CHECKSUM_BYTES * index : CHECKSUM_BYTES * (index + 1)],
            )
            for index in np.flatnonzero(is_listed).tolist()
        ]


@dataclass(frozen=True)
class Damage:
    """A range of bytes of one shard and field that differ from their checksums.

    Args:
        field: Name of the field.
        shard: Index of the shard.
        path: The file, or its URL.
        start: The first byte of the range in the file. Ranges are made of chunks of 8 MiB, each of
            which has a checksum.
        stop: One past the last byte.
    """

    field: str
    shard: int
    path: Path | str
    start: int
    stop: int

    def __str__(self) -> str:
        return (
            f"field {self.field!r}, shard {self.shard} is damaged: bytes {self.start} to"
            f" {self.stop} of {self.path}"
        )


def list_damages(field: str, files: Path | StoreUrl, chunks: Sequence[Chunk]) -> list[Damage]:
    """Return the damaged ranges of a field in a directory of files. Adjacent chunks are merged."""
    damages = list[Damage]()
    for chunk in chunks:
        path = files / chunk.file
        start = chunk.start
        last = damages[-1] if damages else None
        if last is not None and (last.shard, last.path, last.stop) == (chunk.shard, path, start):
            start = damages.pop().start
        damages.append(Damage(field, chunk.shard, path, start, chunk.stop))
    return damages


def num_chunks(column: Column, chunk_bytes: int) -> int:
    """Return the number of checksums of one column."""
    return sum(
        int(_chunks_per_shard(bounds, chunk_bytes).sum()) for bounds in column.bounds.values()
    )


def choose_chunk_bytes(columns: Sequence[Column]) -> int:
    """Return the size of the chunks of a store: `CHUNK_BYTES`, or more for a very large one."""
    chunk_bytes = CHUNK_BYTES
    while sum(num_chunks(column, chunk_bytes) for column in columns) > MAX_CHECKSUMS:
        chunk_bytes *= 2
    return chunk_bytes


def _chunks_per_shard(bounds: Integers, chunk_bytes: int) -> Integers:
    """Return the number of chunks of each shard of a file."""
    return ceil_div(np.diff(bounds), chunk_bytes)


def _cut_into_chunks(bounds: Integers, chunk_bytes: int) -> tuple[Integers, Integers]:
    """Return the shard of each chunk of a file, and the bounds of the chunks.

    Args:
        bounds: The bytes at which shards start, and the size of the file.
        chunk_bytes: The size of a chunk.
    """
    counts = _chunks_per_shard(bounds, chunk_bytes)
    shards = group_of(counts)
    starts = bounds[shards] + index_in_group(counts) * chunk_bytes
    return shards, np.append(starts, bounds[-1])


def compute_checksums(
    directory: Path,
    columns: Sequence[Column],
    *,
    num_threads: int,
    advance: Callable[[int], None],
) -> dict[str, bytes]:
    """Read all files of a store and hash each chunk, by field."""
    chunk_bytes = choose_chunk_bytes(columns)
    sums = {column.field.name: b"" for column in columns}
    files = [(column, name) for column in columns for name in column.file_bytes]
    with start_threads(num_threads) as pool:
        for column, name in files:
            path = directory / name
            _, bounds = _cut_into_chunks(column.bounds[name], chunk_bytes)
            # Several chunks at once: there may be many that are small.
            step = ceil_div(len(bounds) - 1, 2 * num_threads)
            groups = [bounds[at : at + step + 1] for at in range(0, len(bounds) - 1, step)]
            try:
                # Not through the mapping: a read error here is an OSError, there it is a SIGBUS.
                with open(open_plain(path), "rb", buffering=0) as file:
                    hash_group = partial(_hash_chunks, file.fileno(), advance)
                    sums[column.field.name] += b"".join(pool.map(hash_group, groups))
            except OSError as error:
                raise make_unreadable_error(path, error) from error
    return sums


def hash_in_memory(column: FixedColumn, data: memoryview, chunk_bytes: int) -> bytes:
    """Hash the chunks of a column whose file is in memory."""
    _, bounds = _cut_into_chunks(column.bounds[column.rows_name], chunk_bytes)
    chunks = (data[start:stop] for start, stop in pairwise(bounds.tolist()))
    return b"".join(xxhash.xxh3_64_digest(chunk) for chunk in chunks)


def _hash_chunks(file: int, advance: Callable[[int], None], bounds: Integers) -> bytes:
    """Hash chunks that follow one another in a file."""
    hashes = list[bytes]()
    num_read = 0
    memory = memoryview(bytearray(_READ_BYTES))
    for start, stop in pairwise(bounds.tolist()):
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
