"""The rows of a step, dealt to replicas, and what the replicas return put together again."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from tensordict import TensorDictBase
from torch import Tensor

from lightning_memmap.loading import SuperBatch
from lightning_memmap.loading.collate import named_leaves, rebuilt


@dataclasses.dataclass(init=False, eq=False, repr=False)
class Shares:
    """The batches of one step, one per replica, each on its replica's device.

    Row ``j`` of the step is row ``j // D`` of the batch of replica ``(first + j) % D``, as in a
    `SuperBatch`. Where callbacks and hooks are given a batch, they are given this. It is read
    like the batch that it stands for, ``shares["x"]`` or ``x, y = shares``: the batches are then
    put together on the root device. Unless somebody reads them, rows stay where they are.

    Attributes:
        parts: The batch of each replica.
        num_rows: Rows of all batches.
        first: The replica whose batch has the first row.
        device: The root device.
        extent: A tensor without content that is as long as the batch. Lightning, which looks into
            the fields of a batch that is a dataclass, learns from it how many rows there are.
    """

    extent: Tensor

    def __init__(self, parts: list[Any], num_rows: int, first: int, device: torch.device) -> None:
        self.parts = parts
        self.num_rows = num_rows
        self.first = first
        self.device = device
        self.extent = torch.empty(num_rows, 0)
        self._joined: Any = None

    @property
    def part_rows(self) -> list[int]:
        """Rows of each batch."""
        count = len(self.parts)
        return [len(range((i - self.first) % count, self.num_rows, count)) for i in range(count)]

    @property
    def joined(self) -> Any:
        """One batch on the root device, rows in stream order."""
        if self._joined is None:
            self._joined = self.join(self.parts)
        return self._joined

    def __getitem__(self, key: Any) -> Any:
        return self.joined[key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.joined, name)

    def __len__(self) -> int:
        return len(self.joined)

    def __repr__(self) -> str:
        return f"Shares({self.part_rows} rows, read on {self.device})"

    def join(self, values: Sequence[Any]) -> Any:
        """Put together what each replica has made of its batch.

        Tensors and TensorDicts with one entry per row of the batch are interleaved in stream
        order, and so are lists with one entry per row. Floating scalars become their mean,
        weighted by rows. Dicts, lists, tuples and dataclasses are put together item by item.
        Anything else, where it is not the same for all replicas, becomes a list of one value per
        replica.

        Args:
            values: One per replica.

        Returns:
            Tensors on the root device, without gradients.
        """
        first = values[0]
        if all(isinstance(value, Tensor) and _is_float(value) for value in values):
            return self.mean([value.detach() for value in values])
        if all(isinstance(value, float) for value in values):
            if len(set(values)) == 1:
                return first
            pairs = zip(values, self.part_rows, strict=True)
            return sum(value * rows for value, rows in pairs) / sum(self.part_rows)
        if self._is_by_row(values):
            return self._interleave(values)
        if all(type(value) is type(first) for value in values):
            joined = self._join_items(values)
            if joined is not None:
                return joined
            if isinstance(first, (int, str, bytes, type(None))) and len(set(values)) == 1:
                return first
        return [self._move(value) for value in values]

    def mean(self, values: Sequence[Tensor]) -> Tensor:
        """The mean of one tensor per replica on the root device, weighted by rows."""
        return weighted_mean(values, self.part_rows, self.device)

    def _is_by_row(self, values: Sequence[Any]) -> bool:
        pairs = list(zip(values, self.part_rows, strict=True))
        if all(_has_rows(value, rows) for value, rows in pairs):
            return True
        # A list of tensors that each have all rows is of several outputs, not of rows.
        return all(
            isinstance(value, list)
            and len(value) == rows
            and not all(_has_rows(item, rows) for item in value)
            for value, rows in pairs
        )

    def _interleave(self, values: Sequence[Any]) -> Any:
        count = len(values)
        starts = [(index - self.first) % count for index in range(count)]
        if isinstance(values[0], list):
            rows: list[Any] = [None] * self.num_rows
            for start, value in zip(starts, values, strict=True):
                rows[start::count] = [self._move(item) for item in value]
            return rows
        if count == 1:
            return self._move(values[0])
        position = torch.arange(self.num_rows)
        order = torch.empty_like(position)
        order[torch.cat([position[start::count] for start in starts])] = position
        return torch.cat([self._move(value) for value in values])[order.to(self.device)]

    def _join_items(self, values: Sequence[Any]) -> Any:
        """Containers of one structure, item by item; None where they are something else."""
        first = values[0]
        if isinstance(first, Mapping) and all(value.keys() == first.keys() for value in values):
            items = {key: self.join([value[key] for value in values]) for key in first}
            return items if type(first) is dict else type(first)(items)  # type: ignore[call-arg]
        if isinstance(first, (list, tuple)) and all(len(value) == len(first) for value in values):
            columns = [self.join(column) for column in zip(*values, strict=True)]
            return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
        if dataclasses.is_dataclass(first):
            filled = copy.copy(first)
            for field in dataclasses.fields(first):
                column = [getattr(value, field.name) for value in values]
                # Frozen ones, too.
                object.__setattr__(filled, field.name, self.join(column))
            return filled
        return None

    def _move(self, value: Any) -> Any:
        if _is_tensor(value):
            return value.detach().to(self.device)
        return apply_to_collection(value, Tensor, lambda leaf: leaf.detach().to(self.device))


def _is_float(value: Tensor) -> bool:
    return value.ndim == 0 and value.is_floating_point()


def _has_rows(value: Any, rows: int) -> bool:
    """Whether a value is a tensor, or a TensorDict, with one entry per row."""
    return _is_tensor(value) and len(value.shape) > 0 and value.shape[0] == rows


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (Tensor, TensorDictBase))


def weighted_mean(values: Sequence[Tensor], weights: Sequence[int], device: torch.device) -> Tensor:
    """``sum(weight * value) / sum(weights)`` on a device, with gradients.

    Args:
        values: Tensors of one shape, wherever they are.
        weights: Rows that each stands for.
        device: Where the mean is computed.
    """
    if len(values) == 1:
        return values[0].to(device)
    total = sum(weights)
    terms = [
        value.to(device) * (weight / total) for value, weight in zip(values, weights, strict=True)
    ]
    mean = terms[0]
    for term in terms[1:]:
        mean = mean + term
    return mean


def share(
    super_batch: SuperBatch, place: Callable[[Any, int], Any], device: torch.device
) -> Shares:
    """The batches of a super-batch, which stay on their data devices.

    Args:
        super_batch: The batches.
        place: Called with each batch and the index of its replica; what it returns is the batch.
        device: The root device.
    """
    parts = [place(part, index) for index, part in enumerate(super_batch.batches)]
    return Shares(parts, super_batch.num_rows, super_batch.first, device)


def deal(batch: Any, devices: Sequence[torch.device]) -> Shares:
    """Deal the rows of a plain batch to the devices, as in a super-batch.

    A batch that is not made of tensors with one entry per row alone is not divided. The rows of
    each device are copied once, so that they lie one after the other: a step may call ``view``.

    Args:
        batch: A batch on the first device.
        devices: One per replica. Those beyond the rows of the batch are left out.
    """
    # A TensorDict is indexed as a whole, though it is a mapping.
    whole = _is_tensor(batch)
    leaves = [batch] if whole else [leaf for _, leaf in named_leaves(batch)]
    lengths = {leaf.shape[0] if _is_tensor(leaf) and leaf.ndim else -1 for leaf in leaves}
    num_rows = lengths.pop() if len(lengths) == 1 else -1
    if num_rows < 1:
        return Shares([batch], max(num_rows, 1), 0, devices[0])
    count = min(len(devices), num_rows)
    if count == 1:
        return Shares([batch], num_rows, 0, devices[0])
    parts = []
    for index, device in enumerate(devices[:count]):
        rows = [leaf[index::count].contiguous().to(device) for leaf in leaves]
        parts.append(rows[0] if whole else rebuilt(batch, iter(rows)))
    return Shares(parts, num_rows, 0, devices[0])
