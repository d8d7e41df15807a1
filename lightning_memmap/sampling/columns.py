"""Columns: values of all rows that a store doesn't hold, passed in place of the name of a field."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class DatasetIdentity:
    """The dataset that a column is read for: its number of rows, and its contents."""

    num_rows: int
    #: See `Fields.contents`.
    contents: Mapping[str, str] = field(hash=False)

    @classmethod
    def of(cls, fields: Fields) -> "DatasetIdentity":
        """Return the identity of the dataset that has these fields."""
        return cls(fields.num_rows, fields.contents)

    def difference(self, contents: Mapping[str, str]) -> str | None:
        """Return the name of a value that differs from those of another dataset, if any does."""
        common = contents.keys() & self.contents.keys()
        return next((n for n in sorted(common) if contents[n] != self.contents[n]), None)


class Column(ABC):
    """One value for each row of a dataset, such as a result of training."""

    #: Whether an order reads the column again before each epoch.
    each_epoch: bool = False

    @abstractmethod
    def read(self, dataset: DatasetIdentity, before: int | None = None) -> ColumnValues:
        """Read the column.

        Args:
            dataset: The dataset whose rows it must have.
            before: Read the values that there were before this epoch; by default the last ones.

        Raises:
            StoreError: There are no values.
            ValueError: The column belongs to another dataset, or has several values in each row.
        """

    @abstractmethod
    def check_trainer(self, trainer: Any) -> None:
        """Check that a run writes the column, if it is read before each epoch.

        Raises:
            ValueError: No callback of its Trainer does.
        """

    @property
    @abstractmethod
    def remedy(self) -> str:
        """How a user replaces values that cannot be used, for the end of a message."""

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """The identity of the column, without its values, as JSON values."""


@dataclass(frozen=True)
class EpochColumn:
    """A column that is read before each epoch, for one dataset."""

    column: Column
    dataset: DatasetIdentity

    def read(self, epoch: int) -> ColumnValues:
        """Read the values that there were before an epoch."""
        return self.column.read(self.dataset, epoch)

    @property
    def identity(self) -> dict[str, Any]:
        """The identity of the column."""
        return self.column.identity


def read_at_set_up(argument: str, column: Column, fields: Fields) -> ColumnValues:
    """Read a column that decides the rows of shards, and so cannot change from epoch to epoch."""
    if column.each_epoch:
        raise ValueError(
            f"{argument}={column!r}: the rows of each device are chosen once, so each_epoch=True is"
            " only possible in Weighted(...). Use the results of another run"
        )
    return column.read(DatasetIdentity.of(fields))


def field_values(
    argument: str, fields: Fields, field: str | Column, rows: Integers | None = None
) -> NDArray[Any]:
    """Return the value of a field or a column in each row; see `Fields.values`."""
    if isinstance(field, str):
        return fields.values(field, rows)
    values, is_given, _ = read_at_set_up(argument, field, fields)
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
    return read_at_set_up(argument, field, fields).is_given
