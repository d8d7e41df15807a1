"""The batch of a step under ``memmap_dp``: one batch per replica, which callbacks read as one."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_memmap.loading.nested import named_leaves
from lightning_memmap.strategies.common.split_rows import items_of_ranges, row_count, split_rows
from lightning_memmap.strategies.replicas.merge_outputs import OutputMerger


@dataclasses.dataclass(init=False, eq=False, repr=False)
class ReplicaBatches:
    """The batches of all replicas in one step, each on the device of its replica.

    Callbacks and hooks receive this object as the batch of the step. They can read it like a batch,
    ``batch["x"]`` or ``x, y = batch``; only then is it assembled on the root device.
    """

    #: Shape (num_rows, 0): Lightning searches the fields of a dataclass for the number of rows.
    extent: Tensor

    def __init__(
        self,
        batches: list[Any],
        row_ranges: list[range],
        device: torch.device,
        weights: Sequence[Any] = (),
    ) -> None:
        self.batches = batches
        #: The weights of the losses of the batches; empty if these are their rows.
        self.weights = weights
        #: The rows of the step that each batch has.
        self.row_ranges = row_ranges
        self.num_rows = sum(map(len, row_ranges))
        self.device = device
        self.extent = torch.empty(self.num_rows, 0)
        self._assembled: Any = None

    @classmethod
    def of_devices(
        cls,
        batches: list[Any],
        num_rows: int,
        first: int,
        device: torch.device,
        items_by_row: Any = None,
    ) -> "ReplicaBatches":
        """Wrap the batches of D data devices: row ``j`` is in batch ``(first + j) % D``.

        The losses of the batches are weighted by their items, if these aren't rows.
        """
        count = len(batches)
        row_ranges = [range((index - first) % count, num_rows, count) for index in range(count)]
        weights = [] if items_by_row is None else items_of_ranges(items_by_row, row_ranges)
        return cls(batches, row_ranges, device, weights)

    @classmethod
    def split(cls, batch: Any, devices: Sequence[torch.device]) -> "ReplicaBatches":
        """Divide one batch among devices: row ``j`` goes to device ``j % len(devices)``.

        A batch with leaves that can't be divided stays whole, with a warning.
        """
        counts = {
            name: -1 if getattr(leaf, "is_nested", False) else row_count(leaf)
            for name, leaf in named_leaves(batch)
        }
        num_rows = max(counts.values(), default=-1)
        odd = [name for name, rows in counts.items() if rows != num_rows or rows < 0]
        if odd:
            num_rows = -1
            if len(devices) > 1:
                rank_zero_warn(
                    f"batch{odd[0]} has no rows, another number of rows than other leaves, or is a"
                    f" nested tensor, so replica 0 computes the whole batch instead of"
                    f" {len(devices)} parts. Let each leaf be a tensor or RowList with an entry"
                    " per row, and use the form 'pad' or 'list' for rows that differ in length"
                )
        count = min(len(devices), num_rows)
        if count < 2:
            return cls([batch], [range(max(num_rows, 1))], devices[0])
        row_ranges = [range(index, num_rows, count) for index in range(count)]
        return cls(split_rows(batch, row_ranges, devices), row_ranges, devices[0])

    @property
    def assembled(self) -> Any:
        """One batch on the root device, rows in the order of the step."""
        if self._assembled is None:
            merger = OutputMerger(self.row_ranges, self.device)
            self._assembled = merger.merge(self.batches, " of the batch")
        return self._assembled

    def __getitem__(self, key: Any) -> Any:
        try:
            return self.assembled[key]
        except KeyError:
            if type(key) is not int:
                raise
            # A loop begins like this. With an __iter__, Lightning would look for rows in the keys.
            raise TypeError(f"batch[{key}]: to loop over a dict, use batch.keys()") from None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.assembled, name)

    def __len__(self) -> int:
        return len(self.assembled)

    def __contains__(self, key: object) -> bool:
        return key in self.assembled
