"""The weight of a batch in its step: the items that its loss is a mean over, of those of the step.

Items are rows, unless a data module has a ``weight`` that counts others, such as tokens. Two
processes share a step of 5 rows, and their loss is a mean over tokens::

    rank    tokens of its rows    local    total
    0       7 1 2                 10       15
    1       4 1                   5        15

The mean over the step has 10/15 of the loss of rank 0, and 5/15 of the loss of rank 1.
"""

import warnings
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_memmap.integers import group_sums
from lightning_memmap.sampling.factory import Fields
from lightning_memmap.sampling.packed_sampler import PackedSampler
from lightning_memmap.sampling.sampler import Sampler

#: Weights that a loader keeps where no strategy takes them, as under Lightning's own.
_MAX_PENDING = 64
#: Counts the items at consecutive positions of an epoch, of shape (len(positions),).
CountItems: TypeAlias = Callable[[int, range], NDArray[Any]]
#: Counts the items of all processes in some steps of an epoch.
CountInSteps: TypeAlias = Callable[[range], float]


class StepWeight(NamedTuple):
    """The items of a process in a step, and of all processes.

    Args:
        local: Items of this process. A tensor without dimensions if they were counted in a batch.
        total: Items of all processes; None if they were counted in a batch, because no process
            knows those of the others.
        by_row: Items of each row of this process, of shape (B,); None if every row is an item.
    """

    local: Any
    total: float | None
    by_row: NDArray[Any] | Tensor | None = None

    def scale(self, factor: float, total: Any = None) -> Any:
        """Return ``factor`` times the fraction of all items, or of ``total``, that is local.

        If losses are multiplied by it, their average over ``factor`` processes is the mean over
        items. It is 0 if there is no item, and a tensor if ``total`` is one.
        """
        total = self.total if total is None else total
        assert total is not None, "the items were counted in a batch"
        if isinstance(total, Tensor):
            return self.local * factor / positive_total(total)
        return self.local * factor / total if total else 0.0


def positive_total(total: Tensor) -> Tensor:
    """Return a total to divide by: 1 instead of 0."""
    return total.where(total > 0, torch.ones_like(total))


def row_weights(lengths: list[int], sizes: list[int]) -> list[StepWeight]:
    """Return the weights of steps whose items are rows.

    Args:
        lengths: Rows of this process in each step.
        sizes: Rows of all processes in each step.
    """
    pairs = [*zip(lengths, sizes, strict=True)]
    # Most steps have the same weight.
    weights = {pair: StepWeight(*pair) for pair in {*pairs}}
    return [*map(weights.__getitem__, pairs)]


def item_weights(
    local_items: NDArray[Any], local_sizes: list[int], items: NDArray[Any], sizes: list[int]
) -> list[StepWeight]:
    """Return the weights of consecutive steps from the items at their positions.

    Args:
        local_items: Items at the positions of this process, of shape (local positions,).
        local_sizes: Positions of this process in each step.
        items: Items at all positions, of shape (positions,).
        sizes: Positions of all processes in each step.
    """
    local_sums = group_sums(local_items.astype(np.float64), local_sizes).tolist()
    sums = group_sums(items.astype(np.float64), sizes).tolist()
    by_row = np.split(local_items, np.cumsum(local_sizes)[:-1])
    return [*map(StepWeight, local_sums, sums, by_row)]


class DeliveredStep(NamedTuple):
    """A batch that a loader has delivered.

    Args:
        step_index: The index of the step in its epoch.
        num_rows: Rows of the batch.
        weight: Its weight.
        is_ambiguous: Whether a batch with another weight could be meant.
    """

    step_index: int
    num_rows: int
    weight: StepWeight
    is_ambiguous: bool


class DeliveredSteps:
    """The batches that a loader has delivered and whose weights no strategy has taken yet."""

    # One batch, unless something between the loader and the Trainer fetches ahead.

    def __init__(self) -> None:
        # The rows of each batch, and the weight of its loss.
        self._pending: deque[tuple[int, StepWeight]] = deque(maxlen=_MAX_PENDING)
        self._discarded: list[tuple[int, StepWeight]] = []
        self._next_step = 0
        self._count: CountInSteps | None = None
        #: Notes the rows and the weight of a batch as delivered.
        self.add = self._pending.append
        #: A warning for the end of the first epoch, if nothing uses the weights; "" for none.
        self.reminder = ""

    def begin_epoch(self, first_step: int, count: CountInSteps) -> None:
        """Discard what an earlier epoch delivered in excess.

        Args:
            first_step: The index of the first step that is delivered.
            count: Counts the items in steps of the epoch.
        """
        if self._pending and self.reminder:
            warnings.warn(self.reminder, stacklevel=2)
            self.reminder = ""
        self._discarded = [*self._pending]
        self._pending.clear()
        self._next_step = first_step
        self._count = count

    def take(self) -> DeliveredStep | None:
        """Return the earliest batch, which the Trainer trains on next, and forget it.

        Returns:
            The batch, or None if nothing was delivered since the last call.
        """
        if not self._pending:
            return None
        num_rows, weight = self._pending.popleft()
        step_index = self._next_step
        self._next_step += 1
        candidates = (*self._discarded, *self._pending)
        self._discarded.clear()
        is_ambiguous = any(
            weight.total is None or other.total is None or weight.scale(1) != other.scale(1)
            for _, other in candidates
        )
        return DeliveredStep(step_index, num_rows, weight, is_ambiguous)

    @property
    def last(self) -> StepWeight | None:
        """The weight of the latest batch that no strategy has taken; None if there is none."""
        return self._pending[-1][1] if self._pending else None

    def num_items(self, steps: range) -> float:
        """Count the items of all processes in steps of the current epoch, without those skipped."""
        assert self._count is not None, "no epoch has begun"
        return self._count(steps)


def make_item_counter(name: str, order: Sampler, fields: Fields) -> CountItems:
    """Return a function that counts the items at positions by a field of their rows.

    Args:
        name: A field with one number in each row, or with rows of different lengths, whose items
            are counted.
        order: The order of the rows.
        fields: The fields of the dataset.

    Raises:
        ValueError: The field doesn't exist, is text, is None in a row, or has a negative or
            non-finite number; or the order cuts rows.
    """
    if isinstance(order, PackedSampler) and order.cuts_rows:
        raise ValueError(
            f"weight={name!r}: rows are cut by the sampler, and the items of their pieces are"
            " unknown: pass a function of the batch, or pack with overflow='error' or 'drop'"
        )
    rows = order.pool.dataset_rows(order.pool.indices())
    try:
        items = fields.values(name, rows)
    except ValueError as error:
        try:
            items = fields.lengths(name)[rows]
        except ValueError:
            raise ValueError(f"weight={name!r}: {error}") from error
    if items.dtype.kind not in "biuf":
        raise ValueError(
            f"weight={name!r}: the field is text: choose a field of numbers, or pass a function of"
            " the batch"
        )
    is_valid = np.isfinite(items) & (items >= 0)
    if not is_valid.all():
        wrong = int(np.argmin(is_valid))
        raise ValueError(
            f"weight={name!r}: row {rows[wrong]} has {items[wrong]!r}: numbers of items must be"
            " finite and not negative"
        )
    return partial(order.sums_at, items)
