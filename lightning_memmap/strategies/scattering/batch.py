"""The rows of a step scattered over replicas or micro-batches, and their outputs merged."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from tensordict import TensorDictBase
from torch import Tensor

from lightning_memmap.loading.nested import named_leaves, rebuilt
from lightning_memmap.loading.variable_leaves import interleaved, is_variable

_WITH_ROWS = (Tensor, TensorDictBase)


@dataclasses.dataclass(init=False, eq=False, repr=False)
class ScatteredBatch:
    """The rows of one step in ``D`` batches: one per replica, on its device, or per micro-batch.

    Row ``j`` of the step is row ``j // D`` of batch ``(first + j) % D``, as in a `SuperBatch`.
    Callbacks and hooks receive this object as their batch, and can read it as if it were one
    batch, ``batch["x"]`` or ``x, y = batch``: it is then assembled on the root device. Rows do not
    move until somebody reads them.

    Attributes:
        batches: The ``D`` batches.
        num_rows: Rows of all batches.
        first: Index of the batch that has the first row.
        device: The root device.
        extent: An empty tensor of shape (num_rows, 0). Lightning searches the fields of a batch
            that is a dataclass for the number of rows, and finds it here.
    """

    extent: Tensor

    def __init__(self, batches: list[Any], num_rows: int, first: int, device: torch.device) -> None:
        self.batches = batches
        self.num_rows = num_rows
        self.first = first
        self.device = device
        self.extent = torch.empty(num_rows, 0)
        self._assembled: Any = None

    @property
    def rows_per_batch(self) -> list[int]:
        """Rows of each batch."""
        count = len(self.batches)
        return [len(range((i - self.first) % count, self.num_rows, count)) for i in range(count)]

    @property
    def assembled(self) -> Any:
        """One batch on the root device, rows in the order of the step."""
        if self._assembled is None:
            self._assembled = self.merge(self.batches)
        return self._assembled

    def __getitem__(self, key: Any) -> Any:
        return self.assembled[key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.assembled, name)

    def __len__(self) -> int:
        return len(self.assembled)

    def __repr__(self) -> str:
        return f"ScatteredBatch({self.rows_per_batch} rows, read on {self.device})"

    def merge(self, values: Sequence[Any]) -> Any:
        """Merge what was computed from each batch.

        Tensors and TensorDicts with one entry per row of their batch are interleaved in the order
        of the step, and so are lists with one entry per row. Floating-point scalars become their
        mean, weighted by rows. Dicts, lists, tuples and dataclasses are merged item by item. Other
        values stay as they are where all are equal, and otherwise become a list of them.

        Args:
            values: One per batch.

        Returns:
            Tensors on the root device, without gradients.
        """
        first = values[0]
        if all(isinstance(value, Tensor) and _is_float(value) for value in values):
            values = [value.detach() for value in values]
            return weighted_mean(values, self.rows_per_batch, self.device)
        if all(isinstance(value, float) for value in values):
            if len(set(values)) == 1:
                return first
            pairs = zip(values, self.rows_per_batch, strict=True)
            return sum(value * rows for value, rows in pairs) / sum(self.rows_per_batch)
        if self._have_rows(values):
            return self._interleave(values)
        if all(type(value) is type(first) for value in values):
            merged = self._merge_items(values)
            if merged is not None:
                return merged
            if isinstance(first, (int, str, bytes, type(None))) and len(set(values)) == 1:
                return first
        return [self._move(value) for value in values]

    def _have_rows(self, values: Sequence[Any]) -> bool:
        pairs = list(zip(values, self.rows_per_batch, strict=True))
        if all(_has_rows(value, rows) for value, rows in pairs):
            return True
        # A list whose tensors each have all rows is a list of outputs, not of rows.
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
        if isinstance(values[0], Tensor) and values[0].is_nested:
            return interleaved([v.detach() for v in values], self.first, self.num_rows, self.device)
        position = torch.arange(self.num_rows)
        order = torch.cat([position[start::count] for start in starts]).argsort()
        return torch.cat([self._move(value) for value in values])[order.to(self.device)]

    def _merge_items(self, values: Sequence[Any]) -> Any:
        """Merge containers of the same structure item by item; None where they are anything else.

        Frozen dataclasses are included, which Lightning's ``apply_to_collection`` refuses and
        torch's pytree takes for leaves.
        """
        first = values[0]
        if isinstance(first, Mapping) and all(value.keys() == first.keys() for value in values):
            items = {key: self.merge([value[key] for value in values]) for key in first}
            return items if type(first) is dict else type(first)(items)  # type: ignore[call-arg]
        if isinstance(first, (list, tuple)) and all(len(value) == len(first) for value in values):
            columns = [self.merge(column) for column in zip(*values, strict=True)]
            return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
        if dataclasses.is_dataclass(first):
            filled = copy.copy(first)
            for field in dataclasses.fields(first):
                column = [getattr(value, field.name) for value in values]
                object.__setattr__(filled, field.name, self.merge(column))
            return filled
        return None

    def _move(self, value: Any) -> Any:
        if isinstance(value, _WITH_ROWS):
            return value.detach().to(self.device)
        return apply_to_collection(value, Tensor, lambda leaf: leaf.detach().to(self.device))


def _is_float(value: Tensor) -> bool:
    return value.ndim == 0 and value.is_floating_point()


def _has_rows(value: Any, rows: int) -> bool:
    """Whether a value is a tensor, or a TensorDict, with one entry per row."""
    return isinstance(value, _WITH_ROWS) and len(value.shape) > 0 and value.shape[0] == rows


def weighted_mean(values: Sequence[Tensor], weights: Sequence[int], device: torch.device) -> Tensor:
    """Compute ``sum(weight * value) / sum(weights)``, with gradients.

    Args:
        values: Tensors of one shape, on any devices.
        weights: Rows that each value is a mean over.
        device: Where the mean is computed.

    Returns:
        A tensor of that shape on ``device``.
    """
    if len(values) == 1:
        return values[0].to(device)
    total = sum(weights)
    first, *others = (
        value.to(device) * (weight / total) for value, weight in zip(values, weights, strict=True)
    )
    for term in others:
        first = first + term
    return first


def scatter(batch: Any, devices: Sequence[torch.device]) -> ScatteredBatch:
    """Scatter the rows of a plain batch, in the order of a super-batch.

    A batch is left whole unless it consists of nothing but tensors with one entry per row. The rows
    for each device are copied once so that they are contiguous, and a step may call ``view``.

    Args:
        batch: A batch on the first device.
        devices: One per replica or micro-batch. Where there are fewer rows, the last devices get
            none.

    Returns:
        At most as many batches as devices: row ``j`` is in batch ``j % D``, on device ``j % D``. A
        batch that is left whole is the only one, on its own device.
    """
    # A TensorDict is indexed as a whole, though it is a mapping.
    is_leaf = isinstance(batch, _WITH_ROWS)
    leaves = [batch] if is_leaf else [leaf for _, leaf in named_leaves(batch)]
    lengths = {
        leaf.shape[0]
        if isinstance(leaf, _WITH_ROWS) and leaf.ndim and not is_variable(leaf)
        else -1
        for leaf in leaves
    }
    num_rows = max(lengths.pop() if len(lengths) == 1 else 1, 1)
    count = min(len(devices), num_rows)
    if count == 1:
        return ScatteredBatch([batch], num_rows, 0, devices[0])
    batches = []
    for index, device in enumerate(devices[:count]):
        rows = [leaf[index::count].contiguous().to(device) for leaf in leaves]
        batches.append(rows[0] if is_leaf else rebuilt(batch, iter(rows)))
    return ScatteredBatch(batches, num_rows, 0, devices[0])
