"""Shards of a store at a URL, fetched into local files and compared with their checksums.

The local files have the sizes of the whole ones. What was not fetched is a hole in them, and must
not be read. Beside them, a byte for each field and shard says whether it is there. It is set once
the bytes are on the disk, so that a fetch that was interrupted goes on with the next shard.
"""

import logging
import os
import random
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from threading import Event

import numpy as np
import xxhash
from numpy.typing import NDArray

from lightning_memmap.errors import MemmapError, StoreError, StoreNotFoundError
from lightning_memmap.sampling import Integers
from lightning_memmap.store.columns import FileRange
from lightning_memmap.store.files import OpenFiles, write_all
from lightning_memmap.store.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest
from lightning_memmap.store.places import StoreUrl
from lightning_memmap.store.remote.files import RemoteFiles, UnreachableError

#: States of a shard of a field.
ABSENT, RESERVED, FETCHED = 0, 1, 2
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
    """The manifest of a store at a URL.

    Args:
        data: Its bytes.
        url: The URL.

    Attributes:
        data: Its bytes.
        manifest: What it says.

    Raises:
        StoreError: It is damaged.
    """

    def __init__(self, data: bytes, url: StoreUrl) -> None:
        self.data, self.manifest = data, Manifest.decode(data, str(url))

    @classmethod
    def read(cls, files: RemoteFiles) -> "RemoteManifest":
        """Read it from its server.

        Args:
            files: The directory.

        Raises:
            StoreNotFoundError: There is no store.
            UnreachableError: The directory cannot be reached.
            StoreError: Access is refused, or the manifest is damaged.
        """
        try:
            data = files.read(MANIFEST, 0, MAX_MANIFEST_BYTES + 1, patience_s=_PATIENCE_S)
        except StoreNotFoundError as error:
            raise StoreNotFoundError(
                f"no store at {files.url}: {str(error).rstrip('.')}: build it in a directory, and"
                f" push it with `lightning-memmap store push DIRECTORY {files.url}`"
            ) from error
        return cls(data, files.url)


class ShardFetcher:
    """Fetches shards of one store into files of one directory.

    Several threads may use it at once.

    Args:
        remote: The store.
        files: Where it is.
        directory: The files here, which have their sizes already.
        states: The file with the state of each field and shard.
        lock: Makes a lock, given the number of a shard of a field: no two processes fetch it at
            once.
    """

    def __init__(
        self,
        remote: RemoteManifest,
        files: RemoteFiles,
        directory: Path,
        states: Path,
        lock: Callable[[int], AbstractContextManager[object]],
    ) -> None:
        self.manifest = remote.manifest
        self._remote, self._files = remote, files
        self._directory, self._states, self._lock = directory, states, lock

    @cached_property
    def _ranges(self) -> list[list[list[FileRange]]]:
        """The pieces of files of each field and shard."""
        return [
            [list(pieces) for pieces in column.shard_ranges()] for column in self.manifest.columns
        ]

    def read_states(self) -> NDArray[np.uint8]:
        """The state of each shard of each field, uint8 of shape (fields, shards)."""
        shape = len(self.manifest.columns), self.manifest.num_shards
        return np.fromfile(self._states, np.uint8).reshape(shape)

    def absent(
        self, fields: Collection[int], shards: Collection[int], state: int = FETCHED
    ) -> list[int]:
        """Find the shards that have not come as far as a state.

        Args:
            fields: The fields, by their place in the schema.
            shards: The shards.
            state: The state.

        Returns:
            Numbers of shards of fields: that of the field times the number of shards, plus that of
            the shard.
        """
        wanted = np.zeros((len(self.manifest.columns), self.manifest.num_shards), bool)
        wanted[np.ix_(np.array([*fields], np.int64), np.array([*shards], np.int64))] = True
        found: Integers = np.flatnonzero(wanted & (self.read_states() < state))
        return [int(number) for number in found]

    def num_bytes(self, numbers: Iterable[int]) -> int:
        """Bytes of shards of fields.

        Args:
            numbers: Their numbers.
        """
        return sum(end - start for number in numbers for _, start, end in self._pieces(number))

    def mark(self, numbers: Iterable[int], state: int) -> None:
        """Set the state of shards of fields.

        Args:
            numbers: Their numbers.
            state: The state.
        """
        descriptor = os.open(self._states, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            for number in numbers:
                os.pwrite(descriptor, bytes([state]), number)
        finally:
            os.close(descriptor)

    def fetch(self, numbers: Collection[int], advance: Callable[[int], None]) -> None:
        """Fetch shards of fields, several at once.

        Args:
            numbers: Their numbers.
            advance: Called with the number of bytes fetched since the last call, from threads.

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

    def _pieces(self, number: int) -> list[FileRange]:
        field, shard = divmod(number, self.manifest.num_shards)
        return self._ranges[field][shard]

    def _fetch(self, number: int, advance: Callable[[int], None], stop: Event) -> None:
        field, shard = divmod(number, self.manifest.num_shards)
        column, files = self.manifest.columns[field], OpenFiles(self._directory)
        try:
            with self._lock(number):
                if self.read_states()[field, shard] == FETCHED:  # By another process.
                    return
                for left in reversed(range(_NUM_COPIES)):
                    digest = self._copy(number, files, advance, stop)
                    if digest is None:
                        return
                    if digest == self.manifest.checksums[column.field.name][shard]:
                        break
                    if (error := self._changed()) or not left:
                        raise error or self._damaged(column.field.name, shard)
                    _log.warning(
                        "the bytes of field %r, shard %s are not those of its checksum: fetching"
                        " them again",
                        column.field.name,
                        shard,
                    )
                for name, first, data in column.edge_bytes(shard):
                    write_all(files.open(name), memoryview(data), first)
                files.sync()
                self.mark([number], FETCHED)
        finally:
            files.close()

    def _copy(
        self, number: int, files: OpenFiles, advance: Callable[[int], None], stop: Event
    ) -> str | None:
        """Copy the bytes of a shard of a field.

        Returns:
            Their hash; None where it was told to stop before the end.
        """
        digest = xxhash.xxh3_64()
        try:
            for name, start, end in self._pieces(number):
                for first in range(start, end, _READ_BYTES):
                    if stop.is_set():
                        return None
                    there = f"{self.manifest.generation}/{name}"
                    data = self._files.read(there, first, min(first + _READ_BYTES, end))
                    digest.update(data)
                    write_all(files.open(name), memoryview(data), first)
                    advance(len(data))
        except StoreNotFoundError as error:
            field, shard = divmod(number, self.manifest.num_shards)
            damaged = self._damaged(self.manifest.columns[field].field.name, shard)
            raise self._changed() or damaged from error
        return digest.hexdigest()

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

    def _damaged(self, field: str, shard: int) -> StoreError:
        return StoreError(
            f"the store at {self._files.url} is damaged: the bytes of field {field!r}, shard"
            f" {shard} are not those of its checksum: check the store that was pushed"
            " (`lightning-memmap store verify`), and push it again, with overwrite=True"
        )
