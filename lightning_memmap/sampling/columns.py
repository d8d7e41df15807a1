"""Columns: values of all rows that a store doesn't hold, passed in place of the name of a field."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_memmap.sampling.factory import Fields
from lightning_memmap.sampling.rows import Integers


@dataclass(frozen=True)
class ColumnVersion:
    """Which values a column had: the epoch that made them, and a digest of them."""

    epoch: int
    digest: str

    @property
    def identity(self) -> dict[str, Any]:
        """These values as JSON values."""
        return {"epoch": self.epoch, "digest": self.digest}


class ColumnValues(NamedTuple):
    """One value for each row of a dataset, in dataset order."""

    #: Shape (num_rows,).
    values: NDArray[Any]
    #: False in rows without a value: bool of shape (num_rows,).
    is_given: NDArray[np.bool_]
    version: ColumnVersion


class Column(ABC):
    """One value for each row of a dataset, such as a result of training."""

    #: Whether an order reads the column again before each epoch.
    each_epoch: bool = False

    @abstractmethod
    def read(self, num_rows: int, before: int | None = None) -> ColumnValues:
        """Read the column.

        Args:
            num_rows: Rows of the dataset.
            before: Read the values that there were before this epoch; by default the last ones.

        Raises:
            StoreError: There are no values.
            ValueError: The column has another number of rows, or more than one value in each.
        """

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """The identity of the column, without its values, as JSON values."""


def read_at_set_up(argument: str, column: Column, num_rows: int) -> ColumnValues:
    """Read a column that decides the rows of shards, and so cannot change from epoch to epoch."""
    if column.each_epoch:
        raise ValueError(
            f"{argument}={column!r}: the rows of each device are chosen once, so each_epoch=True is"
            " only possible in Weighted(...). Use the results of another run"
        )
    return column.read(num_rows)


def field_values(
    argument: str, fields: Fields, field: str | Column, rows: Integers | None = None
) -> NDArray[Any]:
    """Return the value of a field or a column in each row; see `Fields.values`."""
    if isinstance(field, str):
        return fields.values(field, rows)
    values, is_given, _ = read_at_set_up(argument, field, fields.num_rows)
    rows = np.arange(fields.num_rows) if rows is None else rows
    missing = rows[~is_given[rows]]
    if len(missing):
        raise ValueError(
            f"{argument}={field!r}: {len(missing)} of {len(rows)} rows have no value, such as row"
            f" {missing[0]}: use the results of a run with all rows, or a function that returns a"
            " value for each row"
        )
    return values[rows]


def field_is_given(argument: str, fields: Fields, field: str | Column) -> NDArray[np.bool_]:
    """Return in which rows a field or a column has a value; see `Fields.given`."""
    if isinstance(field, str):
        return fields.given(field)
    return read_at_set_up(argument, field, fields.num_rows).is_given
