"""A super-batch: the batches of all data devices in one step, and how they are put together.

A batch is contiguous on its data device, and so is a copy to another device. On the device that
assembles them, rows are interleaved: those of data device ``d`` go to every ``D``-th place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

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
    kind_of,
    named_leaves,
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
from lightning_memmap.schema.fields import RowList

#: Nests one leaf per field like the dataset's samples; see `LayoutCollate`.
Collate: TypeAlias = Callable[[Sequence[Any]], Any]


class Collator:
    """Makes the batches of a loader: nested, transformed, and assembled in buffers used again."""

    def __init__(self, collate: Collate, transform: BatchTransform | None = None) -> None:
        self.collate = collate
        self._transform = transform
        #: Whether the transform runs on assembled batches.
        self.is_on_super_batch = isinstance(transform, OnSuperBatch)
        #: Whether each data device needs a batch of its own.
        self.is_apart = transform is not None and not self.is_on_super_batch
        #: Whether the transform needs random numbers for each row.
        self.takes_random = transform is not None and has_parameter(transform, "random")
        self._transforms: dict[tuple[int, torch.device], DeviceTransform] = {}
        self._pool = BufferPool([])

    def transformed(
        self,
        batch: Any,
        device: torch.device,
        seed: int,
        random: RowRandom | None,
        index: int = 0,
    ) -> Any:
        """Run the transform on a batch."""
        if self._transform is None:
            return batch
        key = index, device
        if key not in self._transforms:
            self._transforms[key] = DeviceTransform(self._transform, device)
        found = self._transforms[key](batch, seed, random)
        if found is None:
            raise TypeError(
                "transform: it returned None; return the batch (is the return statement missing?)"
            )
        return found

    def assemble(self, batches: list[Any], first: int, num_rows: int, device: torch.device) -> Any:
        """Assemble the batches of all data devices on one device."""
        leaves = _checked_leaves(batches, first, num_rows)
        if len(batches) == 1:
            if all(is_on(leaf, device) for leaf in leaves[0]):
                return batches[0]
            outs = [send_leaf(leaf, device) for leaf in leaves[0]]
        else:
            columns = list(zip(*leaves, strict=True))
            dense = [column for column in columns if not is_variable(column[0])]
            buffers = iter(self._buffers([column[0] for column in dense], num_rows, device))
            outs = []
            for column in columns:
                if is_variable(column[0]):
                    outs.append(interleave(column, first, num_rows, device))
                    continue
                outs.append(next(buffers))
                for index, leaf in enumerate(column):
                    # Contiguous between devices, and strided on the device.
                    start = (index - first) % len(batches)
                    outs[-1][start :: len(batches)].copy_(send(leaf, device))
        return with_leaves(batches[0], iter(outs))

    def _buffers(self, leaves: list[Tensor], num_rows: int, device: torch.device) -> list[Tensor]:
        fields = [(tuple(leaf.shape[1:]), leaf.dtype) for leaf in leaves]
        if device.type != "cpu":
            # torch's caching allocator reuses memory, in stream order.
            return [torch.empty((num_rows, *shape), dtype=d, device=device) for shape, d in fields]
        if self._pool.fields != fields:
            self._pool = BufferPool(fields)
        return self._pool.get(num_rows)


@dataclass(eq=False, repr=False, slots=True)
class SuperBatch:
    """The batches of one step."""

    data_devices: Sequence[torch.device]
    num_rows: int
    weight: StepWeight  # Of the loss on these rows.
    first: int  # The data device whose batch has the first row.
    collator: Collator
    #: The batch of each data device, on that device, as its transform left it.
    batches: list[Any]
    seed: int = 0  # Of a random transform of the assembled batch.
    random: RowRandom | None = None  # Random numbers of each row for that transform.

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Any:
        """Assemble the super-batch on one device. Only copies to the CPU are waited for.

        ``non_blocking`` is there as in `torch.Tensor.to`, and changes nothing: whatever uses the
        batch on the device comes after the copies, and nobody overwrites what they read.
        """
        target = device if isinstance(device, torch.device) else torch.device(device)
        if [*self.data_devices] == [target] and not self.collator.is_apart:
            (batch,) = self.batches
        else:
            batch = self.collator.assemble(self.batches, self.first, self.num_rows, target)
        if self.collator.is_on_super_batch:
            batch = self.collator.transformed(batch, target, self.seed, self.random)
        return batch

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        devices = ", ".join(str(device) for device in self.data_devices)
        return f"SuperBatch({self.num_rows} rows on {devices})"


def _checked_leaves(batches: list[Any], first: int, num_rows: int) -> list[list[Any]]:
    """The leaves of each batch, after checking that they are alike and have all rows."""
    named = [dict(named_leaves(batch)) for batch in batches]
    for index, leaves in enumerate(named):
        rows = len(range((index - first) % len(batches), num_rows, len(batches)))
        for name, leaf in leaves.items():
            _check_leaf(name, leaf, rows, index, len(batches))
    check_alike(
        [{f"batch{n}": kind_of(leaf, True) for n, leaf in leaves.items()} for leaves in named],
        "transform: it",
        "on data device",
        "they are assembled afterwards, and must be alike. A transform whose shapes differ from"
        " call to call runs on the assembled rows instead with transform=OnSuperBatch(...), from"
        " lightning_memmap.transforms",
    )
    return [[leaves[name] for name in named[0]] for leaves in named]


def _check_leaf(name: str, leaf: Any, num_rows: int, index: int, num_devices: int) -> None:
    """Check that what a transform returned is a tensor with a row for each row of its batch."""
    if not isinstance(leaf, Tensor | RowList):
        raise TypeError(
            f"transform: it returned {with_article(type(leaf).__name__)} at batch{name}; return"
            " tensors, in any nesting of dicts, lists, tuples and dataclasses; for texts, or what"
            " else has one value for each row, return RowList(values), from"
            " lightning_memmap.loading"
        )
    # The batch of a single device stays as it is, and may be sparse.
    if isinstance(leaf, Tensor) and (num_devices > 1 or leaf.is_nested):
        kind, layout = ("nested ", torch.jagged) if leaf.is_nested else ("", torch.strided)
        if leaf.layout != layout:
            raise TypeError(
                f"transform: it returned a {kind}tensor of layout {leaf.layout} at batch{name},"
                f" whose rows cannot be assembled: make it one of {layout}, or of the assembled"
                " rows with transform=OnSuperBatch(...), from lightning_memmap.transforms"
            )
    if (isinstance(leaf, Tensor) and leaf.ndim == 0) or len(leaf) != num_rows:
        found = f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"{len(leaf)} rows"
        raise ValueError(
            f"transform: it returned a tensor of {found} for a batch of"
            f" {num_rows} rows on data device {index}; the first dimension of every tensor must be"
            " the rows of the batch"
        )
