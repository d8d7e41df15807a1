"""What an order orders: rows that are numbered, their shards, and where they lie in the files.

Rows are those of a store, some of them, those of several stores, or windows over series. They are
numbered in dataset order; the place of a row counts rows on their line. They also lie
on a line, which shards may be pieces of: it follows the files as far as all rows are used.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray
from typing_extensions import override

from lightning_memmap.sampling.identity import Numbers

Integers = NDArray[np.int64]

#: Shards by default, of fewer rows than `_MANY_ROWS` and of more.
_SHARDS = 24, 192
_MANY_ROWS = 20_000
#: Up to so many windows, a table of 4 bytes for each has its series: a search takes several times
#: as long as copying a short window.
_TABLE_WINDOWS = 2**23


def default_shards(num_rows: int) -> int:
    """The shards that a store of so many rows has unless its user says otherwise."""
    return _SHARDS[num_rows >= _MANY_ROWS]


def divisors(number: int) -> list[int]:
    """The numbers that divide a number, ascending."""
    return [count for count in range(1, number + 1) if not number % count]


def shard_rows(num_rows: int, num_shards: int) -> Integers:
    """Count the rows of each shard: row ``i`` is in shard ``i % num_shards``."""
    shards = np.arange(num_shards, dtype=np.int64)
    return (num_rows - shards + num_shards - 1) // num_shards


def firsts_of(sizes: Integers) -> Integers:
    """Where each of several parts begins that lie one after the other, along the first axis."""
    firsts: Integers = np.cumsum(sizes, axis=0, dtype=np.int64) - sizes
    return firsts


def ranges(firsts: Integers, counts: Integers, dtype: DTypeLike = np.int64) -> NDArray[Any]:
    """Runs of consecutive numbers, from their first ones on, so many of each."""
    # Numbers without a sign may wrap around on the way.
    found = np.repeat((firsts - firsts_of(counts)).astype(dtype), counts)
    found += np.arange(len(found), dtype=dtype)
    return found


class Runs(NamedTuple):
    """Numbers that are consecutive, run by run."""

    #: The index at which each run begins, int64 of shape (runs,), ascending.
    begins: Integers
    #: What is added to an index in this run, int64 of shape (runs,).
    shifts: Integers

    def at(self, index: Integers) -> Integers:
        """The numbers at indices, int64 of the same shape."""
        is_one = len(self.begins) == 1
        run = 0 if is_one else np.searchsorted(self.begins, index, side="right") - 1
        found: Integers = index + self.shifts[run]
        return found


def distinct(numbers: Integers) -> Integers:
    """The different numbers, ascending. numpy's `unique` takes four times as long."""
    ordered = np.sort(numbers)
    found: Integers = ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]
    return found


def striping(num_shards: int, num_data_devices: int) -> int:
    """The number of shards that data devices divide: ``num_shards``, or the next one above it."""
    return -(-num_shards // num_data_devices) * num_data_devices


@dataclass(frozen=True)
class Shards:
    """The shards that rows are divided into: row ``i`` is in shard ``i % C``."""

    num_rows: int
    num_shards: int

    def __post_init__(self) -> None:
        for name in ("num_rows", "num_shards"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1 is needed")

    @cached_property
    def sizes(self) -> Integers:
        """Rows of each shard, int64 of shape (C,)."""
        return shard_rows(self.num_rows, self.num_shards)

    @cached_property
    def starts(self) -> Integers:
        """The place of each shard's first row, int64 of shape (C,)."""
        return firsts_of(self.sizes)

    def locate(self, rows: Integers) -> Integers:
        """The places of rows, int64 of the same shape."""
        offsets = rows // self.num_shards
        # numpy takes several times as long for a remainder as for a quotient.
        located: Integers = self.starts[rows - offsets * self.num_shards]
        return located + offsets

    def rows_at(self, places: Integers) -> Integers:
        """The rows at places: the inverse of `locate`."""
        shards = np.searchsorted(self.starts, places, side="right") - 1
        return (places - self.starts[shards]) * self.num_shards + shards


class Rows(ABC):
    """Rows that are numbered in dataset order: a frozen value."""

    #: Whether shards are pieces of the files, where an order allows it: rows that lie together, as
    #: windows over a series do, are then in one shard.
    is_lined = False

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """How many there are."""

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What tells them from others, as JSON values."""

    @abstractmethod
    def places(self, numbers: Integers) -> Integers:
        """Where rows lie in the files, counted in rows, int64 of shape (B,)."""

    @property
    def is_in_files(self) -> bool:
        """Whether the line is the files: row 0 of it lies at place 0, and so on."""
        return True

    @abstractmethod
    def on_line(self, index: Integers) -> Integers:
        """The numbers of the rows that are there on the line, int64 of shape (B,)."""

    @cached_property
    def ranks(self) -> Integers:
        """Where each row is on the line, by its number: int64 of shape (rows,)."""
        index = np.arange(self.num_rows, dtype=np.int64)
        ranks = np.empty_like(index)
        ranks[self.on_line(index)] = index
        return ranks

    def dataset_rows(self, numbers: Integers) -> Integers:
        """The numbers of rows in the whole dataset, of which these may be some."""
        return numbers

    def names(self, rows: Integers) -> list[Any]:
        """What dataset rows are called where people read of them, as JSON values."""
        return list(rows.tolist())

    def stored_rows(self, rows: Integers) -> Integers:
        """The rows of a store that dataset rows are, or are parts of."""
        return rows


@dataclass(frozen=True)
class StoreRows(Rows):
    """The rows of a store, or some of them, which are treated as if they alone had been stored."""

    shards: Shards
    #: The rows that are chosen, in their order, each once; None for all.
    chosen: Numbers | None = None

    @classmethod
    def of(cls, shards: Shards, rows: Integers | None = None) -> "StoreRows":
        """The rows of these numbers, each once; by default all."""
        return cls(shards, None if rows is None else Numbers(rows))

    @property
    @override
    def num_rows(self) -> int:
        return self.shards.num_rows if self.chosen is None else len(self.chosen)

    @property
    @override
    def identity(self) -> dict[str, Any]:
        subset = None if self.chosen is None else {"rows": self.chosen.identity}
        return {"subset": subset, "num_rows": self.num_rows}

    @property
    @override
    def is_in_files(self) -> bool:
        return self.chosen is None

    @override
    def places(self, numbers: Integers) -> Integers:
        return self.shards.locate(self.dataset_rows(numbers))

    @cached_property
    def _alone(self) -> Shards:
        return Shards(self.num_rows, self.shards.num_shards)

    @override
    def on_line(self, index: Integers) -> Integers:
        return self._alone.rows_at(index)

    @override
    def dataset_rows(self, numbers: Integers) -> Integers:
        if self.chosen is None:
            return numbers
        chosen: Integers = self.chosen.array[numbers]
        return chosen


@dataclass(frozen=True)
class JoinedRows(Rows):
    """The rows of several stores, numbered one store after the other, as their files lie too."""

    stores: tuple[str, ...]
    parts: tuple[StoreRows, ...]
    is_lined = True

    @property
    @override
    def is_in_files(self) -> bool:
        return all(part.is_in_files for part in self.parts)

    @property
    @override
    def num_rows(self) -> int:
        return sum(self.chosen_sizes)

    @cached_property
    def chosen_sizes(self) -> list[int]:
        """How many rows of each store these are."""
        return [part.num_rows for part in self.parts]

    @cached_property
    def firsts(self) -> Integers:
        """The first row of each store, and its first place, int64 of shape (stores,)."""
        return firsts_of(np.array([part.shards.num_rows for part in self.parts]))

    @property
    @override
    def identity(self) -> dict[str, Any]:
        pairs = zip(self.stores, self.parts, strict=True)
        subsets = {name: part.identity["subset"] for name, part in pairs}
        return {
            "stores": dict(zip(self.stores, self.chosen_sizes, strict=True)),
            "subset": subsets if any(subsets.values()) else None,
            "num_rows": self.num_rows,
        }

    def stores_of(self, rows: Integers) -> Integers:
        """The store of each dataset row, or of each place: they are numbers of stores."""
        return np.searchsorted(self.firsts, rows, side="right") - 1

    @override
    def places(self, numbers: Integers) -> Integers:
        return self._each(numbers, "places", self.firsts)

    @override
    def dataset_rows(self, numbers: Integers) -> Integers:
        return self._each(numbers, "dataset_rows", self.firsts)

    @override
    def on_line(self, index: Integers) -> Integers:
        return self._each(index, "on_line", self._chosen_firsts)

    @cached_property
    def _chosen_firsts(self) -> Integers:
        return firsts_of(np.array(self.chosen_sizes))

    def _each(self, numbers: Integers, method: str, firsts: Integers) -> Integers:
        """What the parts say of their rows, each counted from its place among some firsts."""
        begins = self._chosen_firsts
        parts = np.searchsorted(begins + self.chosen_sizes, numbers, side="right")
        found = np.empty_like(numbers)
        for index, part in enumerate(self.parts):
            here = parts == index
            found[here] = getattr(part, method)(numbers[here] - begins[index]) + firsts[index]
        return found

    @override
    def names(self, rows: Integers) -> list[Any]:
        stores = self.stores_of(rows)
        within = (rows - self.firsts[stores]).tolist()
        return [
            [self.stores[store], row] for store, row in zip(stores.tolist(), within, strict=True)
        ]


@dataclass(frozen=True)
class WindowedRows(Rows):
    """Windows over series. They are numbered series after series, and placed as the series are."""

    # No window is stored: each is a row of the store and a step of it. A shard is a piece of the
    # files, so that two shards share no more steps than the windows overlap; in dataset order each
    # shard has windows of all series, since neighbours there belong to different shards.
    # ``steps`` are those of each series on their line; ``whole`` are the windows over all series of
    # the dataset, where these are over some of them.

    series: Rows
    fields: tuple[str, ...]
    steps: Numbers
    length: int
    stride: int
    whole: "WindowedRows | None" = None
    is_lined = True

    def __post_init__(self) -> None:
        if not self.num_rows:
            steps = self.steps.array
            raise ValueError(
                f"Windows: length={self.length}, and the longest of the {len(steps)} rows has"
                f" {steps.max()} steps: use shorter windows, or longer rows"
            )

    @property
    @override
    def num_rows(self) -> int:
        return int(self.begins[-1] + self.counts[-1])

    @property
    @override
    def identity(self) -> dict[str, Any]:
        windows = {
            "fields": ", ".join(self.fields),
            "length": self.length,
            "stride": self.stride,
            "steps": self.steps.identity,
        }
        return {"windows": windows, **self.series.identity, "num_rows": self.num_rows}

    @cached_property
    def counts(self) -> Integers:
        """Windows of each series, on their line, int64 of shape (series,)."""
        counts: Integers = np.maximum(0, (self.steps.array - self.length) // self.stride + 1)
        return counts

    @cached_property
    def begins(self) -> Integers:
        """The first window of each series on the line, int64 of shape (series,)."""
        return firsts_of(self.counts)

    @cached_property
    def _number_begins(self) -> Integers:
        """The number of the first window of each series, by the number of the series."""
        return firsts_of(self.counts[self.series.ranks])

    def in_series(self, places: Integers) -> tuple[Integers, Integers]:
        """The series of the windows at places, by their places on the line, and which of theirs."""
        if len(self.counts) == 1 or self.num_rows > _TABLE_WINDOWS:
            return _in_series(self.begins, places)
        series = self._series_of_places[places].astype(np.int64)
        return series, places - self.begins[series]

    @cached_property
    def _series_of_places(self) -> NDArray[np.uint32]:
        return np.repeat(np.arange(len(self.counts), dtype=np.uint32), self.counts)

    @override
    def places(self, numbers: Integers) -> Integers:
        series, windows = _in_series(self._number_begins, numbers)
        return windows + self.begins[self.series.ranks[series]]

    @override
    def on_line(self, index: Integers) -> Integers:
        ranks, windows = self.in_series(index)
        return windows + self._number_begins[self.series.on_line(ranks)]

    @override
    def dataset_rows(self, numbers: Integers) -> Integers:
        if self.whole is None:
            return numbers
        series, windows = _in_series(self._number_begins, numbers)
        return windows + self.whole._number_begins[self.series.dataset_rows(series)]

    def numbered(self, rows: Integers) -> tuple[Integers, Integers]:
        """The same of dataset rows; series are rows of the dataset too."""
        return _in_series((self.whole or self)._number_begins, rows)

    @override
    def names(self, rows: Integers) -> list[Any]:
        series, windows = self.numbered(rows)
        steps: list[int] = (windows * self.stride).tolist()
        return [
            [series, step] for series, step in zip(self.series.names(series), steps, strict=True)
        ]

    @override
    def stored_rows(self, rows: Integers) -> Integers:
        return self.series.stored_rows(self.numbered(rows)[0])

    def stretches(
        self, num_shards: int, edges: Sequence[tuple[int, int]], wanted: Sequence[int] | None
    ) -> list[Integers]:
        """The windows between places; or, for dataset order, between numbers.

        In stretches: their series on the line, the places of their first windows, and how many
        windows they have.
        """
        *every, ends = self._in_order[wanted is not None]
        # How many of the wanted shards come before each, twice around.
        is_wanted = np.isin(np.arange(num_shards), [] if wanted is None else list(wanted))
        before = np.append(0, np.cumsum(np.tile(is_wanted, 2)))
        pieces = []
        for first, end in edges:
            begin, stop = np.searchsorted(ends, (first, end - 1), side="right")
            at = slice(begin, stop + 1)
            series, places, counts = (each[at] for each in every)
            begins = ends[at] - counts
            firsts = np.maximum(first, begins)
            counts = np.minimum(end, ends[at]) - firsts
            needed = counts > 0
            if wanted is not None:
                # Neighbours belong to shards one after the other.
                shards = firsts % num_shards
                needed = before[shards + np.clip(counts, 0, num_shards)] > before[shards]
            found = series, places + firsts - begins, counts
            pieces.append([each[needed] for each in found])
        return [*map(np.concatenate, zip(*pieces, strict=True))]

    @cached_property
    def _in_order(self) -> list[tuple[Integers, Integers, Integers, Integers]]:
        """By place, and by number: series, their first places, windows, and where these end."""
        found = []
        for series in (np.arange(len(self.counts)), self.series.ranks):
            series = series[self.counts[series] > 0]
            counts = self.counts[series]
            found.append((series, self.begins[series], counts, np.cumsum(counts)))
        return found

    def steps_before(self, windows: Integers, is_by_number: bool) -> Integers:
        """The steps of all windows before others, where those of a series share what they can."""
        _, _, counts, ends = self._in_order[is_by_number]
        num_series = np.searchsorted(ends - counts, windows, side="left")
        return windows * self.stride + num_series * (self.length - self.stride)


def _in_series(begins: Integers, windows: Integers) -> tuple[Integers, Integers]:
    # Of series without a window, the next one begins at the same place.
    series = np.searchsorted(begins, windows, side="right") - 1
    return series, windows - begins[series]
