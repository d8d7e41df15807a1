"""A super-batch: the batches of all data devices in one step, which may be assembled on one device.

The batch of each data device is contiguous, and so is its copy to another device. The assembled
rows are interleaved: row ``i`` comes from data device ``(first_device + i) % D``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_memmap.errors import with_article
from lightning_memmap.loading.buffers import BufferPool
from lightning_memmap.loading.device_streams import send
from lightning_memmap.loading.nested import (
    check_alike,
    interleave,
    is_on,
    is_variable,
    leaf_signature,
    named_leaves,
    rows_of_device,
    send_leaf,
    with_leaves,
)
from lightning_memmap.loading.row_random import RowRandom
from lightning_memmap.loading.step_weight import StepWeight
from lightning_memmap.loading.transform import (
    BatchTransform,
    DeviceTransform,
    OnSuperBatch,
    has_parameter,
)
from lightning_memmap.placement.topology import DataTopology
from lightning_memmap.sampling.sampler import derive_seed
from lightning_memmap.schema.fields import RowList

#: Returns the items of each row of a batch, of shape (B,).
CountInBatch: TypeAlias = Callable[[Any], Tensor]
#: The fetched rows of one data device, one leaf per field.
Leaves: TypeAlias = Sequence[Any]
#: Nests the leaves like the dataset's samples; see `LayoutCollate`.
Collate: TypeAlias = Callable[[Leaves], Any]


class Assembler:
    """Assembles batches in buffers that are reused."""

    def __init__(self) -> None:
        self._pool = BufferPool([])

    def assemble(
        self, batches: list[Any], first_device: int, num_rows: int, device: torch.device
    ) -> Any:
        """Assemble the batches of all data devices.

        Args:
            batches: The batch of each of the ``D`` data devices, with leaves of equal kinds.
            first_device: The data device that holds row 0.
            num_rows: Rows of all batches.
            device: The device of the result.
        """
        leaves = _checked_leaves(batches, first_device, num_rows)
        if len(batches) == 1:
            if all(is_on(leaf, device) for leaf in leaves[0]):
                return batches[0]
            return with_leaves(batches[0], iter([send_leaf(leaf, device) for leaf in leaves[0]]))
        columns = list(zip(*leaves, strict=True))
        dense = [column for column in columns if not is_variable(column[0])]
        buffers = iter(self._buffers([column[0] for column in dense], num_rows, device))
        outs: list[Any] = []
        for column in columns:
            if is_variable(column[0]):
                outs.append(interleave(column, first_device, num_rows, device))
                continue
            out = next(buffers)
            outs.append(out)
            for index, leaf in enumerate(column):
                rows = rows_of_device(index, first_device, len(batches))
                # Contiguous between devices, and strided on the device.
                out[rows].copy_(send(leaf, device))
        return with_leaves(batches[0], iter(outs))

    def _buffers(self, leaves: list[Tensor], num_rows: int, device: torch.device) -> list[Tensor]:
        fields = [(tuple(leaf.shape[1:]), leaf.dtype) for leaf in leaves]
        if device.type != "cpu":
            # torch's caching allocator reuses memory, in stream order.
            return [torch.empty((num_rows, *shape), dtype=d, device=device) for shape, d in fields]
        if self._pool.fields != fields:
            self._pool = BufferPool(fields)
        return self._pool.get(num_rows)


def _checked_leaves(batches: list[Any], first_device: int, num_rows: int) -> list[list[Any]]:
    """Check that the batches are alike and have all rows, and return the leaves of each."""
    named = [dict(named_leaves(batch)) for batch in batches]
    for index, leaves in enumerate(named):
        rows = range(num_rows)[rows_of_device(index, first_device, len(batches))]
        for name, leaf in leaves.items():
            _check_leaf(name, leaf, len(rows), index, len(batches))
    check_alike(
        [
            {f"batch{n}": leaf_signature(leaf, True) for n, leaf in leaves.items()}
            for leaves in named
        ],
        "transform: it",
        "on data device",
        "they are assembled afterwards, and must be alike. A transform whose shapes differ from"
        " call to call runs on the assembled rows instead with transform=OnSuperBatch(...), from"
        " lightning_memmap.transforms",
    )
    return [[leaves[name] for name in named[0]] for leaves in named]


def _check_leaf(name: str, leaf: Any, num_rows: int, index: int, num_devices: int) -> None:
    """Check that a leaf that a transform returned is a tensor with the rows of its batch."""
    if not isinstance(leaf, Tensor | RowList):
        raise TypeError(
            f"transform: it returned {with_article(type(leaf).__name__)} at batch{name}; return"
            " tensors, in any nesting of dicts, lists, tuples and dataclasses; for texts, or other"
            " objects with one value per row, return RowList(values), from"
            " lightning_memmap.loading"
        )
    # The batch of a single device is not assembled, and may be sparse.
    if isinstance(leaf, Tensor) and (num_devices > 1 or leaf.is_nested):
        kind = "nested " if leaf.is_nested else ""
        layout = torch.jagged if leaf.is_nested else torch.strided
        if leaf.layout != layout:
            raise TypeError(
                f"transform: it returned a {kind}tensor of layout {leaf.layout} at batch{name},"
                f" whose rows cannot be assembled: return {layout}, or transform the assembled rows"
                " with transform=OnSuperBatch(...), from lightning_memmap.transforms"
            )
    if (isinstance(leaf, Tensor) and leaf.ndim == 0) or len(leaf) != num_rows:
        size = f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"{len(leaf)} rows"
        raise ValueError(
            f"transform: it returned a tensor of {size} for a batch of {num_rows} rows on data"
            f" device {index}; the first dimension of every tensor must be the rows of the batch"
        )


class StepSeeds(NamedTuple):
    """The random numbers for the transforms of one step."""

    seed: int  # The seed of the loader.
    epoch: int
    step: int
    rank: int  # The process that serves the step, of ``num_processes``.
    num_processes: int
    random: RowRandom | None  # The random numbers for each row, if the transform takes them.

    def seed_of(self, index: int) -> int:
        """Return the seed of the transform on one data device."""
        consumer = self.rank + self.num_processes * index
        return derive_seed(self.seed, self.epoch, self.step, consumer)


class Collator:
    """Makes the batches of a loader, and runs its transform.

    A transform runs on the batch of each data device, before the batches are assembled. In
    `OnSuperBatch`, it runs on the assembled rows instead.

    Args:
        collate: Nests one leaf per field like the dataset's samples.
        transform: The batch transform.
    """

    def __init__(self, collate: Collate, transform: BatchTransform | None) -> None:
        self._collate = collate
        self._transform = transform
        self.has_transform = transform is not None
        #: Whether the transform takes random numbers for each row.
        self.takes_random = transform is not None and has_parameter(transform, "random")
        self._is_by_device = self.has_transform and not isinstance(transform, OnSuperBatch)
        self._transforms: dict[tuple[int, torch.device], DeviceTransform] = {}
        self._assembler = Assembler()

    def fetch_on(self, device: torch.device | None) -> torch.device | None:
        """Return the device to fetch all rows of a step on; None to fetch per data device.

        Args:
            device: The device that batches are assembled on, if any.
        """
        return None if self._is_by_device else device

    def assemble_on(self, topology: DataTopology) -> torch.device | None:
        """Return the device to assemble batches on; None to keep them on the data devices."""
        is_transformed_later = self.has_transform and not self._is_by_device
        if topology.assemble_on is None and is_transformed_later:
            return topology.data_devices[0]
        return topology.assemble_on

    def collate_and_transform(
        self,
        leaves: list[Leaves],
        devices: Sequence[torch.device],
        first_device: int,
        seeds: StepSeeds | None,
    ) -> list[Any]:
        """Make the batch of each data device, transformed unless in `OnSuperBatch`.

        Args:
            leaves: The fetched rows by data device. Removed one by one, to free what is copied.
            devices: The data devices.
            first_device: The data device that holds row 0.
            seeds: The random numbers of the step; None without a transform.
        """
        batches: list[Any] = []
        for index, device in enumerate(devices):
            batch = self._collate(leaves.pop(0))
            if self._is_by_device:
                rows = rows_of_device(index, first_device, len(devices))
                batch = self._transformed(batch, device, index, seeds, rows)
            batches.append(batch)
        return batches

    def assemble_and_transform(self, super_batch: "SuperBatch", device: torch.device) -> Any:
        """Assemble the batches of all data devices, and run a transform in `OnSuperBatch`."""
        batches = super_batch.batches
        if not self._is_by_device and [*super_batch.data_devices] == [device]:
            (batch,) = batches
        else:
            batch = self._assembler.assemble(
                batches, super_batch.first_device, super_batch.num_rows, device
            )
        if self._is_by_device or not self.has_transform:
            return batch
        return self._transformed(batch, device, 0, super_batch.seeds, slice(None))

    def _transformed(
        self, batch: Any, device: torch.device, index: int, seeds: StepSeeds | None, rows: slice
    ) -> Any:
        """Run the transform on a batch, which has some rows of the step."""
        key = index, device
        if key not in self._transforms:
            assert self._transform is not None
            self._transforms[key] = DeviceTransform(self._transform, device)
        assert seeds is not None
        random = seeds.random and seeds.random.restarted(rows=rows)
        result = self._transforms[key](batch, seeds.seed_of(index), random)
        if result is None:
            raise TypeError(
                "transform: it returned None: return the batch (is the return statement missing?)"
            )
        return result


@dataclass(eq=False, repr=False, slots=True)
class SuperBatch:
    """The batches of all data devices in one step."""

    data_devices: Sequence[torch.device]
    num_rows: int
    weight: StepWeight  # The weight of the loss on these rows.
    first_device: int  # The data device whose batch has the first row.
    collator: Collator
    #: The batch of each data device, on that device, as its transform has returned it.
    batches: list[Any]
    seeds: StepSeeds | None  # None without a transform.

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Any:
        """Assemble the super-batch on one device. Only copies to the CPU are complete on return.

        ``non_blocking`` exists for compatibility with `torch.Tensor.to`, and changes nothing: later
        work on the device waits for the copies, and their sources are not overwritten before.
        """
        target = device if isinstance(device, torch.device) else torch.device(device)
        return self.collator.assemble_and_transform(self, target)

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        devices = ", ".join(str(device) for device in self.data_devices)
        return f"SuperBatch({self.num_rows} rows on {devices})"


def weight_of_batch(count: CountInBatch, super_batch: SuperBatch, batch: Any) -> StepWeight:
    """Count the items in what a loader yields for a step.

    Args:
        count: Counts the items of each row.
        super_batch: The super-batch of the step.
        batch: The batch that it was assembled to, or itself if its batches stay on their devices.
    """
    num_rows = super_batch.num_rows
    batches = [batch]
    first_device = 0
    if batch is super_batch:
        batches = super_batch.batches
        first_device = super_batch.first_device
    by_row: Tensor | None = None
    for index, rows_of_batch in enumerate(batches):
        rows = rows_of_device(index, first_device, len(batches))
        items = _items_by_row(count, rows_of_batch, len(range(num_rows)[rows]))
        if by_row is None:
            by_row = items.new_empty(num_rows)
        by_row[rows] = send(items, by_row.device)
    assert by_row is not None
    return StepWeight(by_row.sum(), None, by_row)


def _items_by_row(count: CountInBatch, batch: Any, num_rows: int) -> Tensor:
    """Count the items of each row of a batch, and check the result."""
    with torch.no_grad():
        items: object = count(batch)
    if not isinstance(items, Tensor) or items.shape != (num_rows,):
        shape = f"shape {tuple(items.shape)}" if isinstance(items, Tensor) else None
        raise ValueError(
            f"weight: its function returned {shape or with_article(type(items).__name__)} for a"
            f" batch of {num_rows} rows: return a tensor with the number of items of each row, such"
            " as (batch['labels'] != -100).sum(1)"
        )
    # On a GPU, every step would wait for the check.
    if items.is_cpu and not bool((is_valid := (items >= 0) & items.isfinite()).all()):
        row = int(is_valid.long().argmin())
        raise ValueError(
            f"weight: its function returned {items[row].item()} for row {row} of a batch: return"
            " the number of items of each row, at least 0 and finite"
        )
    # Sums of narrower numbers are inexact. Apple's GPUs have no float64.
    return items.float() if items.device.type == "mps" else items.double()
