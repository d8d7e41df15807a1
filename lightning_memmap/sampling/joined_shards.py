"""The rows of several stores as those of one dataset, and the shards that they are divided into."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from typing_extensions import override

from lightning_memmap.sampling.line_shards import LineShards, as_rows
from lightning_memmap.sampling.shards import Integers, Shards


@dataclass(frozen=True, kw_only=True)
class JoinedShards(LineShards):
    """The rows of several stores, numbered one store after the other, and divided into shards.

    The files of the stores lie on a line, one after the other.

    Args:
        num_rows: Rows of all stores together.
        num_shards: Shards, ``C``.
        subset: None.
        stores: The names of the stores.
        parts: The rows of each store, and the shards that they are divided into.
    """

    stores: tuple[str, ...]
    parts: tuple[Shards, ...]

    @property
    @override
    def identity(self) -> dict[str, Any]:
        sizes = {name: part.num_rows for name, part in zip(self.stores, self.parts, strict=True)}
        return {**super().identity, "stores": sizes}

    @cached_property
    def firsts(self) -> Integers:
        """The first row of each store, int64 of shape (stores,)."""
        sizes = np.array([part.num_rows for part in self.parts], np.int64)
        firsts: Integers = np.cumsum(sizes) - sizes
        return firsts

    def stores_of(self, rows: Integers) -> Integers:
        """The store of each row, or of each place on the line.

        Args:
            rows: Rows or places, int64 of shape (B,).

        Returns:
            Numbers of stores, int64 of shape (B,).
        """
        return np.searchsorted(self.firsts, rows, side="right") - 1

    @override
    def names(self, rows: Integers) -> list[Any]:
        stores = self.stores_of(rows)
        within = (rows - self.firsts[stores]).tolist()
        return [
            [self.stores[store], row] for store, row in zip(stores.tolist(), within, strict=True)
        ]

    @override
    def dataset_rows_at(self, locations: Integers) -> Integers:
        return self._by_store(locations, Shards.rows_at)

    @override
    def rows_at(self, locations: Integers) -> Integers:
        return self.dataset_rows_at(locations)

    @override
    def locate(self, rows: range | Integers) -> Integers:
        return self._by_store(as_rows(rows), Shards.locate)

    def _by_store(self, numbers: Integers, function: Any) -> Integers:
        stores = self.stores_of(numbers)
        found = np.empty_like(numbers)
        for store, (first, part) in enumerate(zip(self.firsts, self.parts, strict=True)):
            here = stores == store
            found[here] = function(part, numbers[here] - first) + first
        return found
