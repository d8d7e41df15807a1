"""Steps on their way from the files to a batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_memmap.loading.device_streams import send
from lightning_memmap.loading.row_source import Leaf
from lightning_memmap.loading.variable_rows import share_widths


class Steps(NamedTuple):
    """Consecutive steps of an epoch."""

    epoch: int
    first_step: int  # Its number in the epoch.
    positions: range  # Of all the steps, those that this process serves.
    lengths: list[int]  # Positions of each step.
    step_rows: list[int]  # Rows of each step over all processes.


@dataclass
class Fetched:
    """The rows of some steps, for each receiver: one for all rows, or each data device for its own.

    Of ``R`` receivers, row ``j`` of the steps goes to the one with the number ``(first + j) % R``.
    """

    steps: Steps
    first: int  # The data device that has the first row.
    leaves: list[list[Leaf]]  # Of each receiver, one per field.
    devices: Sequence[torch.device]  # Of the receivers.
    numbers: list[Tensor] = field(default_factory=list)  # The dataset rows of each receiver.

    def rows_of(self, receiver: int) -> slice:
        """Which of all rows a receiver has."""
        count = len(self.devices)
        return slice((receiver - self.first) % count, None, count)

    def number(self, rows: Tensor) -> None:
        """Add the dataset rows of all steps."""
        for receiver, device in enumerate(self.devices):
            self.numbers.append(send(rows[self.rows_of(receiver)].contiguous(), device))

    def by_step(self) -> list[Sequence[Sequence[Leaf]]]:
        """The leaves of each step and receiver, the last step first. None are left here."""
        edges, found = [0, *accumulate(self.steps.lengths)], []
        for receiver, leaves in enumerate(self.leaves):
            rows = self.rows_of(receiver)
            ends = [-(-(edge - rows.start) // rows.step) for edge in edges]
            sizes = [end - begin for begin, end in pairwise(ends)]
            leaves = [*leaves, *self.numbers[receiver : receiver + 1]]
            found.append(zip(*(leaf.split_with_sizes(sizes) for leaf in leaves), strict=True))
        steps: list[Sequence[Sequence[Leaf]]] = [*zip(*found, strict=True)]
        self.leaves, self.numbers = [], []
        if len(self.devices) > 1:
            steps = [share_widths(each) for each in steps]
        return steps[::-1]
