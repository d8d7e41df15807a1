"""An open store at a URL, whose shards are fetched into the cache when they are needed."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from typing_extensions import override

from lightning_memmap.errors import StoreError
from lightning_memmap.sampling import Integers
from lightning_memmap.store.open_columns import ItemRows, OpenColumn
from lightning_memmap.store.places import StoreUrl, place_of
from lightning_memmap.store.remote.cache import CachedShards
from lightning_memmap.store.store import Store, open_directory
from lightning_memmap.store.workers import threads


def open_store(path: str | Path) -> Store:
    """Open a store for reading.

    Of a store at a URL, the manifest is read now, and each shard when a row of it is needed, once:
    it is kept in a cache on this machine. The environment variable ``LIGHTNING_MEMMAP_CACHE`` names
    its directory, by default ``~/.cache/lightning_memmap``, and ``LIGHTNING_MEMMAP_CACHE_SIZE`` the
    most bytes in it, such as ``500GiB``. Where nobody answers at the URL, or
    ``LIGHTNING_MEMMAP_OFFLINE`` is ``1``, the store is opened in the version in the cache that its
    server gave last.

    Args:
        path: Directory of the store, or its URL, such as ``s3://bucket/stores/train``.

    Returns:
        The store, its files mapped and no row read.

    Raises:
        StoreNotFoundError: There is no store at this path.
        StoreError: The manifest is damaged or of another version, or a file is missing, linked, of
            the wrong size, or cannot be read; or the URL cannot be reached.
        ValueError: No library knows the protocol of the URL.
    """
    place = place_of(path)
    return RemoteStore(place) if isinstance(place, StoreUrl) else open_directory(place)


class RemoteStore(Store):
    """An open store at a URL. Use `lightning_memmap.store.open_store` to get one."""

    def __init__(self, url: StoreUrl, generation: str | None = None) -> None:
        shards = CachedShards(url)
        if generation not in (None, shards.manifest.generation):
            raise StoreError(f"the store at {url} was replaced meanwhile: open it again")
        mapped = [column.open(shards.directory) for column in shards.manifest.columns]
        fetched = [_Fetched(column, index, shards) for index, column in enumerate(mapped)]
        super().__init__(shards.path, shards.manifest, fetched)
        # Whatever the name of the directory leads to by now.
        self.files = shards.directory
        self._shards, self._mapped = shards, mapped

    @property
    @override
    def location(self) -> str:
        return str(self._shards.files.url)

    @override
    def provide(self, fields: Collection[str] | None, shards: Collection[int]) -> list[OpenColumn]:
        names = [field.name for field in self.schema.fields]
        found = [index for index, name in enumerate(names) if fields is None or name in fields]
        self._shards.require(found, shards)
        return [self._mapped[index] for index in found]

    @override
    def lengths(self, field: str) -> Integers:
        index = self._index_of(field)
        column = self._mapped[index]
        if not isinstance(column, ItemRows):
            return super().lengths(field)
        ends = self._shards.read_index(index).reshape(column.index.shape)
        return replace(column, index=ends).lengths()

    def damaged(self, num_threads: int, advance: Callable[[int], None]) -> list[tuple[str, int]]:
        """Compare the shards here with their checksums, and read the others from the server."""
        pairs = [
            (field.name, shard) for field in self.schema.fields for shard in range(self.num_shards)
        ]
        with threads(num_threads) as pool:
            verify = partial(self._shards.verify, advance=advance)
            are_right = list(pool.map(verify, range(len(pairs))))
        return [pair for pair, is_right in zip(pairs, are_right, strict=True) if not is_right]

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteStore, (self._shards.files.url, self.manifest.generation)


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
