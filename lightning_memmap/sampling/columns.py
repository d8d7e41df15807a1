"""Columns: values of all rows that a store doesn't hold, passed in place of the name of a field."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_memmap.sampling.factory import Fields


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
    has_value: NDArray[np.bool_]
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
        """Return the name of the first value that differs from another dataset's, or None."""
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

    def read_before(self, epoch: int) -> ColumnValues:
        """Read the values that existed before an epoch."""
        return self.column.read(self.dataset, epoch)

    @property
    def identity(self) -> dict[str, Any]:
        """The identity of the column."""
        return self.column.identity


def read_column(
    argument: str, fields: Fields, field: str | Column
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Read a field or a column that decides the rows of shards.

    Args:
        argument: The argument that the field is passed as, for errors.
        fields: The fields of the dataset.
        field: The name of the field, or the column.

    Returns:
        The values in all rows that have one, in dataset order, and which rows these are: a mask of
        shape (num_rows,).
    """
    if isinstance(field, str):
        has_value = fields.given(field)
        return fields.values(field, np.flatnonzero(has_value)), has_value
    if field.each_epoch:
        raise ValueError(
            f"{argument}={field!r}: the rows of each device are chosen once, so each_epoch=True is"
            " only possible in Weighted(...). Use the results of another run"
        )
    values, has_value, _ = field.read(DatasetIdentity.of(fields))
    return values[has_value], has_value


def read_whole_column(argument: str, fields: Fields, field: str | Column) -> NDArray[Any]:
    """Read a field or a column that must have a value in each row, of shape (num_rows,)."""
    values, has_value = read_column(argument, fields, field)
    missing = np.flatnonzero(~has_value)
    if len(missing):
        raise ValueError(
            f"{argument}={field!r}: {len(missing)} of {fields.num_rows} rows have no value, such as"
            f" row {missing[0]}: store a value such as -1 instead of None, or leave these rows out"
            " of the dataset; results must be of a run with all rows, or get a value for each row"
            " from a function"
        )
    return values
