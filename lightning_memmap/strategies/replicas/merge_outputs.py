"""Merging what the replicas of ``memmap_dp`` return into the output of one step."""

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import chain
from operator import add
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_memmap.loading.nested import children_of, interleave, with_children
from lightning_memmap.schema.fields import RowList
from lightning_memmap.strategies.common.split_rows import (
    fractions_of,
    row_count,
    scale_loss,
    types_with_rows,
)

#: Values of these types are merged to one if they are equal.
_PLAIN = (int, float, str, bytes, type(None))


class OutputLengths:
    """Distinguishes outputs with an entry per row from outputs of another, equal length.

    A tensor with an entry for each of 8 classes looks like one of 8 rows until a replica has
    another number of rows.
    """

    def __init__(self) -> None:
        # By path in the output, the lengths that were merged as rows.
        self._as_rows: dict[str, set[int]] = {}
        # The paths whose length is always the same.
        self._fixed: set[str] = set()

    def are_rows(self, path: str, lengths: Sequence[int], rows: Sequence[int]) -> bool:
        """Return whether the values at a path have an entry for each row of their replica."""
        if [*lengths] == [*rows]:
            if path not in self._fixed:
                self._as_rows.setdefault(path, set()).update(lengths)
            return path not in self._fixed
        if self._as_rows.get(path) == {*lengths}:
            self._fixed.add(path)
            sizes = ", ".join(map(str, rows))
            rank_zero_warn(
                f"output{path} has {lengths[0]} entries on replicas of {sizes} rows, so its entries"
                f" aren't rows, as they seemed before. From now on it is a list with a value per"
                " replica; return value[None] to have a list from the beginning"
            )
        return False


class OutputMerger:
    """Merges the outputs of replicas: rows in the order of the step, means weighted by rows.

    Args:
        row_ranges: The rows of the step that each replica has.
        device: The device of merged tensors.
        lengths: Knowledge about the outputs of the same method from earlier steps.
        weights: The weight of each replica's loss; by default its rows.
    """

    def __init__(
        self,
        row_ranges: Sequence[range],
        device: torch.device,
        lengths: OutputLengths | None = None,
        weights: Sequence[Any] = (),
    ) -> None:
        self._row_ranges = row_ranges
        self._rows = [len(rows) for rows in row_ranges]
        self._weights = weights or self._rows
        self._device = device
        self._lengths = lengths or OutputLengths()

    def training_output(self, outputs: Sequence[Any]) -> Any:
        """Return the mean of the losses, with its graph, and the other outputs merged."""
        present = [output for output in outputs if output is not None]
        if all(isinstance(output, Tensor) for output in present):
            return self.mean(outputs)
        for output in present:
            if not isinstance(output, (Tensor, Mapping)):
                return output
        dicts = [
            {"loss": output} if isinstance(output, Tensor) else dict(output or {})
            for output in outputs
        ]
        losses = [entries.pop("loss", None) for entries in dicts]
        merged = {
            key: self.merge([entries.get(key) for entries in dicts], f"[{key!r}]")
            for key in chain(*dicts)
        }
        # Lightning rejects an output without a loss.
        pairs = zip(outputs, losses, strict=True)
        lacks_loss = any(output is not None and loss is None for output, loss in pairs)
        return merged if lacks_loss else {"loss": self.mean(losses), **merged}

    def mean(self, losses: Sequence[Tensor | None]) -> Tensor | None:
        """Average losses by the weights of their replicas; None if all are None."""
        pairs = zip(losses, self._weights, strict=True)
        present = [(loss, weight) for loss, weight in pairs if loss is not None]
        if not present:
            return None
        return weighted_mean([loss for loss, _ in present], [n for _, n in present], self._device)

    def merge(self, values: Sequence[Any], path: str = "") -> Any:
        """Merge one value per replica.

        Args:
            values: The values, by replica.
            path: Their path in the output.
        """
        are_alike = len({*map(type, values)}) == 1
        if are_alike and isinstance(values[0], _PLAIN) and len({*values}) == 1:
            return values[0]
        if all(_is_float(value) for value in values):
            return weighted_mean([value.detach() for value in values], self._rows, self._device)
        if all(isinstance(value, float) for value in values):
            pairs = zip(values, self._rows, strict=True)
            return sum(value * rows for value, rows in pairs) / sum(self._rows)
        if self._have_rows(values, path):
            return self._in_order(values)
        merged = self._merge_items(values, path) if are_alike else None
        return [self._move(value) for value in values] if merged is None else merged

    def _have_rows(self, values: Sequence[Any], path: str) -> bool:
        lengths = [row_count(value) for value in values]
        if min(lengths) >= 0:
            return self._lengths.are_rows(path, lengths, self._rows)
        # A list whose tensors each have all rows is a list of outputs, not of rows.
        return all(
            isinstance(value, list)
            and len(value) == rows
            and not all(row_count(item) == rows for item in value)
            for value, rows in zip(values, self._rows, strict=True)
        )

    def _in_order(self, values: Sequence[Any]) -> Any:
        """Interleave the rows of all replicas in the order of the step."""
        num_rows = sum(self._rows)
        if isinstance(values[0], list):
            items: list[Any] = [None] * num_rows
            for rows, value in zip(self._row_ranges, values, strict=True):
                items[rows.start : rows.stop : rows.step] = map(self._move, value)
            return RowList(items) if isinstance(values[0], RowList) else items
        if len(values) == 1:
            return self._move(values[0])
        if isinstance(values[0], Tensor) and values[0].is_nested:
            first = [rows.start for rows in self._row_ranges].index(0)
            return interleave([v.detach() for v in values], first, num_rows, self._device)
        joined = torch.cat([self._move(value) for value in values])
        return joined[torch.tensor([*chain(*self._row_ranges)]).argsort().to(self._device)]

    def _merge_items(self, values: Sequence[Any], path: str) -> Any:
        """Merge containers of one structure item by item; return None for anything else."""
        items: list[Any] = [children_of(value) for value in values]
        if None in items or any(children.keys() != items[0].keys() for children in items):
            return None
        merged = [
            self.merge([children[key] for children in items], f"{path}{key}") for key in items[0]
        ]
        return with_children(values[0], merged)

    def _move(self, value: Any) -> Any:
        return apply_to_collection(
            value, types_with_rows(), lambda leaf: leaf.detach().to(self._device)
        )


def weighted_mean(values: Sequence[Tensor], weights: Sequence[Any], device: torch.device) -> Tensor:
    """Return ``sum(weight * value) / sum(weights)`` on a device, with gradients; 0 for weights 0.

    Weights are numbers, or tensors without dimensions on this device.
    """
    pairs = zip(values, fractions_of(weights), strict=True)
    return reduce(add, (scale_loss(value.to(device), fraction) for value, fraction in pairs))


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point()
