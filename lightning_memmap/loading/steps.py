"""Steps on their way from the files to a batch."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lightning_memmap.loading.row_source import Leaf


class Steps(NamedTuple):
    """Consecutive steps of an epoch."""

    epoch: int
    """The epoch."""
    first_step: int
    """Number of the first step in its epoch."""
    positions: range
    """The positions of all the steps that this process serves."""
    lengths: list[int]
    """Positions of each step. The first step is one of the longest, but for the last two of an
    epoch."""
    step_rows: list[int]
    """Rows of each step over all processes."""

    def part(self, begin: int, end: int, first_row: int) -> "Steps":
        """Some of the steps, of which the first one begins with this row of them all."""
        lengths = self.lengths[begin:end]
        positions = self.positions[first_row : first_row + sum(lengths)]
        step_rows = self.step_rows[begin:end]
        return Steps(self.epoch, self.first_step + begin, positions, lengths, step_rows)


@dataclass
class Fetched:
    """The rows of some steps, where they were fetched."""

    steps: Steps
    first: int
    leaves: list[list[Leaf]]
    devices: Sequence[torch.device]
    is_whole: bool
    num_fields: int

    def positions_of(self, index: int) -> range:
        """The positions of the rows in one of the lists."""
        count = len(self.devices)
        positions = self.steps.positions
        return positions if self.is_whole else positions[(index - self.first) % count :: count]


def ordinary_tensors() -> AbstractContextManager[None]:
    """Ordinary tensors in inference mode too: it may be over before the last step that has them."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
