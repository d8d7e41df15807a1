"""Plain files: open them without following links, read, write and sync them. Bytes in memory."""

import errno
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_memmap.errors import StoreError
from lightning_memmap.integers import Integers

#: Follow no link, wait for no pipe, and don't pass the file to programs that are started.
SAFE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
#: Suffix of files that a build needs only until its store is in place.
TEMPORARY = ".tmp"
Bytes = NDArray[np.uint8]

#: From this length on, one call for each segment costs less than dividing it into blocks.
_LONG_BYTES = 2**11
#: Blocks are copied through a buffer of this size, which stays in the processor's cache.
_PASS_BYTES = 2**17


def open_plain(path: Path | str, flags: int = os.O_RDONLY, directory: int | None = None) -> int:
    """Open a plain file, without following a link or waiting for a pipe."""
    try:
        descriptor = os.open(path, flags | SAFE_FLAGS, 0o666, dir_fd=directory)
    except OSError as error:
        # A link, or a socket.
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _make_not_plain_error(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _make_not_plain_error(path)
    return descriptor


def read_plain(path: Path, max_bytes: int) -> bytes:
    """Read a small file that may be untrusted, but never a link or a pipe."""
    with open(open_plain(path), "rb") as file:
        return file.read(max_bytes)


def is_there(path: Path) -> bool:
    """Return whether a path exists. Unlike ``lexists``, this raises errors of the disk."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def check_plain(path: Path) -> int:
    """Check that a path is a plain file, and return its bytes."""
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise _make_not_plain_error(path)
    return status.st_size


def _make_not_plain_error(path: Path | str) -> StoreError:
    return StoreError(f"{path} is a link, or not a plain file: it is never opened")


def make_unreadable_error(path: Path, error: OSError) -> StoreError:
    """Make the error for a file of a store that this process can't read."""
    return StoreError(
        f"{path} cannot be read: {error.strerror}: see that you have the right to read it and all"
        " directories above it, that its disk works, and that the process may open more files"
        " (`ulimit -n`)"
    )


def write_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Write bytes at an offset of a file, in several calls if necessary."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data = data[written:]
        offset = offset + written


def write_new(path: Path, data: memoryview) -> None:
    """Write a file that isn't there yet, and sync it to the disk."""
    with open(path, "xb", buffering=0) as file:
        write_all(file.fileno(), data, 0)
        os.fsync(file.fileno())


def read_exactly(descriptor: int, offset: int, num_bytes: int) -> NDArray[np.uint8]:
    """Read bytes of a file without mapping it: in a mapping, a disk error would end the process."""
    data = np.empty(num_bytes, np.uint8)
    done = 0
    while done < num_bytes:
        count = os.preadv(descriptor, [data[done:].data], offset + done)
        if not count:
            raise OSError(
                errno.EIO,
                f"a file ends at byte {offset + done}, expected {offset + num_bytes} bytes",
            )
        done += count
    return data


def leaf_bytes(leaf: Tensor | NDArray[Any]) -> NDArray[np.uint8]:
    """Return the bytes of a dense leaf on the CPU in native byte order, copied if necessary."""
    if isinstance(leaf, Tensor):
        # A single element counts as contiguous, whatever its stride is.
        flat = leaf.contiguous().as_strided((leaf.numel(),), (1,))
        return flat.view(torch.uint8).numpy()
    native = leaf.astype(leaf.dtype.newbyteorder("="), copy=False)
    return np.ascontiguousarray(native).reshape(-1).view(np.uint8)


def write_rows(descriptor: int, indices: Integers, rows: NDArray[np.uint8]) -> None:
    """Write rows of one size into a file, at their indices in it."""
    order = np.argsort(indices)
    indices = indices[order]
    size = rows.shape[1]
    data = rows.take(order, axis=0).reshape(-1).data
    # One call for all rows that follow one another.
    bounds = [0, *(np.flatnonzero(np.diff(indices) != 1) + 1).tolist(), len(rows)]
    for start, stop in pairwise(bounds):
        write_all(descriptor, data[start * size : stop * size], int(indices[start]) * size)


def sync_path(path: Path) -> None:
    """Sync a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class OpenFiles:
    """Files of one directory, each opened for writing when it is first needed."""

    def __init__(
        self, directory: Path | str, max_open: int = sys.maxsize, *, is_own: bool = False
    ) -> None:
        self._files: dict[str, int] = {}
        self.directory = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | SAFE_FLAGS)
        #: Whether all files must belong to this user alone: a build resumes only such files.
        self._is_own = is_own
        if is_own and os.fstat(self.directory).st_uid != os.geteuid():
            self.close()
            raise StoreError(f"{directory} belongs to another user")
        #: Distinguishes files that are created through this object from all others.
        self.writer_id = secrets.randbits(63)
        self._max_open = max_open

    def open(self, name: str, flags: int = 0) -> int:
        """Return the descriptor of a file, valid until the next call."""
        if name not in self._files:
            if len(self._files) >= self._max_open:
                os.close(self._files.pop(next(iter(self._files))))
            self._files[name] = file = open_plain(name, flags | os.O_RDWR, self.directory)
            state = os.fstat(file)
            if self._is_own and (state.st_nlink, state.st_uid) != (1, os.geteuid()):
                raise StoreError(f"{name} is not a plain file that belongs to this user")
        return self._files[name]

    def sync(self) -> None:
        """Sync the open files to the disk."""
        for descriptor in self._files.values():
            os.fsync(descriptor)

    def close(self) -> None:
        """Close the files and the directory. A second call does nothing."""
        while self._files:
            os.close(self._files.popitem()[1])
        if self.directory >= 0:
            os.close(self.directory)
            self.directory = -1


def make_replaced_error(path: Path) -> StoreError:
    """Make the error for a missing file of an open store."""
    return StoreError(f"{path} is gone: the store was replaced or removed. Open it again")


def copy_segments(
    source: Bytes, starts: Integers, target: Bytes, target_starts: Integers, lengths: Integers
) -> None:
    """Copy segments of memory, ``target[t:t + n] = source[s:s + n]`` for each ``s, t, n``."""
    if not len(lengths):
        return
    for memory, memory_starts in ((source, starts), (target, target_starts)):
        stops = memory_starts + lengths
        if memory_starts.min() < 0 or stops.max() > len(memory) or lengths.min() < 0:
            raise IndexError("a segment is outside the memory that it is copied from or to")
    long = np.flatnonzero(lengths >= _LONG_BYTES)
    # Slicing memory takes half as long in Python as in numpy.
    source_data = source.data
    target_data = target.data
    bounds = (
        starts[long],
        starts[long] + lengths[long],
        target_starts[long],
        target_starts[long] + lengths[long],
    )
    for start, stop, target_start, target_stop in zip(*map(np.ndarray.tolist, bounds), strict=True):
        target_data[target_start:target_stop] = source_data[start:stop]
    for block, segments in _group_by_block(lengths, _LONG_BYTES):
        source_blocks = _blocks_at_each_byte(source, block)
        target_blocks = _blocks_at_each_byte(target, block)
        pass_segments = _PASS_BYTES // block
        for first in range(0, len(segments), pass_segments):
            here = segments[first : first + pass_segments]
            sources = starts[here]
            targets = target_starts[here]
            rests = lengths[here] - block
            target_blocks[targets] = source_blocks[sources]
            target_blocks[targets + rests] = source_blocks[sources + rests]


def _group_by_block(lengths: Integers, below: int) -> Iterator[tuple[int, Integers]]:
    """Yield sizes, powers of two, and the segments that two blocks of this size cover.

    The first block starts with the segment, and the second one ends with it.
    """
    # The exponent of the largest power of two that is not larger; -1 for empty segments.
    powers = np.frexp(lengths.astype(np.float64))[1] - 1
    powers[lengths >= below] = -1
    for power in np.flatnonzero(np.bincount(powers + 1)[1:]).tolist():
        yield 1 << power, np.flatnonzero(powers == power)


def _blocks_at_each_byte(memory: Bytes, block: int) -> NDArray[np.void]:
    """Return a view of memory whose element ``i`` is the block that begins at byte ``i``."""
    dtype = np.dtype((np.void, block))
    windows: NDArray[np.void] = np.ndarray((len(memory) - block + 1,), dtype, memory, 0, (1,))
    return windows
