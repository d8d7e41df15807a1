"""How rows are divided into shards: row ``i`` is at offset ``i // C`` of shard ``i % C``."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_memmap.sampling.subset import RowSubset

Integers = NDArray[np.int64]


def shard_rows(num_rows: int, num_shards: int) -> Integers:
    """Count the rows of each shard: row ``i`` is in shard ``i % num_shards``.

    Args:
        num_rows: Rows, ``N``.
        num_shards: Shards, ``C``, at least 1.

    Returns:
        int64 array of shape (num_shards,) that sums to ``num_rows``.
    """
    shards = np.arange(num_shards, dtype=np.int64)
    return (num_rows - shards + num_shards - 1) // num_shards


def shard_starts(num_rows: int, num_shards: int) -> Integers:
    """Where each shard starts in a file that holds shard 0's rows, then shard 1's, and so on.

    Args:
        num_rows: Rows, ``N``.
        num_shards: Shards, ``C``, at least 1.

    Returns:
        int64 array of shape (num_shards,), in rows.
    """
    rows = shard_rows(num_rows, num_shards)
    return np.cumsum(rows) - rows


def striping(num_shards: int, num_data_devices: int) -> int:
    """The number of shards to divide rows into so that the data devices divide that number.

    Args:
        num_shards: Shards of the store.
        num_data_devices: Data devices of all processes.

    Returns:
        ``num_shards`` where ``num_data_devices`` divides it, else the next multiple of
        ``num_data_devices``: the rows are then re-striped, and their order differs from that of the
        store's own shards.
    """
    return -(-num_shards // num_data_devices) * num_data_devices


@dataclass(frozen=True)
class Shards:
    """The shards that the rows of a dataset are divided into.

    The rows are those of a dataset, or of a subset of it. In files, shard 0's rows come first, then
    shard 1's, and so on: where a row lies there is its location.

    Args:
        num_rows: Rows, ``N``.
        num_shards: Shards, ``C``.
        subset: Which rows of the dataset these are; all of them where it is None.

    Raises:
        ValueError: A count is below 1.
    """

    num_rows: int
    num_shards: int
    subset: RowSubset | None = None

    def __post_init__(self) -> None:
        for name in ("num_rows", "num_shards"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1 is needed")

    @property
    def identity(self) -> dict[str, Any]:
        """What tells these from other shards, as JSON values."""
        subset = None if self.subset is None else self.subset.identity
        return {"num_rows": self.num_rows, "num_shards": self.num_shards, "subset": subset}

    @property
    def base(self) -> "Shards":
        """The shards that a sampler has made these of; these themselves where none has."""
        return self

    @property
    def ordered(self) -> "Shards":
        """The same rows in shards that dataset order needs: row ``i`` is in shard ``i % C``."""
        return self

    def names(self, rows: Integers) -> list[Any]:
        """What rows are called where people read of them.

        Args:
            rows: Rows of the dataset, int64 of shape (B,).

        Returns:
            JSON values: numbers, or where a number does not say it, lists of what does.
        """
        return list(rows.tolist())

    def numbers(self, rows: Integers) -> Integers:
        """The numbers of rows, or of windows, in the whole dataset, int64 of shape (B,)."""
        return rows

    def stored_rows(self, rows: Integers) -> Integers:
        """The rows of a store that rows are, or are parts of.

        Args:
            rows: Rows of the dataset, int64 of shape (B,).

        Returns:
            int64 of shape (B,).
        """
        return rows

    @cached_property
    def sizes(self) -> Integers:
        """Rows of each shard, int64 of shape (C,)."""
        return shard_rows(self.num_rows, self.num_shards)

    @cached_property
    def starts(self) -> Integers:
        """The location of each shard's first row, int64 of shape (C,)."""
        return np.cumsum(self.sizes) - self.sizes

    @property
    def longest(self) -> int:
        """Rows of the longest shard."""
        return int(self.sizes.max())

    def dataset_rows(self, shards: Integers, offsets: Integers) -> Integers:
        """The dataset rows at offsets of shards.

        Args:
            shards: Shards, int64 of shape (B,).
            offsets: Offsets within them, int64 of shape (B,).

        Returns:
            Rows of the dataset, int64 of shape (B,).
        """
        rows = offsets * self.num_shards + shards
        return rows if self.subset is None else self.subset.rows(rows)

    def all_rows(self) -> Integers:
        """The dataset rows of all shards, shard after shard, int64 of shape (num_rows,)."""
        return self.dataset_rows(*self.all_offsets())

    def all_offsets(self) -> tuple[Integers, Integers]:
        """The shard of each row, and its offset within it, shard after shard.

        Returns:
            Both int64 of shape (num_rows,).
        """
        homes = np.repeat(np.arange(self.num_shards), self.sizes)
        return homes, np.arange(self.num_rows) - self.starts[homes]

    def rows_of(self, shard: int) -> range | Integers:
        """The dataset rows of one shard, in its order.

        Args:
            shard: Number of the shard.

        Returns:
            A range, or for a subset int64 of shape (rows of the shard,).
        """
        numbers = range(shard, self.num_rows, self.num_shards)
        if self.subset is None:
            return numbers
        return self.subset.rows(np.arange(numbers.start, numbers.stop, numbers.step))

    def starts_in(self, stored: "Shards") -> Integers | None:
        """Where each shard's rows start in a file, if they lie there one after the other.

        Args:
            stored: The shards of the file.

        Returns:
            Locations, int64 of shape (C,); None where rows of a shard lie apart.
        """
        return self.starts if self == stored else None

    def locations_in(self, stored: "Shards", shards: Integers, offsets: Integers) -> Integers:
        """Where rows lie in a file.

        Args:
            stored: The shards of the file.
            shards: Shards of these, int64 of shape (B,).
            offsets: Offsets within them, int64 of shape (B,).

        Returns:
            Locations, int64 of shape (B,).
        """
        if self == stored:
            # Of a subset too, whose rows have other numbers in the dataset.
            return self.starts[shards] + offsets
        return stored.locate(self.dataset_rows(shards, offsets))

    def locate(self, rows: range | Integers) -> Integers:
        """Where rows lie, counted in rows from the start of a file.

        Args:
            rows: Rows in ``[0, num_rows)``, counted in dataset order, a range or int64 of any
                shape.

        Returns:
            Their locations, int64 of the same shape.
        """
        if isinstance(rows, range):
            rows = np.arange(rows.start, rows.stop, rows.step)
        offsets = rows // self.num_shards
        # numpy takes several times as long for a remainder as for a quotient.
        located: Integers = self.starts[rows - offsets * self.num_shards]
        return located + offsets

    def rows_at(self, locations: Integers) -> Integers:
        """The rows at locations: the inverse of `locate`.

        Args:
            locations: Locations in ``[0, num_rows)``, int64 of any shape.

        Returns:
            Rows, counted in dataset order, int64 of the same shape.
        """
        shards = np.searchsorted(self.starts, locations, side="right") - 1
        return (locations - self.starts[shards]) * self.num_shards + shards

    def dataset_rows_at(self, locations: Integers) -> Integers:
        """The dataset rows at locations.

        Args:
            locations: Locations in ``[0, num_rows)``, int64 of shape (B,).

        Returns:
            Rows of the dataset, int64 of shape (B,).
        """
        rows = self.rows_at(locations)
        return rows if self.subset is None else self.subset.rows(rows)
