"""Shards of a store at a URL, downloaded into local files and compared with their checksums.

The local files are sparse and have their full sizes. Shards that are not downloaded are holes,
which must not be read. The file `RECORDS` in the same directory has an int64 for each shard of each
field: its size in bytes (at least 1) once it is on the disk, minus its size while it is reserved
for a download, and 0 before. An interrupted download resumes with the next shard.
"""

import fcntl
import hashlib
import logging
import os
import random
import struct
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, as_completed
from contextlib import closing
from functools import cached_property
from pathlib import Path
from threading import Event, main_thread

import numpy as np
import xxhash

from lightning_memmap.errors import MemmapError, StoreError, StoreNotFoundError
from lightning_memmap.integers import Integers
from lightning_memmap.store.checksums import Chunk
from lightning_memmap.store.columns import VariableColumn
from lightning_memmap.store.files import TEMPORARY, OpenFiles, open_plain, write_all
from lightning_memmap.store.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest
from lightning_memmap.store.progress import show_progress
from lightning_memmap.store.remote.files import RemoteFiles, UnreachableError
from lightning_memmap.store.workers import start_threads

#: The name of the records. A pull keeps them until its store is committed.
RECORDS = "shards" + TEMPORARY
#: Shards that are downloaded at once.
_NUM_THREADS = 8
#: Bytes of one read, which is repeated if a connection breaks.
_READ_BYTES = 8 * 2**20
#: How long to wait for a manifest: as long as some libraries try to connect.
_PATIENCE_S = 5.0
_log = logging.getLogger(__name__)


class RemoteShards:
    """The shards of one store at a URL, downloaded into the files of a directory.

    A field shard is the index of one shard of one field, field by field: ``f * C + s`` for shard
    ``s`` of field ``f`` of the schema.
    """

    def __init__(self, files: RemoteFiles, manifest: Manifest, directory: Path) -> None:
        self.files = files
        self.manifest = manifest
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(directory, flags)
        weakref.finalize(self, os.close, descriptor)
        #: The directory by its descriptor: the path may have been replaced.
        self.directory = Path(f"/proc/self/fd/{descriptor}")
        self._records = open_plain(self.directory / RECORDS)
        weakref.finalize(self, os.close, self._records)

    def field_shards(self, fields: Sequence[int], shards: Sequence[int] | Integers) -> Integers:
        """Return the field shards of some shards of some fields, by their index in the schema."""
        starts = np.array(fields, np.int64) * self.manifest.num_shards
        return (np.asarray(shards, np.int64)[:, None] + starts).ravel()

    @cached_property
    def num_bytes(self) -> Integers:
        """The bytes of each shard, at least 1, int64 of shape (fields x shards,)."""
        sizes = np.zeros((len(self.manifest.columns), self.manifest.num_shards), np.int64)
        for field, column in enumerate(self.manifest.columns):
            for bounds in column.bounds.values():
                sizes[field] += np.diff(bounds)
        return np.maximum(sizes.ravel(), 1)

    def records(self, first: int = 0, count: int | None = None) -> Integers:
        """Read the records of shards, int64 of shape (count,); see above."""
        count = len(self.manifest.columns) * self.manifest.num_shards if count is None else count
        data = os.pread(self._records, 8 * count, 8 * first)
        if len(data) < 8 * count:
            raise StoreError(
                f"the records of the shards of {self.files.url} were truncated by another program."
                " Open the store again."
            )
        return np.frombuffer(data, np.int64)

    def record(self, field_shards: Iterable[int], *, sign: int) -> None:
        """Record that shards are downloaded (1), are reserved (-1), or neither (0)."""
        with closing(OpenFiles(f"{self.directory}/.")) as files:
            for field_shard in field_shards:
                data = struct.pack("q", sign * int(self.num_bytes[field_shard]))
                write_all(files.open(RECORDS), memoryview(data), 8 * field_shard)

    def missing(self, field_shards: Integers) -> Integers:
        """Return which of some shards are not downloaded."""
        missing: Integers = field_shards[self.records()[field_shards] <= 0]
        return missing

    def fetch(
        self,
        field_shards: Integers,
        what: str,
        *,
        hidden: bool,
        on_shard: Callable[[], None] | None = None,
        stop: Event | None = None,
    ) -> None:
        """Download shards, several at once.

        Args:
            field_shards: The shards. Without ``on_shard``, they are downloaded in random order.
            what: Label of the progress bar.
            hidden: Whether to show no progress bar.
            on_shard: Called after each shard.
            stop: Set to cancel the download.
        """
        order = field_shards.tolist()
        stop = stop or Event()
        if on_shard is None:
            # Processes that download the same shards share the work.
            order = random.Random(os.getpid()).sample(order, len(order))
        num_bytes = int(self.num_bytes[order].sum())
        with (
            show_progress(what, num_bytes, 1, hidden=hidden) as advance,
            start_threads(min(_NUM_THREADS, max(1, len(order)))) as pool,
        ):
            try:
                futures = [
                    pool.submit(self._fetch, field_shard, advance, stop) for field_shard in order
                ]
                for future in as_completed(futures):
                    future.result()
                    if on_shard is not None:
                        on_shard()
            finally:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, field_shard: int, advance: Callable[[int], None], stop: Event) -> None:
        with closing(OpenFiles(f"{self.directory}/.")) as files:
            # Others who download this shard wait. The lock belongs to this descriptor, not to the
            # process, so that threads wait for each other too.
            lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 8 * field_shard, 8, 0)
            fcntl.fcntl(files.open(RECORDS), fcntl.F_OFD_SETLKW, lock)
            if self._is_here(field_shard):
                return

            def receive(file: str, start: int, data: bytes) -> None:
                # A program cannot exit before these threads end.
                if stop.is_set() or not main_thread().is_alive():
                    raise CancelledError
                write_all(files.open(file), memoryview(data), start)
                advance(len(data))

            for chunk in self._chunks(field_shard):
                self._read_intact(field_shard, chunk, receive)
            field, shard = divmod(field_shard, self.manifest.num_shards)
            for name, first, data in self.manifest.columns[field].entries_before(shard):
                write_all(files.open(name), memoryview(data), first)
            files.sync()
            self.record([field_shard], sign=1)

    def damaged_chunks(self, field_shard: int, advance: Callable[[int], None]) -> list[Chunk]:
        """Return the chunks of a shard, here or on the server, that don't match their checksums."""

        def receive(file: str, start: int, data: bytes) -> None:
            advance(len(data))

        is_here = self._is_here(field_shard)
        chunks = self._chunks(field_shard)
        damaged = [chunk for chunk in chunks if not self._is_intact(field_shard, chunk, receive)]
        if is_here and damaged:
            self.record([field_shard], sign=0)
        return damaged

    def read_index(self, field: int) -> Integers:
        """Read the index of a field whose rows differ in length, int64, and check its checksums."""
        column = self.manifest.columns[field]
        assert isinstance(column, VariableColumn)

        index = bytearray(column.file_bytes[column.index_name])

        def receive(file: str, start: int, data: bytes) -> None:
            index[start : start + len(data)] = data

        def read(field_shard: int) -> None:
            for chunk in self._chunks(field_shard):
                if chunk.file == column.index_name:
                    self._read_intact(field_shard, chunk, receive)

        field_shards = self.field_shards([field], range(self.manifest.num_shards))
        with start_threads(_NUM_THREADS) as pool:
            list(pool.map(read, field_shards.tolist()))
        return np.frombuffer(index, np.int64)

    def _read_intact(
        self, field_shard: int, chunk: Chunk, receive: Callable[[str, int, bytes], None]
    ) -> None:
        """Read a chunk. Try twice, because the bytes may have been changed by the network."""
        if not any(self._is_intact(field_shard, chunk, receive) for _ in range(2)):
            raise self._make_damaged_error(field_shard)

    def _chunks(self, field_shard: int) -> list[Chunk]:
        field, shard = divmod(field_shard, self.manifest.num_shards)
        return self.manifest.chunks[field].of_shard(shard)

    def _is_here(self, field_shard: int) -> bool:
        return bool(self.records(field_shard, 1)[0] > 0)

    def _is_intact(
        self, field_shard: int, chunk: Chunk, receive: Callable[[str, int, bytes], None]
    ) -> bool:
        """Compare a chunk with its checksum. Raises if the store on the server was replaced.

        Args:
            field_shard: The shard of a field.
            chunk: The chunk.
            receive: Called with the file, the first byte and the data of each read.
        """
        digest = xxhash.xxh3_64()
        is_here = self._is_here(field_shard)
        for start in range(chunk.start, chunk.stop, _READ_BYTES):
            data = self._read(chunk.file, start, min(start + _READ_BYTES, chunk.stop), is_here)
            digest.update(data)
            receive(chunk.file, start, data)
        if digest.digest() == chunk.checksum:
            return True
        if not is_here:
            if error := self.make_error_if_changed():
                raise error
            _log.warning(
                "%s: bytes %s to %s don't match their checksum",
                self.files.url / self.manifest.generation / chunk.file,
                chunk.start,
                chunk.stop,
            )
        return False

    def _read(self, name: str, start: int, stop: int, is_here: bool) -> bytes:
        """Read bytes of a file, here or on the server."""
        if is_here:
            with open(open_plain(self.directory / name), "rb", buffering=0) as file:
                return os.pread(file.fileno(), stop - start, start)
        at = f"{self.manifest.generation}/{name}"
        try:
            return self.files.read(at, start, stop)
        except StoreNotFoundError as error:
            raise self.make_error_if_changed() or StoreError(
                f"the store at {self.files.url} lacks the file {at} of its manifest. Push the store"
                " again, with overwrite=True, or ask its owner to restore the file."
            ) from error

    def make_error_if_changed(self) -> MemmapError | None:
        """Make an error if the store on the server has changed since its manifest was read."""
        url = self.files.url
        try:
            if read_manifest(self.files) == self.manifest:
                return None
        except UnreachableError as error:
            return error
        except StoreNotFoundError:
            return StoreNotFoundError(f"the store at {url} was removed")
        except StoreError:
            pass
        return StoreError(f"the store at {url} was replaced: open it again")

    def _make_damaged_error(self, field_shard: int) -> MemmapError:
        """Make the error for a shard that doesn't match its checksum."""
        field, shard = divmod(field_shard, self.manifest.num_shards)
        return self.make_error_if_changed() or StoreError(
            f"the store at {self.files.url} is damaged: field"
            f" {self.manifest.columns[field].field.name!r}, shard {shard} doesn't match its"
            " checksum. Check the store that was pushed with `lightning-memmap store verify`, and"
            " push it again, with overwrite=True."
        )


def read_manifest(files: RemoteFiles) -> Manifest:
    """Read the manifest of a store from its server. Raises StoreError if it is damaged."""
    try:
        data = files.read(MANIFEST, 0, MAX_MANIFEST_BYTES + 1, patience_s=_PATIENCE_S)
    except StoreNotFoundError as error:
        raise StoreNotFoundError(
            f"no store at {files.url}: {str(error).rstrip('.')}. Build it in a directory, and push"
            f" it with `lightning-memmap store push DIRECTORY {files.url}`."
        ) from error
    return Manifest.decode(data, str(files.url))


def copy_name(manifest: Manifest, replaced: bytes | None = None) -> str:
    """Name the generation of a copy, so that an interrupted copy can be resumed."""
    return f"g-{hashlib.sha256(manifest.encode() + (replaced or b'')).hexdigest()[:16]}"


def make_records(directory: Path, manifest: Manifest) -> None:
    """Write the records of a directory that contains no shard of a store yet."""
    with open(directory / RECORDS, "xb") as file:
        file.truncate(8 * len(manifest.columns) * manifest.num_shards)
