"""A super-batch: the batches of all data devices in one step, still on their devices."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_memmap.loading.collate import Collator
from lightning_memmap.loading.nested import named_leaves
from lightning_memmap.loading.variable_rows import VariableRows, send_rows
from lightning_memmap.schema import RowList

#: The rows of this process and of all of its step, by the leaves of an assembled batch.
_STEP_ROWS: Any = WeakIdKeyDictionary()


class SuperBatch:
    """The batches of one step. ``to(device)`` assembles them there, rows in the order of the epoch.

    Row ``j`` of the super-batch is row ``j // D`` of the batch of data device ``(first + j) % D``,
    so that the order does not depend on how many devices hold the data.

    Args:
        data_devices: The ``D`` devices of the batches.
        num_rows: Rows of all batches.
        first: The data device whose batch has the first row.
        collator: Collates and assembles.
        columns: One tensor per field of shape (num_rows, *field shape), or rows that are not copied
            yet, all rows in order, where they lie on one device.
        batches: Otherwise, the batch of each data device.

    Attributes:
        num_rows: Rows of all batches.
        step_rows: Rows of the step over all processes.
        data_devices: The devices of the batches.
        first: The data device whose batch has the first row.
        seed: Seed of a random transform of the assembled batch; see `OnSuperBatch`.
    """

    __slots__ = (
        "_batches",
        "_collator",
        "_columns",
        "data_devices",
        "first",
        "num_rows",
        "seed",
        "step_rows",
    )

    def __init__(
        self,
        data_devices: Sequence[torch.device],
        num_rows: int,
        first: int,
        *,
        collator: Collator,
        columns: Sequence[Tensor | VariableRows] | None = None,
        batches: list[Any] | None = None,
    ) -> None:
        self.data_devices = data_devices
        self.num_rows = num_rows
        self.step_rows = num_rows
        self.first = first
        self.seed = 0
        self._columns = columns
        self._batches = batches or []
        self._collator = collator

    @property
    def batches(self) -> list[Any]:
        """The batch of each data device, on that device.

        It is the batch before a transform of the assembled rows, and has the structure of the
        dataset's samples, or whatever the transform on the data device made of it. Fetched rows lie
        one after the other in memory.
        """
        if self._columns is not None and not self._batches:
            count = len(self.data_devices)
            self._batches = [
                self._collator.collate(
                    [
                        leaf[(index - self.first) % count :: count].contiguous()
                        for leaf in self._columns
                    ]
                )
                for index in range(count)
            ]
        return self._batches

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Any:
        """Assemble the super-batch on one device.

        Args:
            device: Usually the root device.
            non_blocking: Do not wait for copies to other devices than the CPU.

        Returns:
            A batch of ``num_rows`` rows on ``device``, in the structure of the dataset's samples or
            of what the transform returned. Its memory is used again once the caller has dropped it.

        Raises:
            ValueError: The transform returned a tensor whose first dimension is not its batch's, or
                other tensors on one data device than on another.
            TypeError: The transform returned something other than tensors in containers.
        """
        target = device if isinstance(device, torch.device) else torch.device(device)
        if self._columns is None:
            batch = self._collator.assemble(self._batches, self.first, self.num_rows, target)
        else:
            send = send_rows if non_blocking else _copied
            batch = self._collator.collate([send(leaf, target) for leaf in self._columns])
        batch = self._collator.finish(batch, self.num_rows, target, self.seed)
        if self.step_rows != self.num_rows:
            for _, leaf in named_leaves(batch):
                if isinstance(leaf, (Tensor, RowList)):
                    _STEP_ROWS[leaf] = self.num_rows, self.step_rows
        return batch

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        devices = ", ".join(str(device) for device in self.data_devices)
        return f"SuperBatch({self.num_rows} rows on {devices})"


def step_rows_of(batch: Any) -> set[tuple[int, int]]:
    """The rows that a batch has of its step, and the rows of the step over all processes.

    Args:
        batch: A batch of a super-batch, or any nesting of such batches, each with at least one of
            the tensors that it was made with; or super-batches that are not assembled.

    Returns:
        One pair for each different one; empty for batches of one process, or of other loaders.
    """
    found = set()
    for _, leaf in named_leaves(batch):
        if isinstance(leaf, SuperBatch):
            found.add((leaf.num_rows, leaf.step_rows))
        elif isinstance(leaf, (Tensor, RowList)) and leaf in _STEP_ROWS:
            found.add(_STEP_ROWS[leaf])
    return found


def _copied(leaf: Tensor | VariableRows, device: torch.device) -> Tensor | VariableRows:
    return leaf.to(device)
