"""Shards of a store at a URL, fetched into files here and compared with their checksums.

The files here have the sizes of the whole ones. What was not fetched is a hole in them, and must
not be read. A file beside them, `RECORDS`, has an int64 for each field and shard: its bytes (at
least 1) once they are on the disk, the negative of that when somebody means to fetch them, and 0
before. A fetch that was interrupted goes on with the next shard.
"""

import fcntl
import logging
import os
import random
import struct
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from threading import Event

import numpy as np
import xxhash

from lightning_memmap.errors import MemmapError, StoreError, StoreNotFoundError
from lightning_memmap.sampling import Integers
from lightning_memmap.store.columns import FileRange
from lightning_memmap.store.files import TEMPORARY, open_plain, write_all
from lightning_memmap.store.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest
from lightning_memmap.store.places import StoreUrl
from lightning_memmap.store.remote.files import RemoteFiles, UnreachableError

#: A pull needs it until its store is in place.
RECORDS = "shards" + TEMPORARY
#: Shards that are fetched at once.
_NUM_THREADS = 8
#: Bytes of one read. A connection that breaks costs one.
_READ_BYTES = 8 * 2**20
#: Times that a shard is fetched whose bytes are not those of its checksum: what lies between may
#: have changed them.
_NUM_COPIES = 2
#: Some libraries try for as long to connect, and then everybody has waited enough.
_PATIENCE_S = 5.0
_log = logging.getLogger(__name__)


class RemoteManifest:
    """The manifest of a store at a URL, and its bytes."""

    def __init__(self, data: bytes, url: StoreUrl) -> None:
        self.data, self.manifest = data, Manifest.decode(data, str(url))

    @classmethod
    def read(cls, files: RemoteFiles) -> "RemoteManifest":
        """Read it from its server. A damaged one is a StoreError."""
        try:
            data = files.read(MANIFEST, 0, MAX_MANIFEST_BYTES + 1, patience_s=_PATIENCE_S)
        except StoreNotFoundError as error:
            raise StoreNotFoundError(
                f"no store at {files.url}: {str(error).rstrip('.')}: build it in a directory, and"
                f" push it with `lightning-memmap store push DIRECTORY {files.url}`"
            ) from error
        return cls(data, files.url)


class RemoteShards:
    """Fetches shards of one store into the files of one directory. Several threads may use it.

    The directory stays open, and all is opened relative to it: where it is removed, and another
    made under its name, nothing of that is taken for what was fetched here.
    """

    def __init__(self, remote: RemoteManifest, files: RemoteFiles, directory: Path) -> None:
        self.manifest = remote.manifest
        self._remote, self._files = remote, files
        opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        weakref.finalize(self, os.close, opened)
        #: The directory, whatever its name leads to by now.
        self.directory = Path(f"/proc/self/fd/{opened}")
        self._records = self._open(RECORDS, os.O_RDONLY)
        weakref.finalize(self, os.close, self._records)

    def _open(self, name: str, flags: int) -> int:
        return os.open(self.directory / name, flags | os.O_CLOEXEC | os.O_NOFOLLOW)

    def records(self) -> Integers:
        """What is here, int64 of shape (fields, shards): see above."""
        shape = len(self.manifest.columns), self._step
        return self._read_records(0, shape[0] * shape[1]).reshape(shape)

    def _read_records(self, first: int, count: int) -> Integers:
        data = os.pread(self._records, 8 * count, 8 * first)
        if len(data) < 8 * count:
            raise StoreError(
                f"what was fetched of {self._files.url} is not known any more: somebody has changed"
                " its files on this machine; open the store again"
            )
        return np.frombuffer(data, np.int64)

    def _is_here(self, number: int) -> bool:
        return bool(self._read_records(number, 1)[0] > 0)

    @cached_property
    def _pieces(self) -> list[list[list[FileRange]]]:
        """The pieces of files of each field and shard."""
        columns = self.manifest.columns
        return [[list(pieces) for pieces in column.shard_ranges()] for column in columns]

    def num_bytes(self, numbers: Iterable[int]) -> Integers:
        """The bytes of each of some shards of fields, which are numbered field by field."""
        ranges = (self._pieces[i // self._step][i % self._step] for i in numbers)
        sums = [max(1, sum(end - start for _, start, end in pieces)) for pieces in ranges]
        return np.array(sums, np.int64)

    @property
    def _step(self) -> int:
        return self.manifest.num_shards

    def missing(self, fields: Collection[int], shards: Collection[int]) -> list[int]:
        """The numbers of the shards of fields that are not here."""
        wanted = np.zeros((len(self.manifest.columns), self._step), bool)
        wanted[np.ix_(np.array([*fields], np.int64), np.array([*shards], np.int64))] = True
        return [int(number) for number in np.flatnonzero(wanted & (self.records() <= 0))]

    def record(self, numbers: Collection[int], *, sign: int) -> None:
        """Record that shards of fields are here (1), are to be fetched (-1), or are not (0)."""
        with closing_fd(self._open(RECORDS, os.O_WRONLY)) as file:
            for number, num_bytes in zip(numbers, self.num_bytes(numbers).tolist(), strict=True):
                write_all(file, memoryview(struct.pack("q", sign * num_bytes)), 8 * number)

    def fetch(self, numbers: Collection[int], advance: Callable[[int], None]) -> None:
        """Fetch shards of fields, several at once. Threads call ``advance`` with bytes fetched.

        Raises:
            StoreNotFoundError: The store is gone.
            StoreError: It cannot be reached, has changed, or is damaged.
            OSError: The files here cannot be written.
        """
        # In another order than other processes that fetch the same, so that they share the work.
        order = random.Random(os.getpid()).sample([*numbers], len(numbers))
        stop = Event()
        with ThreadPoolExecutor(min(_NUM_THREADS, max(1, len(order)))) as pool:
            fetched = [pool.submit(self._fetch, number, advance, stop) for number in order]
            try:
                done, _ = wait(fetched, return_when=FIRST_EXCEPTION)
            finally:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
        for future in done:
            future.result()

    def _fetch(self, number: int, advance: Callable[[int], None], stop: Event) -> None:
        field, shard = divmod(number, self._step)
        column = self.manifest.columns[field]
        with self._locked(number), ExitStack() as stack:
            if self._is_here(number):  # By another process.
                return
            files: dict[str, int] = {}

            def write(name: str, first: int, data: bytes) -> None:
                if name not in files:
                    files[name] = stack.enter_context(closing_fd(self._open(name, os.O_WRONLY)))
                write_all(files[name], memoryview(data), first)

            for left in reversed(range(_NUM_COPIES)):
                digest = xxhash.xxh3_64()
                for name, first, data in self._read(number):
                    if stop.is_set():
                        return
                    digest.update(data)
                    write(name, first, data)
                    advance(len(data))
                if digest.hexdigest() == self.manifest.checksums[column.field.name][shard]:
                    break
                if (error := self._changed()) or not left:
                    raise error or self._damaged(number)
                _log.warning(
                    "the bytes of field %r, shard %s are not those of its checksum: fetching them"
                    " again",
                    column.field.name,
                    shard,
                )
            for name, first, data in column.edge_bytes(shard):
                write(name, first, data)
            for file in files.values():
                os.fsync(file)
            self.record([number], sign=1)

    @contextmanager
    def _locked(self, number: int) -> Iterator[None]:
        """Keep other threads and processes from fetching a shard of a field at the same time."""
        with closing_fd(self._open(RECORDS, os.O_RDWR)) as file:
            # Of this descriptor, not of the process: threads wait for each other too.
            lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 8 * number, 8, 0)
            fcntl.fcntl(file, fcntl.F_OFD_SETLKW, lock)
            yield

    def _read(self, number: int) -> Iterator[tuple[str, int, bytes]]:
        """Read the bytes of a shard of a field from its server: file, first byte, bytes."""
        try:
            for name, start, end in self._pieces[number // self._step][number % self._step]:
                for first in range(start, end, _READ_BYTES):
                    last, at = min(first + _READ_BYTES, end), f"{self.manifest.generation}/{name}"
                    yield name, first, self._files.read(at, first, last)
        except StoreNotFoundError as error:
            raise self._changed() or self._damaged(number) from error

    def verify(self, number: int, advance: Callable[[int], None]) -> bool:
        """Whether a shard of a field has the bytes of its checksum: those here, or if there are
        none, those of its server. Of damaged bytes here it is then recorded that they are not."""
        field, shard = divmod(number, self._step)
        is_here, digest = self._is_here(number), xxhash.xxh3_64()
        for _, _, data in self._read_here(number) if is_here else self._read(number):
            digest.update(data)
            advance(len(data))
        column = self.manifest.columns[field]
        is_right = digest.hexdigest() == self.manifest.checksums[column.field.name][shard]
        if not is_right and (error := None if is_here else self._changed()):
            raise error
        if is_here and not is_right:
            self.record([number], sign=0)
        return is_right

    def _read_here(self, number: int) -> Iterator[tuple[str, int, bytes]]:
        for name, start, end in self._pieces[number // self._step][number % self._step]:
            with closing_fd(self._open(name, os.O_RDONLY)) as file:
                for first in range(start, end, _READ_BYTES):
                    yield name, first, os.pread(file, min(_READ_BYTES, end - first), first)

    def _changed(self) -> MemmapError | None:
        """What has become of the store since its manifest was read; None where it is the same."""
        url = self._files.url
        try:
            is_same = RemoteManifest.read(self._files).data == self._remote.data
        except UnreachableError as error:
            return error
        except StoreError:
            is_same = False
        except StoreNotFoundError:
            return StoreNotFoundError(f"the store at {url} was removed while it was being fetched")
        if not is_same:
            return StoreError(
                f"the store at {url} was replaced while it was being fetched: open it again"
            )
        return None

    def _damaged(self, number: int) -> StoreError:
        field, shard = divmod(number, self._step)
        return StoreError(
            f"the store at {self._files.url} is damaged: the bytes of field"
            f" {self.manifest.columns[field].field.name!r}, shard {shard} are not those of its"
            " checksum: check the store that was pushed (`lightning-memmap store verify`), and push"
            " it again, with overwrite=True"
        )


def make_records(directory: Path, manifest: Manifest) -> None:
    """Record in a directory that no shard of a store is there yet."""
    with open(directory / RECORDS, "xb") as file:
        file.truncate(8 * len(manifest.columns) * manifest.num_shards)


def read_plain(path: Path) -> bytes:
    """Read a small file that others may have put there, and never a link or a pipe."""
    with open(open_plain(path), "rb") as file:
        return file.read(MAX_MANIFEST_BYTES)


@contextmanager
def closing_fd(descriptor: int) -> Iterator[int]:
    """Close a descriptor afterwards."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)
