"""The rows that an epoch draws from, how they are divided into shards, and where they are stored.

Rows may be all rows of a store, a subset of them, the rows of several stores, or windows over
series. A row has several numberings. A subset (6, 1, 4, 3) of 7 rows stored in 3 shards::

    subset index   0  1  2  3    index among these rows, in the order that dataset order shows
    dataset row    6  1  4  3    index in the whole dataset
    file row       2  3  4  1    index in the files, which hold 0 3 6 | 1 4 | 2 5

    storage rank   0  2  3  1    index in the files of a store that held these rows alone, which
                                 would be the rows 0 3 | 1 | 2; for all rows, the file row
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from typing_extensions import override

from lightning_memmap.integers import Integers, bounds_of, ceil_div, num_strided, starts_of
from lightning_memmap.sampling.identity import FrozenArray

#: Default number of shards below `_MANY_ROWS` rows, and from there on.
_DEFAULT_SHARDS = 24, 192
_MANY_ROWS = 20_000


def default_shards(num_rows: int) -> int:
    """Return the number of shards of a store if the user sets none."""
    return _DEFAULT_SHARDS[num_rows >= _MANY_ROWS]


def divisors(integer: int) -> list[int]:
    """Return the divisors of an integer, ascending."""
    return [count for count in range(1, integer + 1) if not integer % count]


def shard_rows(num_rows: int, num_shards: int) -> Integers:
    """Count the rows of each shard if row ``i`` belongs to shard ``i % num_shards``."""
    return num_strided(num_rows, np.arange(num_shards, dtype=np.int64), num_shards)


def round_up_shards(num_shards: int, num_data_devices: int) -> int:
    """Round a number of shards up to a multiple of the data devices."""
    return ceil_div(num_shards, num_data_devices) * num_data_devices


@dataclass(frozen=True)
class Shards:
    """The shards of a store's files: row ``i`` belongs to shard ``i % C``."""

    num_rows: int
    num_shards: int

    def __post_init__(self) -> None:
        for name in ("num_rows", "num_shards"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")

    @cached_property
    def sizes(self) -> Integers:
        """Rows of each shard, int64 of shape (C,)."""
        return shard_rows(self.num_rows, self.num_shards)

    @cached_property
    def starts(self) -> Integers:
        """The file row of each shard's first row, int64 of shape (C,)."""
        return starts_of(self.sizes)

    def file_rows(self, rows: Integers) -> Integers:
        """Return the file rows of rows, int64 of the same shape."""
        offsets = rows // self.num_shards
        # numpy takes several times as long for a remainder as for a quotient.
        file_rows: Integers = self.starts[rows - offsets * self.num_shards]
        return file_rows + offsets

    def rows(self, file_rows: Integers) -> Integers:
        """Return the rows with these file rows: the inverse of `file_rows`."""
        shards = np.searchsorted(self.starts, file_rows, side="right") - 1
        return (file_rows - self.starts[shards]) * self.num_shards + shards


class Rows(ABC):
    """Rows that are numbered in dataset order: a frozen value."""

    #: Whether shards should be contiguous ranges of storage order, if the order allows it, so that
    #: neighbours such as windows over one series share a shard.
    is_contiguous = False

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """The number of rows."""

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """The values that identify these rows, as JSON values."""

    @abstractmethod
    def file_rows(self, subset_index: Integers) -> Integers:
        """Return the file rows, or of windows the storage ranks, int64 of shape (B,)."""

    @property
    def is_file_order(self) -> bool:
        """Whether the storage rank of each row is its file row."""
        return True

    @abstractmethod
    def subset_index_at(self, ranks: Integers) -> Integers:
        """Return the subset indices of the rows at these storage ranks, int64 of shape (B,)."""

    @cached_property
    def storage_ranks(self) -> Integers:
        """The storage rank of each row by its subset index, int64 of shape (rows,)."""
        index = np.arange(self.num_rows, dtype=np.int64)
        ranks = np.empty_like(index)
        ranks[self.subset_index_at(index)] = index
        return ranks

    @property
    def num_dataset_rows(self) -> int:
        """The number of rows of the whole dataset."""
        return self.num_rows

    def dataset_rows(self, subset_index: Integers) -> Integers:
        """Return the rows of the whole dataset."""
        return subset_index

    def names(self, rows: Integers) -> list[Any]:
        """Return how dataset rows are shown to people, as JSON values."""
        return list(rows.tolist())

    def store_rows(self, rows: Integers) -> Integers:
        """Return the rows of the store that dataset rows are, or are windows of."""
        return rows


@dataclass(frozen=True)
class StoreRows(Rows):
    """All rows of a store, or a subset, which is ordered as if it had been stored alone."""

    shards: Shards
    #: The rows of the subset in its order, each once; None for all rows.
    chosen: FrozenArray | None = None

    @classmethod
    def of(cls, shards: Shards, rows: Integers | None = None) -> "StoreRows":
        """Make a subset of these rows, each once; by default all rows."""
        return cls(shards, None if rows is None else FrozenArray(rows))

    @property
    @override
    def num_rows(self) -> int:
        return self.shards.num_rows if self.chosen is None else len(self.chosen)

    @property
    @override
    def num_dataset_rows(self) -> int:
        return self.shards.num_rows

    @property
    @override
    def identity(self) -> dict[str, Any]:
        subset = None if self.chosen is None else {"rows": self.chosen.identity}
        return {"subset": subset, "num_rows": self.num_rows}

    @property
    @override
    def is_file_order(self) -> bool:
        return self.chosen is None

    @override
    def file_rows(self, subset_index: Integers) -> Integers:
        return self.shards.file_rows(self.dataset_rows(subset_index))

    @override
    def subset_index_at(self, ranks: Integers) -> Integers:
        return Shards(self.num_rows, self.shards.num_shards).rows(ranks)

    @override
    def dataset_rows(self, subset_index: Integers) -> Integers:
        if self.chosen is None:
            return subset_index
        chosen: Integers = self.chosen.array[subset_index]
        return chosen


@dataclass(frozen=True)
class JoinedRows(Rows):
    """The rows of several training sets, set after set, both in dataset order and in the files."""

    set_names: tuple[str, ...]
    training_sets: tuple[StoreRows, ...]
    is_contiguous = True

    @property
    @override
    def is_file_order(self) -> bool:
        return all(rows.is_file_order for rows in self.training_sets)

    @property
    @override
    def num_rows(self) -> int:
        return sum(self.rows_per_set)

    @property
    @override
    def num_dataset_rows(self) -> int:
        return sum(rows.num_dataset_rows for rows in self.training_sets)

    @cached_property
    def rows_per_set(self) -> list[int]:
        """The number of rows used of each set."""
        return [rows.num_rows for rows in self.training_sets]

    @cached_property
    def starts(self) -> Integers:
        """The first dataset row of each set, and its first file row, int64 of shape (sets,)."""
        return starts_of(np.array([rows.shards.num_rows for rows in self.training_sets]))

    @property
    @override
    def identity(self) -> dict[str, Any]:
        pairs = zip(self.set_names, self.training_sets, strict=True)
        subsets = {name: rows.identity["subset"] for name, rows in pairs}
        return {
            "stores": dict(zip(self.set_names, self.rows_per_set, strict=True)),
            "subset": subsets if any(subsets.values()) else None,
            "num_rows": self.num_rows,
        }

    def set_index_of(self, rows: Integers) -> Integers:
        """Return the index of the set of each dataset row, or of each file row."""
        return np.searchsorted(self.starts, rows, side="right") - 1

    @override
    def file_rows(self, subset_index: Integers) -> Integers:
        return self._look_up_by_set(StoreRows.file_rows, subset_index, self.starts)

    @override
    def dataset_rows(self, subset_index: Integers) -> Integers:
        return self._look_up_by_set(StoreRows.dataset_rows, subset_index, self.starts)

    @override
    def subset_index_at(self, ranks: Integers) -> Integers:
        return self._look_up_by_set(StoreRows.subset_index_at, ranks, self._set_starts)

    @cached_property
    def _set_starts(self) -> Integers:
        return starts_of(np.array(self.rows_per_set))

    def _look_up_by_set(
        self,
        look_up: Callable[[StoreRows, Integers], Integers],
        subset_index: Integers,
        result_starts: Integers,
    ) -> Integers:
        """Look up integers set by set, and add the start of each set to the results."""
        starts = self._set_starts
        set_index = np.searchsorted(starts + self.rows_per_set, subset_index, side="right")
        results = np.empty_like(subset_index)
        for index, rows in enumerate(self.training_sets):
            is_here = set_index == index
            here = look_up(rows, subset_index[is_here] - starts[index])
            results[is_here] = here + result_starts[index]
        return results

    @override
    def names(self, rows: Integers) -> list[Any]:
        set_index = self.set_index_of(rows)
        rows_in_set = (rows - self.starts[set_index]).tolist()
        pairs = zip(set_index.tolist(), rows_in_set, strict=True)
        return [[self.set_names[index], row] for index, row in pairs]


@dataclass(frozen=True)
class WindowedRows(Rows):
    """Windows over series, series after series, both in dataset order and in storage order.

    Windows are not stored: each is a series, which is a row of the store, and a first step in it.
    So they have no file rows, and `file_rows` returns storage ranks. Windows of 3 steps with
    stride 2, over the series a and b of 6 and 5 steps, where the files store b first::

        subset index   0     1     2     3
        window         a0-2  a2-4  b0-2  b2-4
        storage rank   2     3     0     1

    Contiguous shards share no more steps than the windows overlap.

    Args:
        series: The series.
        fields: The fields that the windows are of.
        series_lengths: Time steps of each series, in storage order.
        length: Steps of a window.
        stride: Steps between the starts of neighbouring windows.
        all_windows: The windows over all series of the dataset, if these are over a subset of them.
    """

    series: Rows
    fields: tuple[str, ...]
    series_lengths: FrozenArray
    length: int
    stride: int
    all_windows: "WindowedRows | None" = None
    is_contiguous = True

    def __post_init__(self) -> None:
        if not self.num_rows:
            lengths = self.series_lengths.array
            raise ValueError(
                f"Windows: length={self.length}, but the longest of the {len(lengths)} rows has"
                f" {lengths.max()} steps: use shorter windows, or longer rows"
            )

    @property
    @override
    def num_rows(self) -> int:
        return int(self.starts[-1] + self.windows_per_series[-1])

    @property
    @override
    def num_dataset_rows(self) -> int:
        return (self.all_windows or self).num_rows

    @property
    @override
    def identity(self) -> dict[str, Any]:
        windows = {
            "fields": ", ".join(self.fields),
            "length": self.length,
            "stride": self.stride,
            "steps": self.series_lengths.identity,
        }
        return {"windows": windows, **self.series.identity, "num_rows": self.num_rows}

    @cached_property
    def windows_per_series(self) -> Integers:
        """Windows of each series, in storage order, int64 of shape (series,)."""
        last_windows = (self.series_lengths.array - self.length) // self.stride
        num_windows: Integers = np.maximum(0, last_windows + 1)
        return num_windows

    @cached_property
    def starts(self) -> Integers:
        """The storage rank of each series' first window, in storage order, int64 (series,)."""
        return starts_of(self.windows_per_series)

    @cached_property
    def _subset_starts(self) -> Integers:
        """The subset index of each series' first window, by the subset index of the series."""
        return starts_of(self.windows_per_series[self.series.storage_ranks])

    def in_series(self, ranks: Integers) -> tuple[Integers, Integers]:
        """Find windows by storage rank: the storage rank of the series, and the window in it."""
        return _in_series(self.starts, ranks)

    @override
    def file_rows(self, subset_index: Integers) -> Integers:
        series, windows = _in_series(self._subset_starts, subset_index)
        return windows + self.starts[self.series.storage_ranks[series]]

    @override
    def subset_index_at(self, ranks: Integers) -> Integers:
        series, windows = self.in_series(ranks)
        return windows + self._subset_starts[self.series.subset_index_at(series)]

    @override
    def dataset_rows(self, subset_index: Integers) -> Integers:
        if self.all_windows is None:
            return subset_index
        series, windows = _in_series(self._subset_starts, subset_index)
        return windows + self.all_windows._subset_starts[self.series.dataset_rows(series)]

    def find(self, rows: Integers) -> tuple[Integers, Integers]:
        """Find windows by dataset row: the dataset row of the series, and the window in it."""
        return _in_series((self.all_windows or self)._subset_starts, rows)

    @override
    def names(self, rows: Integers) -> list[Any]:
        series, windows = self.find(rows)
        steps: list[int] = (windows * self.stride).tolist()
        pairs = zip(self.series.names(series), steps, strict=True)
        return [[name, step] for name, step in pairs]

    @override
    def store_rows(self, rows: Integers) -> Integers:
        return self.series.store_rows(self.find(rows)[0])

    def runs_between(
        self, num_shards: int, bounds: Sequence[tuple[int, int]], shards: Sequence[int] | None
    ) -> list[Integers]:
        """Return the windows between bounds in runs, each of consecutive windows of one series.

        Args:
            num_shards: Shards, ``C``.
            bounds: Half-open ranges, of storage ranks if ``shards`` is None, else of subset
                indices.
            shards: In dataset order: drop runs without a window in one of these shards, where
                window ``n`` belongs to shard ``n % C``.

        Returns:
            The storage rank of each run's series, the storage rank of its first window, and its
            number of windows: int64 of shape (runs,) each.
        """
        *columns, series_stops = self._by_order[shards is not None]
        # A run from shard s on needs a wanted one among the next shards, which may wrap around C:
        # num_before[s + n] - num_before[s] counts the wanted among n shards from s on.
        is_wanted = np.isin(np.arange(num_shards), [] if shards is None else list(shards))
        num_before = bounds_of(np.tile(is_wanted, 2))
        runs = []
        for start, stop in bounds:
            first, last = np.searchsorted(series_stops, (start, stop - 1), side="right")
            here = slice(first, last + 1)
            series, ranks, counts = (column[here] for column in columns)
            series_starts = series_stops[here] - counts
            run_starts = np.maximum(start, series_starts)
            counts = np.minimum(stop, series_stops[here]) - run_starts
            is_needed = counts > 0
            if shards is not None:
                run_shards = run_starts % num_shards
                num_seen = np.clip(counts, 0, num_shards)
                is_needed = num_before[run_shards + num_seen] > num_before[run_shards]
            run = series, ranks + run_starts - series_starts, counts
            runs.append([column[is_needed] for column in run])
        return [*map(np.concatenate, zip(*runs, strict=True))]

    @cached_property
    def _by_order(self) -> list[tuple[Integers, Integers, Integers, Integers]]:
        """Series that have windows, in storage order and in dataset order.

        Each as storage ranks, ranks of their first windows, numbers of windows, and where these
        stop in this order.
        """
        orders = []
        for series in (np.arange(len(self.windows_per_series)), self.series.storage_ranks):
            used = series[self.windows_per_series[series] > 0]
            counts = self.windows_per_series[used]
            orders.append((used, self.starts[used], counts, np.cumsum(counts)))
        return orders

    def num_covered_steps_before(self, window_bounds: Integers, in_dataset_order: bool) -> Integers:
        """Count the time steps that all windows before each bound cover, each step once."""
        _, _, counts, stops = self._by_order[in_dataset_order]
        num_series = np.searchsorted(stops - counts, window_bounds, side="left")
        return window_bounds * self.stride + num_series * (self.length - self.stride)


def _in_series(starts: Integers, windows: Integers) -> tuple[Integers, Integers]:
    # A series without a window starts where the next one does, which the search finds.
    series = np.searchsorted(starts, windows, side="right") - 1
    return series, windows - starts[series]
