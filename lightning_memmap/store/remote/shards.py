"""Shards of a store at a URL, fetched into files here and compared with their checksums.

The files here have the sizes of the whole ones. What was not fetched is a hole in them, and must
not be read. A file beside them, `RECORDS`, has an int64 for each shard of each field: its bytes (at
least 1) once they are on the disk, the negative of that when somebody means to fetch them, and 0
before. A fetch that was interrupted goes on with the next shard.
"""

import fcntl
import hashlib
import logging
import os
import random
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, as_completed
from contextlib import closing
from functools import cached_property
from pathlib import Path
from threading import Event, main_thread

import numpy as np
import xxhash

from lightning_memmap.errors import MemmapError, StoreError, StoreNotFoundError
from lightning_memmap.sampling.rows import Integers
from lightning_memmap.store.columns import FileRange
from lightning_memmap.store.files import TEMPORARY, OpenFiles, open_plain, write_all
from lightning_memmap.store.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest
from lightning_memmap.store.progress import show_progress
from lightning_memmap.store.remote.files import RemoteFiles, UnreachableError
from lightning_memmap.store.workers import threads

#: A pull needs it until its store is in place.
RECORDS = "shards" + TEMPORARY
#: Shards that are fetched at once.
_NUM_THREADS = 8
#: Bytes of one read. A connection that breaks costs one.
_READ_BYTES = 8 * 2**20
#: Some libraries try for as long to connect, and then everybody has waited enough.
_PATIENCE_S = 5.0
_log = logging.getLogger(__name__)


class RemoteShards:
    """The shards of one store at a URL, fetched into the files of a directory.

    They are numbered field by field, in the order of the schema.
    """

    def __init__(self, files: RemoteFiles, manifest: Manifest, directory: Path) -> None:
        self.files, self.manifest = files, manifest
        opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        weakref.finalize(self, os.close, opened)
        #: The directory, whatever its name leads to by now.
        self.directory = Path(f"/proc/self/fd/{opened}")
        self._records = open_plain(self.directory / RECORDS)
        weakref.finalize(self, os.close, self._records)

    def numbers(self, fields: Sequence[int], shards: Sequence[int] | Integers) -> Integers:
        """The numbers of shards of fields, which are given by their place in the schema."""
        firsts = np.array(fields, np.int64) * self.manifest.num_shards
        return (np.asarray(shards, np.int64)[:, None] + firsts).ravel()

    @cached_property
    def _pieces(self) -> list[tuple[FileRange, ...]]:
        """The pieces of files of each shard."""
        return [tuple(shard) for column in self.manifest.columns for shard in column.shard_ranges()]

    @cached_property
    def num_bytes(self) -> Integers:
        """The bytes of each shard, at least 1, int64 of shape (fields x shards,)."""
        sums = [sum(end - start for _, start, end in pieces) for pieces in self._pieces]
        return np.maximum(np.array(sums, np.int64), 1)

    def records(self, first: int = 0, count: int | None = None) -> Integers:
        """What is here of each shard, int64: see above."""
        count = len(self.manifest.columns) * self.manifest.num_shards if count is None else count
        data = os.pread(self._records, 8 * count, 8 * first)
        if len(data) < 8 * count:
            raise StoreError(
                f"what was fetched of {self.files.url} is not known any more: somebody has changed"
                " its files on this machine; open the store again"
            )
        return np.frombuffer(data, np.int64)

    def record(self, numbers: Iterable[int], *, sign: int) -> None:
        """Record that shards are here (1), are to be fetched (-1), or are not here (0)."""
        with closing(OpenFiles(f"{self.directory}/.")) as files:
            for number in numbers:
                data = struct.pack("q", sign * int(self.num_bytes[number]))
                write_all(files.open(RECORDS), memoryview(data), 8 * number)

    def missing(self, numbers: Integers) -> Integers:
        """Those of some shards that are not here."""
        missing: Integers = numbers[self.records()[numbers] <= 0]
        return missing

    def fetch(
        self,
        numbers: Integers,
        what: str,
        *,
        hidden: bool,
        note: Callable[[], None] | None = None,
        stop: Event | None = None,
    ) -> None:
        """Fetch shards, several at once, and show the progress unless it is hidden.

        With ``note``, which is called after each of them, they come in their order.
        """
        order, stop = numbers.tolist(), stop or Event()
        if note is None:
            # In another order than other processes that fetch the same, to share the work.
            order = random.Random(os.getpid()).sample(order, len(order))
        num_bytes = int(self.num_bytes[order].sum())
        with (
            show_progress(what, num_bytes, 1, hidden=hidden) as advance,
            threads(min(_NUM_THREADS, max(1, len(order)))) as pool,
        ):
            try:
                fetched = [pool.submit(self._fetch, number, advance, stop) for number in order]
                for future in as_completed(fetched):
                    future.result()
                    if note is not None:
                        note()
            finally:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, number: int, advance: Callable[[int], None], stop: Event) -> None:
        with closing(OpenFiles(f"{self.directory}/.")) as files:
            # Others who fetch this shard wait. The lock is of this descriptor, not of the process:
            # threads wait for each other too.
            lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 8 * number, 8, 0)
            fcntl.fcntl(files.open(RECORDS), fcntl.F_OFD_SETLKW, lock)
            if self._is_here(number):
                return

            def written() -> Iterator[bytes]:
                for name, first, data in self._read(number):
                    # A program waits for these threads at its end.
                    if stop.is_set() or not main_thread().is_alive():
                        raise CancelledError
                    write_all(files.open(name), memoryview(data), first)
                    yield data

            # Twice: what lies between may have changed them.
            if not any(self._is_right(number, written(), advance) for _ in range(2)):
                raise self._damaged(number)
            field, shard = divmod(number, self.manifest.num_shards)
            for name, first, data in self.manifest.columns[field].edge_bytes(shard):
                write_all(files.open(name), memoryview(data), first)
            files.sync()
            self.record([number], sign=1)

    def verify(self, number: int, advance: Callable[[int], None]) -> bool:
        """Whether a shard has the bytes of its checksum, here or at its server."""
        is_here = self._is_here(number)
        is_right = self._is_right(number, (data for _, _, data in self._read(number)), advance)
        if is_here and not is_right:
            self.record([number], sign=0)
        return is_right

    def read_index(self, field: int) -> Integers:
        """Read where the rows of a field end that differ in length."""

        def read(number: int) -> bytes:
            return b"".join(data for _, _, data in self._read(number, 1))

        numbers = self.numbers([field], range(self.manifest.num_shards))
        with threads(_NUM_THREADS) as pool:
            index = b"".join(pool.map(read, numbers.tolist()))
        for shard, number in enumerate(numbers.tolist()):
            for _, first, end in self.manifest.columns[field].edge_bytes(shard):
                if index[first : first + len(end)] != end:
                    raise self._damaged(number - 1)
        return np.frombuffer(index, np.int64)

    def _is_here(self, number: int) -> bool:
        return bool(self.records(number, 1)[0] > 0)

    def _is_right(
        self, number: int, pieces: Iterable[bytes], advance: Callable[[int], None]
    ) -> bool:
        """Compare a shard with its checksum. It is an error where its store was replaced."""
        digest = xxhash.xxh3_64()
        for data in pieces:
            digest.update(data)
            advance(len(data))
        field, shard = divmod(number, self.manifest.num_shards)
        name = self.manifest.columns[field].field.name
        size = digest.digest_size
        if digest.digest() == self.manifest.checksums[name][size * shard : size * (shard + 1)]:
            return True
        if not self._is_here(number):
            if error := self.changed():
                raise error
            _log.warning("field %r, shard %s: other bytes than those of its checksum", name, shard)
        return False

    def _read(self, number: int, count: int | None = None) -> Iterator[tuple[str, int, bytes]]:
        """Read a shard, or its first pieces: from here, or from its server."""
        is_here = self._is_here(number)
        for name, start, end in self._pieces[number][:count]:
            for first in range(start, end, _READ_BYTES):
                last = min(first + _READ_BYTES, end)
                if is_here:
                    with open(open_plain(self.directory / name), "rb", buffering=0) as file:
                        yield name, first, os.pread(file.fileno(), last - first, first)
                    continue
                try:
                    at = f"{self.manifest.generation}/{name}"
                    yield name, first, self.files.read(at, first, last)
                except StoreNotFoundError as error:
                    raise self.changed() or StoreError(
                        f"the store at {self.files.url} is not whole: {at} is missing there, which"
                        " its manifest names: push the store again, with overwrite=True, or let"
                        " its owner restore the file"
                    ) from error

    def changed(self) -> MemmapError | None:
        """What has become of the store since its manifest was read; None where it is the same."""
        url = self.files.url
        try:
            if read_manifest(self.files) == self.manifest:
                return None
        except UnreachableError as error:
            return error
        except StoreNotFoundError:
            return StoreNotFoundError(f"the store at {url} was removed meanwhile")
        except StoreError:
            pass
        return StoreError(f"the store at {url} was replaced meanwhile: open it again")

    def _damaged(self, number: int) -> MemmapError:
        """The error for a shard of other bytes than those that its manifest tells."""
        field, shard = divmod(number, self.manifest.num_shards)
        return self.changed() or StoreError(
            f"the store at {self.files.url} is damaged: the bytes of field"
            f" {self.manifest.columns[field].field.name!r}, shard {shard} are not those of its"
            " checksum: check the store that was pushed (`lightning-memmap store verify`), and push"
            " it again, with overwrite=True"
        )


def read_manifest(files: RemoteFiles) -> Manifest:
    """Read the manifest of a store from its server. A damaged one is a StoreError."""
    try:
        data = files.read(MANIFEST, 0, MAX_MANIFEST_BYTES + 1, patience_s=_PATIENCE_S)
    except StoreNotFoundError as error:
        raise StoreNotFoundError(
            f"no store at {files.url}: {str(error).rstrip('.')}: build it in a directory, and"
            f" push it with `lightning-memmap store push DIRECTORY {files.url}`"
        ) from error
    return Manifest.decode(data, str(files.url))


def copy_name(manifest: Manifest, replaced: bytes | None = None) -> str:
    """The name of the generation of a copy, which is the same when the copy is begun again."""
    return f"g-{hashlib.sha256(manifest.encode() + (replaced or b'')).hexdigest()[:16]}"


def make_records(directory: Path, manifest: Manifest) -> None:
    """Record in a directory that no shard of a store is there yet."""
    with open(directory / RECORDS, "xb") as file:
        file.truncate(8 * len(manifest.columns) * manifest.num_shards)
