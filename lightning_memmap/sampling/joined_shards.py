"""The rows of several stores as those of one dataset, and the shards that they are divided into."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from typing_extensions import override

from lightning_memmap.sampling.line_shards import LineShards, as_rows
from lightning_memmap.sampling.shards import Integers, Shards
from lightning_memmap.sampling.subset import RowSubset


@dataclass(frozen=True)
class JoinedRows(RowSubset):
    """Some rows of each of several stores.

    Args:
        names: The names of the stores.
        sizes: The rows of each store.
        subsets: Which of them these are; all where it is None.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    subsets: tuple[RowSubset | None, ...]

    @property
    @override
    def identity(self) -> dict[str, Any]:
        pairs = zip(self.names, self.subsets, strict=True)
        return {name: None if subset is None else subset.identity for name, subset in pairs}

    @cached_property
    def chosen_sizes(self) -> list[int]:
        """How many rows of each store these are."""
        pairs = zip(self.subsets, self.sizes, strict=True)
        return [size if subset is None else subset.num_rows(size) for subset, size in pairs]

    @override
    def num_rows(self, num_rows: int) -> int:
        return sum(self.chosen_sizes)

    @override
    def rows(self, numbers: Integers) -> Integers:
        ends, found = np.cumsum(self.chosen_sizes), np.empty_like(numbers)
        stores = np.searchsorted(ends, numbers, side="right")
        firsts = _firsts(self.sizes)
        for store, subset in enumerate(self.subsets):
            here = stores == store
            within = numbers[here] - ends[store] + self.chosen_sizes[store]
            found[here] = firsts[store] + (within if subset is None else subset.rows(within))
        return found


@dataclass(frozen=True, kw_only=True)
class JoinedShards(LineShards):
    """The rows of several stores, numbered one store after the other, and divided into shards.

    The files of the stores lie on a line, one after the other.

    Args:
        num_rows: Rows of all stores together.
        num_shards: Shards, ``C``.
        subset: Which rows of the stores these are; all of them where it is None.
        stores: The names of the stores.
        parts: The rows of each store, and the shards that they are divided into.
    """

    subset: JoinedRows | None = None
    stores: tuple[str, ...]
    parts: tuple[Shards, ...]

    @property
    @override
    def identity(self) -> dict[str, Any]:
        sizes = {name: part.num_rows for name, part in zip(self.stores, self.parts, strict=True)}
        return {**super().identity, "stores": sizes}

    @cached_property
    def firsts(self) -> Integers:
        """The first place of each store on the line, int64 of shape (stores,)."""
        return _firsts([part.num_rows for part in self.parts])

    @cached_property
    def _first_rows(self) -> Integers:
        """The first row of each store, int64 of shape (stores,)."""
        return self.firsts if self.subset is None else _firsts(self.subset.sizes)

    def stores_of(self, rows: Integers) -> Integers:
        """The store of each row.

        Args:
            rows: Rows of the stores, int64 of shape (B,).

        Returns:
            Numbers of stores, int64 of shape (B,).
        """
        return np.searchsorted(self._first_rows, rows, side="right") - 1

    @override
    def names(self, rows: Integers) -> list[Any]:
        stores = self.stores_of(rows)
        within = (rows - self._first_rows[stores]).tolist()
        return [
            [self.stores[store], row] for store, row in zip(stores.tolist(), within, strict=True)
        ]

    @override
    def dataset_rows(self, shards: Integers, offsets: Integers) -> Integers:
        rows = super().dataset_rows(shards, offsets)
        return self.subset.rows(rows) if self.subset is not None and self.is_ordered else rows

    @override
    def dataset_rows_at(self, locations: Integers) -> Integers:
        rows = self.rows_at(locations)
        return rows if self.subset is None else self.subset.rows(rows)

    @override
    def rows_at(self, locations: Integers) -> Integers:
        return self._by_store(locations, Shards.rows_at)

    @override
    def locate(self, rows: range | Integers) -> Integers:
        return self._by_store(as_rows(rows), Shards.locate)

    def _by_store(self, numbers: Integers, function: Any) -> Integers:
        stores = np.searchsorted(self.firsts, numbers, side="right") - 1
        found = np.empty_like(numbers)
        for store, (first, part) in enumerate(zip(self.firsts, self.parts, strict=True)):
            here = stores == store
            found[here] = function(part, numbers[here] - first) + first
        return found


def _firsts(sizes: Sequence[int]) -> Integers:
    """Where each of several parts begins that lie one after the other."""
    firsts: Integers = np.cumsum(sizes, dtype=np.int64) - np.array(sizes, np.int64)
    return firsts
