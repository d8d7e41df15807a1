"""Rows of a store that is being built: a reader says which rows it needs, and waits for them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_memmap.loading.buffers import Buffers
from lightning_memmap.loading.memory import Columns, Memory, Places, Ragged
from lightning_memmap.loading.row_source import Leaf
from lightning_memmap.loading.variable_rows import VariableRows, largest
from lightning_memmap.sampling import Integers, Sampler
from lightning_memmap.store.growing import GrowingItems, GrowingStore
from lightning_memmap.store.open_columns import OpenColumn
from lightning_memmap.store.serving import Serving, Wanted


class GrowingMemory(Memory):
    """Rows in the files of a store that is being built.

    Args:
        columns: Their fields.
        places: Where they lie.
        serving: Which of them are there.
    """

    # A step does not wait for the rows of later ones.
    max_steps = 1

    def __init__(self, columns: Columns, places: Places, serving: Serving) -> None:
        super().__init__(columns, places)
        self._serving, self._wanted = serving, Wanted(serving)
        #: What was located since the last fetch: positions and places.
        self._located: list[tuple[Integers, Integers]] = []
        self._has_fetched = False

    @override
    def locate(self, sampler: Sampler, epoch: int, positions: range) -> Integers:
        found = super().locate(sampler, epoch, positions)
        if self._has_fetched:
            self._located, self._has_fetched = [], False
        self._located.append((np.asarray(positions), found))
        # One data device after the other locates its rows: all are needed step by step.
        order = np.argsort(np.concatenate([each for each, _ in self._located]), kind="stable")
        self._wanted.say(np.concatenate([each for _, each in self._located])[order])
        return found

    @override
    def fetch(
        self, slots: Tensor, out: Buffers | None = None, *, pin_memory: bool = False
    ) -> list[Leaf]:
        self._has_fetched = True
        if not self.is_released:
            self._serving.wait(slots.numpy())
        return super().fetch(slots, out, pin_memory=pin_memory)


@dataclass(frozen=True, eq=False)
class _GrowingRagged(Ragged):
    """Rows that differ in length, copied one by one: they lie in several files."""

    column: GrowingItems = field(kw_only=True)

    @override
    def take(self, places: Integers) -> VariableRows:
        items, sizes, _ = self.column.read(places)
        assert sizes is not None
        lengths = sizes.prod(axis=1)
        starts = np.cumsum(lengths) - lengths
        return VariableRows(self.field, items, starts, sizes, largest(sizes))


def growing_rows(
    store: GrowingStore, opened: Sequence[OpenColumn], places: Places
) -> GrowingMemory:
    """The rows of a store that is being built. Nothing is read yet."""
    found = [
        _GrowingRagged(each.field, each.items, each.at, column=each)
        if isinstance(each, GrowingItems)
        else each.tensor.as_subclass(Tensor)
        for each in opened
    ]
    return GrowingMemory(Columns(found, torch.device("cpu")), places, store.serving)
