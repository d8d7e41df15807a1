"""Windows over series, and the shards that they are divided into.

Windows are the rows of a dataset of their own. They are numbered series after series, and each is a
row of the store and a step of it. Integers only: no window is stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lightning_memmap.sampling.identity import Numbers
from lightning_memmap.sampling.line_shards import LineShards, as_rows
from lightning_memmap.sampling.shards import Integers, Shards

#: Windows that are located at once.
_BLOCK_WINDOWS = 2**18
#: Up to so many windows, a table of 4 bytes for each has its series: a search takes several times
#: as long as copying a short window.
_TABLE_WINDOWS = 2**23


class Stretches(NamedTuple):
    """Windows that follow one another in a series."""

    series: Integers
    """The series of each stretch, by its place in a file, int64 of shape (n,)."""
    firsts: Integers
    """Where its first window is on the line, int64 of shape (n,)."""
    counts: Integers
    """How many windows it has."""

    def of(self, chosen: NDArray[np.bool_]) -> "Stretches":
        """Some of these.

        Args:
            chosen: True for each of them, of shape (n,).
        """
        return Stretches(*(each[chosen] for each in self))


class InSeries(NamedTuple):
    """Where windows are."""

    series: Integers
    """The series of each, int64 of shape (B,)."""
    windows: Integers
    """Which of its windows it is, int64 of shape (B,). It begins at this many strides."""


@dataclass(frozen=True, kw_only=True)
class WindowShards(LineShards):
    """The windows over series, divided into shards.

    The series lie on a line in the order of a file, shard after shard, and with them their windows.
    A shard is a piece of this line, so that it needs one piece of the values, and two shards share
    no more than the windows overlap. In dataset order this cannot be, since neighbours there belong
    to different shards: each shard then has windows of all series.

    Args:
        num_rows: Windows of all series together.
        num_shards: Shards, ``C``.
        subset: Which rows of the dataset the series are; all of them where it is None.
        of_series: The series, and the shards that they are divided into.
        fields: The names of the fields that are cut into windows.
        steps: The steps of each series, in the order of a file, int64 of shape
            (of_series.num_rows,).
        length: Steps of a window.
        stride: Steps from the beginning of a window to that of the next one.
        before: For each row of the dataset, the windows of all rows before it, where the series are
            only some of its rows.
    """

    of_series: Shards
    fields: tuple[str, ...]
    steps: Numbers
    length: int
    stride: int
    before: Numbers | None = None

    @classmethod
    def of(
        cls,
        series: Shards,
        fields: Sequence[str],
        steps: Integers,
        length: int,
        stride: int,
        steps_of_rows: Integers | None = None,
    ) -> "WindowShards":
        """Divide the windows over series into shards.

        Args:
            series: The series, and the shards that they are divided into.
            fields: The names of the fields that are cut into windows.
            steps: The steps of each series, in the order of a file, int64 of shape
                (series.num_rows,).
            length: Steps of a window, at least 1.
            stride: Steps from the beginning of a window to that of the next one, at least 1.
            steps_of_rows: The steps of all rows of the dataset, in its order, where the series are
                only some of them.

        Returns:
            The shards.

        Raises:
            ValueError: All series are shorter than a window.
        """
        num_windows = int(_num_windows(steps, length, stride).sum())
        if not num_windows:
            raise ValueError(
                f"Windows: length={length}, and the longest of the {len(steps)} rows has"
                f" {steps.max()} steps: use shorter windows, or longer rows"
            )
        before = None
        if steps_of_rows is not None:
            counts = _num_windows(steps_of_rows, length, stride)
            before = Numbers(np.cumsum(counts) - counts)
        return cls(
            num_windows,
            series.num_shards,
            series.subset,
            of_series=series,
            fields=tuple(fields),
            steps=Numbers(steps),
            length=length,
            stride=stride,
            before=before,
        )

    @property
    @override
    def identity(self) -> dict[str, Any]:
        windows = {
            "fields": ", ".join(self.fields),
            "length": self.length,
            "stride": self.stride,
            "steps": self.steps.identity,
        }
        return {**self.of_series.identity, "num_rows": self.num_rows, "windows": windows}

    @cached_property
    def counts(self) -> Integers:
        """Windows of each series, in the order of a file, int64 of shape (series,)."""
        return _num_windows(self.steps.array, self.length, self.stride)

    @cached_property
    def ends(self) -> Integers:
        """Where the windows of each series end on the line, int64 of shape (series,)."""
        return np.cumsum(self.counts)

    @cached_property
    def _places(self) -> Integers:
        """The place on the line of the series of each number, int64 of shape (series,)."""
        return self.of_series.locate(range(self.of_series.num_rows))

    @cached_property
    def _number_ends(self) -> Integers:
        """The same as ``ends`` where the windows are numbered in dataset order."""
        return np.cumsum(self.counts[self._places])

    def on_line(self, places: Integers) -> InSeries:
        """The windows at places of the line.

        Args:
            places: Places in ``[0, num_rows)``, int64 of shape (B,).

        Returns:
            Series by their places in a file.
        """
        if len(self.counts) == 1 or self.num_rows > _TABLE_WINDOWS:
            return _in_series(self.ends, places)
        series = self._series_of_places[places].astype(np.int64)
        return InSeries(series, places - (self.ends - self.counts)[series])

    @cached_property
    def _series_of_places(self) -> NDArray[np.uint32]:
        return np.repeat(np.arange(len(self.counts), dtype=np.uint32), self.counts)

    def numbered(self, numbers: Integers) -> InSeries:
        """The windows of these numbers.

        Args:
            numbers: Windows, counted series after series, int64 of shape (B,).

        Returns:
            Series by their rows in the dataset.
        """
        series, windows = _in_series(self._number_ends, numbers)
        chosen = self.of_series.subset
        return InSeries(series if chosen is None else chosen.rows(series), windows)

    @cached_property
    def _numbered(self) -> tuple[Stretches, Integers]:
        """All windows in the order in which these shards have them, a stretch for each series, and
        where each stretch ends."""
        series = self._places if self.is_ordered else np.arange(len(self.counts))
        series = series[self.counts[series] > 0]
        counts = self.counts[series]
        return Stretches(series, self.ends[series] - counts, counts), np.cumsum(counts)

    def stretches(self, chosen: Sequence[int], runs: Sequence[range]) -> Stretches:
        """The windows at some offsets of shards, and in dataset order those between them.

        Args:
            chosen: Numbers of shards.
            runs: Runs of offsets, the same for each of these shards.

        Returns:
            A stretch for each series that a run has windows of.
        """
        count, pieces = self.num_shards, []
        if self.is_ordered:
            edges = [(run.start * count, run.stop * count) for run in runs]
        else:
            edges = [
                (start + run.start, start + min(run.stop, size))
                for start, size in zip(self.starts[chosen], self.sizes[chosen], strict=True)
                for run in runs
            ]
        # How many of the chosen shards come before each, twice around.
        before = np.append(0, np.cumsum(np.tile(np.isin(np.arange(count), chosen), 2)))
        every, ends = self._numbered
        for first, end in edges:
            begin, stop = np.searchsorted(ends, (first, end - 1), side="right")
            at = slice(begin, stop + 1)
            series, places, counts = (each[at] for each in every)
            begins = ends[at] - counts
            firsts = np.maximum(first, begins)
            counts = np.minimum(end, ends[at]) - firsts
            needed = counts > 0
            if self.is_ordered:
                # Neighbours belong to shards one after the other.
                shards = firsts % count
                needed = before[shards + np.clip(counts, 0, count)] > before[shards]
            pieces.append(Stretches(series, places + firsts - begins, counts).of(needed))
        return Stretches(*map(np.concatenate, zip(*pieces, strict=True)))

    def steps_before(self, numbers: Integers) -> Integers:
        """The steps that windows take if those of a series share what they have in common.

        Args:
            numbers: Numbers in the order in which these shards have the windows, int64 of shape
                (B,).

        Returns:
            For each, the steps of all windows before it, int64 of shape (B,).
        """
        (_, _, counts), ends = self._numbered
        num_series = np.searchsorted(ends - counts, numbers, side="left")
        return numbers * self.stride + num_series * (self.length - self.stride)

    @override
    def names(self, rows: Integers) -> list[Any]:
        series, windows = self.numbered(rows)
        steps: list[int] = (windows * self.stride).tolist()
        return [
            [series, step] for series, step in zip(self.of_series.names(series), steps, strict=True)
        ]

    @override
    def stored_rows(self, rows: Integers) -> Integers:
        return self.of_series.stored_rows(self.numbered(rows).series)

    @override
    def numbers(self, rows: Integers) -> Integers:
        if self.before is None:
            return rows
        series, windows = self.numbered(rows)
        found: Integers = self.before.array[series] + windows
        return found

    @override
    def dataset_rows_at(self, locations: Integers) -> Integers:
        places, windows = self.on_line(locations)
        numbers = self.of_series.rows_at(places)
        rows: Integers = self._number_ends[numbers] - self.counts[places] + windows
        return rows

    @override
    def locate(self, rows: range | Integers) -> Integers:
        numbers, windows = _in_series(self._number_ends, as_rows(rows))
        places = self._places[numbers]
        located: Integers = self.ends[places] - self.counts[places] + windows
        return located


class Spans(NamedTuple):
    """Which windows of each series are needed."""

    firsts: Integers
    """The first one, int64 of shape (series,)."""
    counts: Integers
    """How many there are from the first to the last one; 0 for a series that is not needed."""


def spans_of(shards: Shards, chosen: Sequence[int]) -> Spans:
    """The windows of each series that some shards have, and those between them.

    Args:
        shards: Of `WindowShards`, or of a sampler over them.
        chosen: Numbers of shards.

    Returns:
        Series by their places in a file.
    """
    line = shards.base
    assert isinstance(line, WindowShards)
    firsts, lasts = line.counts.copy(), np.full(len(line.counts), -1, np.int64)
    starts = shards.starts_in(line)
    for shard in chosen:
        size = int(shards.sizes[shard])
        if starts is not None and size:
            # All that lies between its first and its last window.
            edges = np.array([starts[shard], starts[shard] + size - 1])
            (begin, end), (first, last) = line.on_line(edges)
            firsts[begin + 1 : end + 1] = 0
            firsts[begin] = min(int(firsts[begin]), int(first))
            lasts[begin:end] = line.counts[begin:end] - 1
            lasts[end] = max(int(lasts[end]), int(last))
            continue
        for offset in range(0, size, _BLOCK_WINDOWS):
            offsets = np.arange(offset, min(size, offset + _BLOCK_WINDOWS), dtype=np.int64)
            places = shards.locations_in(line, np.full_like(offsets, shard), offsets)
            series, windows = line.on_line(places)
            np.minimum.at(firsts, series, windows)
            np.maximum.at(lasts, series, windows)
    return Spans(firsts, np.maximum(0, lasts + 1 - firsts))


def _num_windows(steps: Integers, length: int, stride: int) -> Integers:
    counts: Integers = np.maximum(0, (steps - length) // stride + 1)
    return counts


def _in_series(ends: Integers, windows: Integers) -> InSeries:
    series = np.zeros_like(windows)
    if len(ends) > 1:
        series = np.searchsorted(ends, windows, side="right")
        windows = windows - np.where(series > 0, ends[series - 1], 0)
    return InSeries(series, windows)
