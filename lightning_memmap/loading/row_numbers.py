"""Rows that come with their numbers: those that they have in the dataset as it was given."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from lightning_memmap.loading.buffers import Buffers
from lightning_memmap.loading.row_source import EpochRows, Leaf, WrappedRows
from lightning_memmap.sampling import Integers, Sampler
from lightning_memmap.schema import Schema

#: The key of the row numbers in a batch.
ROW_NUMBER = "row_number"


class NumberedRows(WrappedRows):
    """A row source whose rows have one leaf more, the last one: their numbers."""

    @contextmanager
    @override
    def epoch(self, sampler: Sampler, epoch: int, position: int) -> Iterator[EpochRows]:
        with self.rows.epoch(sampler, epoch, position) as rows:
            yield _NumberedEpoch(rows, sampler, epoch)


class _NumberedEpoch:
    """Rows and their numbers. Beside each location is the number of its row."""

    def __init__(self, rows: EpochRows, sampler: Sampler, epoch: int) -> None:
        self.device, self.fields, self.row_bytes = rows.device, rows.fields, rows.row_bytes
        self._rows, self._sampler, self._epoch = rows, sampler, epoch

    def locate(self, positions: range) -> Integers:
        numbers = self._sampler.dataset_rows(self._epoch, positions)
        return np.column_stack([self._rows.locate(positions), numbers])

    def fetch(
        self,
        locations: Tensor,
        out: Buffers | None = None,
        *,
        pin_memory: bool = False,
        coming: Tensor | None = None,
    ) -> Sequence[Leaf]:
        places, numbers = (column.contiguous() for column in locations.unbind(1))
        coming = None if coming is None else coming[:, 0].contiguous()
        leaves = self._rows.fetch(places, out, pin_memory=pin_memory, coming=coming)
        return [*leaves, numbers.to(self.device)]


class NumberedCollate:
    """Adds row numbers to batches: under the key `ROW_NUMBER`, or behind what a list has.

    Args:
        collate: Makes a batch of the other leaves.
        schema: The schema of the samples.

    Raises:
        ValueError: The samples have that key, or are of a class, in which there is no place.
    """

    def __init__(self, collate: Callable[[Sequence[Any]], Any], schema: Schema) -> None:
        node = schema.structure
        if node.name:
            raise ValueError(
                f"with_row_numbers=True: the samples are of the class {node.name!r}, which has no"
                f" place for row numbers: give a dict, or a field of your own with the row"
            )
        if ROW_NUMBER in node.keys:
            raise ValueError(
                f"with_row_numbers=True: the samples have a key {ROW_NUMBER!r} of their own: rename"
                " it, or leave the argument out"
            )
        self._collate = collate

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Make a batch.

        Args:
            leaves: One for each field, and the row numbers.

        Returns:
            The nested batch.
        """
        *others, numbers = leaves
        batch = self._collate(others)
        if isinstance(batch, TensorDictBase):
            return batch.set(ROW_NUMBER, numbers)
        if type(batch) is dict:
            return {**batch, ROW_NUMBER: numbers}
        return [*batch, numbers] if type(batch) is list else [batch, numbers]
