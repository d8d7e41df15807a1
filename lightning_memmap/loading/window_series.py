"""Windows over series that are read from disk: steps that windows have in common are read once.

Two kinds of windows meet here. A row of a batch is a window over a series. And the rows that are
read at once are a window of the epoch, as they are where rows are no parts of series.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.loading.buffers import Buffers
from lightning_memmap.loading.row_source import Leaf
from lightning_memmap.loading.window_items import RunPlaces, check_numbers, most_items
from lightning_memmap.loading.window_places import MAX_PLACED_RUNS
from lightning_memmap.loading.window_reads import Read, scratch_memory
from lightning_memmap.loading.window_rows import WindowRows
from lightning_memmap.sampling import Integers, ReadWindows, WindowedRows
from lightning_memmap.schema import Field
from lightning_memmap.store.columns.variable import Located
from lightning_memmap.store.row_file import RowFile
from lightning_memmap.store.series import windows_over

#: Runs of a shard in a window at most: a window may wrap around, and some shards have a row more.
_MAX_RUNS = 3


class SeriesMemory:
    """The memory of a window of the epoch.

    Args:
        layout: Where steps lie in it.
    """

    def __init__(self, layout: "SeriesLayout") -> None:
        self._layout = layout
        length = layout.line.length
        self._steps = [
            layout.places.allocate(field.item_shape[1:], field.dtype) if cut else None
            for field, cut in zip(layout.fields, layout.is_cut, strict=True)
        ]
        self._windows = [
            None if steps is None else windows_over(steps, length) for steps in self._steps
        ]
        #: The first step of each run in the files, and what is added to find it in memory.
        self._begins = self._shifts = np.zeros(0, np.int64)

    def reads(self, windows: ReadWindows, epoch: int, number: int) -> Iterator[Read]:
        """The reads that fill the window; see `WindowMemory.reads`."""
        places = self._layout.places
        placed = places.place(self._layout.located(windows, epoch, number))
        self._begins, self._shifts = placed.begins, placed.places - placed.begins
        steps = [each for each in self._steps if each is not None]
        for file, each in zip(self._layout.files, steps, strict=True):
            if file is not None:
                yield from places.reads(file, placed, each)

    def fetch(self, slots: Tensor, out: Buffers) -> list[Leaf]:
        """Copy windows, told by their first steps, into a batch; see `WindowMemory.fetch`."""
        steps = slots.numpy()
        runs = np.searchsorted(self._begins, steps, side="right") - 1
        starts = torch.from_numpy(steps + self._shifts[runs])
        return self._layout.mapped.copy(self._windows, starts, slots, out)


class SeriesLayout:
    """Where the steps of series lie in the memory of a window, and how they are read.

    Windows that follow one another in a series need steps that do so in a file. The fields that are
    not cut into windows are fetched from the file mapping: a series has them once.

    Args:
        fields: The fields of the store that this process needs.
        files: The files of those that are cut into windows, in their order, with steps as rows;
            None for one without a byte.
        mapped: The windows over the file mapping.
        held: The shards that this process holds.
        windows: Which rows are in which window of the epoch.

    Raises:
        ValueError: There are too many such windows to be numbered together with all steps.
    """

    def __init__(
        self,
        fields: Sequence[Field],
        files: Sequence[RowFile | None],
        mapped: WindowRows,
        *,
        held: Sequence[int],
        windows: ReadWindows,
    ) -> None:
        pool = windows.sampler.pool
        line = pool.rows
        assert isinstance(line, WindowedRows)
        self.line, self.mapped, self.files, self._held = line, mapped, files, held
        #: Which fields are cut into windows.
        self.is_cut = [field.name in line.fields for field in fields]
        self.fields = [
            field.windowed(line.length) if cut else field
            for field, cut in zip(fields, self.is_cut, strict=True)
        ]
        self.row_bytes = mapped.row_bytes
        begins = (line.ends - line.counts) * line.stride + mapped.shifts
        #: A window is told by the first of its steps in the files: one more than there are.
        self.num_slots = int((begins + line.steps.array).max()) + 1
        check_numbers(windows, self.num_slots)
        # In dataset order, series that follow one another are in all shards of the store.
        count = pool.num_shards if pool.is_striped else len(held)
        max_runs = (_MAX_RUNS if windows.has_runs else MAX_PLACED_RUNS) * count
        most = largest_window_steps(held, windows)
        self.places = RunPlaces(line.fields[0], [f for f in files if f], most, max_runs)

    def locate(self, windows: ReadWindows, epoch: int, positions: range) -> Integers:
        """Where windows begin in the files, if these came anew for each window of the epoch; see
        `Layout.locate`.
        """
        found = self.mapped.locate(windows.sampler, epoch, positions)
        for number, here in windows.parts(positions):
            found[here] += number * self.num_slots
        return found

    def allocate(self) -> SeriesMemory:
        """Memory for a window of the epoch, on the CPU, with undefined content."""
        return SeriesMemory(self)

    def scratch(self) -> memoryview:
        """Scratch memory for the reads of one thread; see `scratch_memory`."""
        return scratch_memory(max((file.row_bytes for file in self.files if file), default=1))

    def located(self, windows: ReadWindows, epoch: int, number: int) -> Located:
        """Where the steps of a window of the epoch are in the files.

        Args:
            windows: Which rows are in which window of the epoch.
            epoch: Epoch, counted from 0.
            number: Window of the epoch, counted from 0.

        Returns:
            Steps that follow one another, series by series or window by window.
        """
        line, pool = self.line, windows.sampler.pool
        if windows.has_runs:
            runs, num_shards = windows.runs(epoch, number), pool.num_shards
            if pool.is_striped:
                edges = [(run.start * num_shards, run.stop * num_shards) for run in runs]
                found = line.stretches(num_shards, edges, self._held)
            else:
                edges = [
                    (start + run.start, start + min(run.stop, size))
                    for start, size in zip(
                        pool.starts[self._held], pool.sizes[self._held], strict=True
                    )
                    for run in runs
                ]
                found = line.stretches(num_shards, edges, None)
            series, firsts, counts = found
        else:
            drawn = windows.offsets(epoch, number, np.array(self._held, np.int64))
            firsts = np.sort(pool.places(*drawn))
            firsts = firsts[np.diff(firsts, prepend=-1) > 0]
            series, counts = line.in_series(firsts).series, np.ones_like(firsts)
        lengths = (counts - 1) * line.stride + line.length
        return Located(firsts * line.stride + self.mapped.shifts[series], lengths[:, None])

    def share_used(self, windows: ReadWindows) -> float:
        """Estimate the share of the bytes read that is used, from the first window of the epoch.

        Args:
            windows: Which rows are in which window of the epoch.

        Returns:
            Between 0 and 1.
        """
        # In dataset order, neighbours belong to all shards in turn.
        pool = windows.sampler.pool
        part = len(self._held) / pool.num_shards if pool.is_striped else 1.0
        used = min(1.0, part * self.line.length / self.line.stride)
        sizes = [file.row_bytes for file in self.files if file is not None]
        found = self.located(windows, 0, 0)
        return used * self.places.share_used(found, max(sizes, default=1))


def largest_window_steps(held: Sequence[int], windows: ReadWindows) -> int:
    """How many steps a window of the epoch has at most, each counted once for each shard.

    Args:
        held: The shards that this process holds.
        windows: Which rows are in which window of the epoch.

    Returns:
        The number, up to a 64th too large, and by what three windows of each shard have in common
        with others. In dataset order it is that of the windows of all shards. Where a sampler draws
        windows, it is counted as if they had no step in common.
    """
    window, pool = windows.longest, windows.sampler.pool
    line = pool.rows
    assert isinstance(line, WindowedRows)
    if not windows.has_runs:
        return len(held) * window * line.length
    # A run that begins inside of a series.
    shared = max(0, line.length - line.stride)
    if pool.is_striped:
        size = window * pool.num_shards
        edges = np.append(np.arange(0, line.num_rows, size), line.num_rows)
        return int(np.diff(line.steps_before(edges, True)).max()) + shared

    def steps_before(shard: int, offsets: Integers) -> Integers:
        return line.steps_before(pool.starts[shard] + offsets, False)

    most = most_items(pool.sizes, held, window, steps_before)
    return most + _MAX_RUNS * shared * len(held)
