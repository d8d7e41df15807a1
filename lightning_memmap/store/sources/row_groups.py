"""Columns that are read one row group of a file at a time."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import pyarrow as pa
from typing_extensions import override

from lightning_memmap.integers import Integers
from lightning_memmap.store.sources.arrow_column import ArrowColumn
from lightning_memmap.store.sources.arrow_facts import ArrowFacts, find_facts, merge_facts
from lightning_memmap.store.sources.arrow_types import (
    cast_column,
    concatenate_columns,
    take_column_rows,
    to_takeable,
)
from lightning_memmap.store.sources.column import split_by_group
from lightning_memmap.store.workers import RowNumbers


class RowGroups(ABC):
    """The row groups of several files with the same columns, numbered across the files.

    Attributes:
        files: Path, bytes and modification time in ns of each file.
        types: The Arrow type of each column, common to all files.
        stops: The row after the last one of each row group, int64 of shape (row groups,).
    """

    files: list[tuple[str, int, int | None]]
    types: dict[str, Any]
    stops: Integers

    def __init__(self) -> None:
        #: The row group that was read last for each column.
        self._cache: dict[str, tuple[int, Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_cache": {}}

    @property
    def columns(self) -> dict[str, "GroupedColumn"]:
        """The columns by name."""
        return {name: GroupedColumn(self, name) for name in self.types}

    def read(self, group: int, name: str) -> Any:
        """Read one column of a row group."""
        return cast_column(to_takeable(self._read_column(group, name)), self.types[name])

    def read_cached(self, group: int, name: str) -> Any:
        """Read one column of a row group, and keep it until another row group is read."""
        if name not in self._cache or self._cache[name][0] != group:
            self._cache[name] = group, self.read(group, name)
        return self._cache[name][1]

    @abstractmethod
    def _read_column(self, group: int, name: str) -> Any:
        """Read one column of a row group in the type of its file."""

    @abstractmethod
    def num_nulls(self, group: int, name: str) -> int | None:
        """Return the number of None in a flat column of a row group; None if it isn't recorded."""


def count_recorded_nulls(metadata: Any, name: str) -> int | None:
    """Return the number of None in a column from the metadata of a Parquet row group, if it has
    it."""
    chunks = (metadata.column(index) for index in range(metadata.num_columns))
    stats = next((chunk.statistics for chunk in chunks if chunk.path_in_schema == name), None)
    return None if stats is None or not stats.has_null_count else int(stats.null_count)


class GroupedColumn(ArrowColumn):
    """One column of files that are read one row group at a time."""

    def __init__(self, groups: RowGroups, name: str) -> None:
        self._groups = groups
        self.files = groups.files
        self.name = name

    @override
    def __len__(self) -> int:
        return int(self._groups.stops[-1]) if len(self._groups.stops) else 0

    @override
    def find_facts(self) -> ArrowFacts:
        arrow_type = self._groups.types[self.name]
        sizes = np.diff(self._groups.stops, prepend=0).tolist()
        facts = [ArrowFacts(arrow_type, False, False)] * (not sizes)
        for group, size in enumerate(sizes):
            num_nulls = None
            if not pa.types.is_nested(arrow_type):
                num_nulls = self._groups.num_nulls(group, self.name)
            if num_nulls is None:
                facts.append(find_facts(self._groups.read(group, self.name)))
            else:
                facts.append(ArrowFacts(arrow_type, num_nulls < size, num_nulls > 0))
        return merge_facts(facts)

    @override
    def row_groups(self) -> Integers:
        stops = self._groups.stops
        return np.repeat(np.arange(len(stops), dtype=np.int64), np.diff(stops, prepend=0))

    @override
    def take(self, rows: RowNumbers) -> Any:
        parts, inverse = split_by_group(rows, self._groups.stops)
        column = concatenate_columns(
            take_column_rows(self._groups.read_cached(group, self.name), group_rows)
            for group, group_rows in parts
        )
        return column if inverse is None else take_column_rows(column, inverse)
