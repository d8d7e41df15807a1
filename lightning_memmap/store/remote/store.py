"""An open store at a URL, whose shards are fetched into the cache when they are needed."""

import fcntl
import os
import weakref
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor
from typing_extensions import override

from lightning_memmap.errors import StoreError
from lightning_memmap.sampling import Integers
from lightning_memmap.store.columns import OpenColumn
from lightning_memmap.store.places import StoreUrl
from lightning_memmap.store.progress import show_progress
from lightning_memmap.store.remote.cache import IN_USE, Cache, unused
from lightning_memmap.store.remote.files import RemoteFiles, UnreachableError
from lightning_memmap.store.remote.shards import RemoteManifest, RemoteShards
from lightning_memmap.store.store import Store

#: A fetch of fewer bytes shows no progress.
_SHOWN_BYTES = 64 * 2**20


class CachedShards:
    """The shards of one store at a URL, fetched into the cache when they are asked for.

    The version that was opened stays in the cache as long as this object is there. `path` is its
    directory as it was named then, `directory` the same whatever has become of the name.
    """

    def __init__(self, url: StoreUrl) -> None:
        self.url, self._cache = url, Cache()
        self._files, self._is_checked = RemoteFiles(url), True
        try:
            remote = RemoteManifest.read(self._files)
        except UnreachableError as error:
            remote, self._is_checked = self._cache.last(url, error), False
        with self._cache.entered(remote, url, is_last=self._is_checked) as self.path:
            in_use = os.open(self.path / IN_USE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            weakref.finalize(self, os.close, in_use)
            self._shards = RemoteShards(remote, self._files, self.path)
            with suppress(OSError):  # A cache that cannot be written.
                os.utime(in_use)
                with unused(self.path) as is_first:
                    if is_first:  # What is still to come was for processes that were killed.
                        numbers = np.flatnonzero(self._shards.records() < 0)
                        self._shards.record([int(number) for number in numbers], sign=0)
            fcntl.flock(in_use, fcntl.LOCK_SH)
        self._remote, self.manifest = remote, remote.manifest
        self.directory = self._shards.directory
        self._known = self._shards.records()

    def require(self, fields: Collection[int], shards: Collection[int]) -> None:
        """Fetch the shards that are not yet here, of fields by their place in the schema.

        Raises:
            StoreNotFoundError: The store is gone.
            StoreError: It cannot be reached, was replaced, or is damaged; or the cache has no room,
                was removed, or cannot be written.
        """
        if all(self._known[field, shard] > 0 for field in fields for shard in shards):
            return
        with self._cache.usable():
            if missing := self._shards.missing(fields, shards):
                # Before stores are removed to make room for what cannot be fetched.
                self._check(len(missing))
                self._cache.reserve(self._shards, lambda: self._shards.missing(fields, shards))
                num_bytes = int(self._shards.num_bytes(missing).sum())
                hidden = num_bytes < _SHOWN_BYTES
                with show_progress("fetching", num_bytes, 1, hidden=hidden) as advance:
                    self._shards.fetch(missing, advance)
            self._known = self._shards.records()

    def verify(self, number: int, advance: Callable[[int], None]) -> bool:
        """See `RemoteShards.verify`."""
        with self._cache.usable():
            return self._shards.verify(number, advance)

    def _check(self, num_missing: int) -> None:
        """Compare the manifest with the server's, if it is from the cache."""
        if self._is_checked:
            return
        try:
            found = RemoteManifest.read(self._files).data
        except UnreachableError as error:
            raise UnreachableError(
                f"{num_missing} shards of fields that are needed are not in the cache at"
                f" {self._cache.directory}, and {error}"
            ) from error
        if found != self._remote.data:
            raise StoreError(
                f"the store at {self.url} is another one by now than that in the cache, and shards"
                " of that are missing: open it again"
            )
        self._is_checked = True


class RemoteStore(Store):
    """An open store at a URL. Use `lightning_memmap.store.open_store` to get one.

    Opening it reads the manifest. Rows are read from the cache: a shard of a field is fetched when
    a row of it is asked for.
    """

    def __init__(self, url: StoreUrl) -> None:
        shards = CachedShards(url)
        mapped = [column.open(shards.directory) for column in shards.manifest.columns]
        fetched = [_Fetched(column, index, shards) for index, column in enumerate(mapped)]
        super().__init__(shards.path, shards.manifest, fetched)
        # Whatever the name of the directory leads to by now.
        self.files = shards.directory
        self._shards, self._mapped = shards, mapped

    @property
    @override
    def location(self) -> str:
        return str(self._shards.url)

    @override
    def provide(self, fields: Collection[str] | None, shards: Collection[int]) -> list[OpenColumn]:
        names = [field.name for field in self.schema.fields]
        found = [index for index, name in enumerate(names) if fields is None or name in fields]
        self._shards.require(found, shards)
        return [self._mapped[index] for index in found]

    def damaged(self, num_threads: int, advance: Callable[[int], None]) -> list[tuple[str, int]]:
        """Compare the shards here with their checksums, and read the others from the server.

        Returns:
            Field and shard of those that are damaged. What was here is fetched again when it is
            next needed.
        """
        names = [field.name for field in self.schema.fields]
        pairs = [(name, shard) for name in names for shard in range(self.num_shards)]
        with ThreadPoolExecutor(num_threads) as pool:
            verify = partial(self._shards.verify, advance=advance)
            are_right = list(pool.map(verify, range(len(pairs))))
        return [pair for pair, is_right in zip(pairs, are_right, strict=True) if not is_right]

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteStore, (self._shards.url,)


@dataclass(frozen=True)
class _Fetched:
    """A column whose rows are fetched before they are read."""

    column: OpenColumn
    index: int
    shards: CachedShards

    @property
    def tensor(self) -> Tensor:
        """All rows."""
        self._require(range(self.shards.manifest.num_shards))
        return self.column.tensor

    def row(self, row: int) -> Tensor:
        """A copy of one row."""
        self._require([row % self.shards.manifest.num_shards])
        return self.column.row(row)

    def fetch(self, rows: Integers) -> Tensor | list[Tensor]:
        """Copies of rows."""
        self._require(np.unique(rows % self.shards.manifest.num_shards).tolist())
        return self.column.fetch(rows)

    def _require(self, shards: Iterable[int]) -> None:
        self.shards.require([self.index], [*shards])
