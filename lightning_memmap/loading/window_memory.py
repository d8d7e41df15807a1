"""What threads that read windows, and the rows of an epoch, need of a window's memory."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from lightning_memmap.loading.buffers import Buffers
from lightning_memmap.loading.row_source import Leaf
from lightning_memmap.loading.window_reads import Read
from lightning_memmap.sampling import Integers, ReadWindows
from lightning_memmap.schema import Field


class WindowMemory(Protocol):
    """The memory of a window."""

    def reads(self, windows: ReadWindows, epoch: int, number: int) -> Iterator[Read]:
        """The reads that fill a window, which several threads may do at once.

        A read raises OSError where the disk cannot be read, and StoreError where a file is shorter
        than it was.

        Args:
            windows: Which rows are in which window.
            epoch: Epoch, counted from 0.
            number: Window of the epoch, counted from 0.

        Returns:
            An iterator over functions, each of which does one read when it is called with scratch
            memory of the layout.

        Raises:
            StoreError: The index of a field is damaged.
        """

    def fetch(self, slots: Tensor, out: Buffers) -> Sequence[Leaf]:
        """Copy rows into a batch.

        Args:
            slots: Where they are in the window, int64 of shape (B,), on the CPU.
            out: Buffers to copy into, for the fields whose rows have one shape.

        Returns:
            For each field one tensor of shape (B, *field shape), on the CPU, or `VariableRows` that
            stay as they are when another window is read into this memory.
        """


class Layout(Protocol):
    """How the rows of some shards are read, window by window."""

    @property
    def fields(self) -> Sequence[Field]:
        """The fields as batches have them."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all fields, on average over the store where rows differ."""

    @property
    def num_slots(self) -> int:
        """Slots for rows in a window."""

    def locate(self, windows: ReadWindows, epoch: int, positions: range) -> Integers:
        """Where rows lie, if all windows of an epoch lay one after the other.

        Args:
            windows: Which rows are in which window.
            epoch: Epoch, counted from 0.
            positions: As for `lightning_memmap.sampling.Sampler.at`.

        Returns:
            Slots, counted from the first one of the first window, int64 of shape
            (len(positions),).
        """

    def allocate(self) -> WindowMemory:
        """Memory for a window, on the CPU, with undefined content."""

    def scratch(self) -> memoryview:
        """Scratch memory for the reads of one thread; see `scratch_memory`."""
