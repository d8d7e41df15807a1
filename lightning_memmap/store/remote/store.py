"""An open store at a URL, whose shards are fetched into the cache when they are needed."""

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Condition, Event, Thread
from typing import Any

import numpy as np
from typing_extensions import override

from lightning_memmap.errors import StoreError
from lightning_memmap.sampling import Integers
from lightning_memmap.store.open_columns import ItemRows, OpenColumn, Supplied
from lightning_memmap.store.places import StoreUrl, place_of
from lightning_memmap.store.remote.cache import CachedShards
from lightning_memmap.store.store import Store, Supply, open_directory
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

    def __init__(
        self, url: StoreUrl, generation: str | None = None, *, meanwhile: bool = False
    ) -> None:
        shards = CachedShards(url)
        if generation not in (None, shards.manifest.generation):
            raise StoreError(f"the store at {url} was replaced meanwhile: open it again")
        columns = [
            Supplied(column.open(shards.directory), partial(_get, shards, index))
            for index, column in enumerate(shards.manifest.columns)
        ]
        super().__init__(shards.path, shards.manifest, columns)
        # Whatever the name of the directory leads to by now.
        self.files = shards.directory
        self._shards = shards
        if meanwhile and min(shards.records(), default=1) <= 0:
            self.supply = _Fetching(shards)

    @property
    @override
    def location(self) -> str:
        return str(self._shards.files.url)

    @override
    def provide(self, fields: Collection[str] | None, shards: Collection[int]) -> list[OpenColumn]:
        if fields is None and isinstance(self.supply, _Fetching):
            self.supply.needed = [*shards]
        else:
            names = [field.name for field in self.schema.fields]
            found = [index for index, name in enumerate(names) if fields is None or name in fields]
            self._shards.require(found, shards)
        return super().provide(fields, shards)

    @property
    @override
    def whole(self) -> Store:
        found = copy.copy(self)
        found.supply = None
        return found

    @override
    def finished(self) -> Store | None:
        return self.whole if self.supply is None or self.supply.share == 1.0 else None

    @override
    def lengths(self, field: str) -> Integers:
        index = self._index_of(field)
        (column,) = super().provide([field], ())
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


def _get(shards: CachedShards, field: int, rows: Integers | None) -> None:
    """Fetch the shards of some rows of a field, or all."""
    count = shards.manifest.num_shards
    shards.require([field], range(count) if rows is None else np.unique(rows % count).tolist())


class _Fetching(Supply):
    """Fetches shards in the order in which they are needed, while rows of others are read."""

    def __init__(self, shards: CachedShards) -> None:
        self._shards, self._fields = shards, range(len(shards.manifest.columns))
        #: The shards whose rows are read.
        self.needed: Sequence[int] = ()
        self._changed, self._stop = Condition(), Event()
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    @property
    @override
    def share(self) -> float:
        numbers = self._shards.numbers(self._fields, self.needed)
        return 1.0 - len(self._shards.missing(numbers)) / max(1, len(numbers))

    @override
    def want(self, rows: Integers) -> None:
        # The first rows that are wanted say in which order shards are: in an epoch, all come soon.
        if self._thread is None and self.needed:
            shards, firsts = np.unique(rows % self._shards.manifest.num_shards, return_index=True)
            order = dict.fromkeys([*shards[np.argsort(firsts)].tolist(), *self.needed])
            run = partial(self._run, [*order], self._stop)
            self._thread = Thread(target=run, name="lightning_memmap fetch", daemon=True)
            self._thread.start()

    def _run(self, shards: list[int], stop: Event) -> None:
        try:
            self._shards.require(self._fields, shards, meanwhile=self._note, stop=stop)
        except BaseException as error:  # Whoever waits for rows must get it.
            if stop is self._stop:  # Or else it was closed, and nobody waits for these.
                self._error = error
        self._note(None)

    def _note(self, _: object) -> None:
        with self._changed:
            self._changed.notify_all()

    @override
    def wait(self, rows: Integers) -> None:
        shards = np.unique(rows % self._shards.manifest.num_shards).tolist()
        numbers = self._shards.numbers(self._fields, shards)
        with self._changed:
            self._changed.wait_for(lambda: self._error or not self._shards.missing(numbers))
        if self._error is not None:
            raise self._error

    @override
    def close(self) -> None:
        self._stop.set()
        self._stop, self._thread, self._error = Event(), None, None
