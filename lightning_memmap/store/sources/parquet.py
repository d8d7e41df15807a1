"""Columns of Parquet files, read by row groups when they are needed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from lightning_memmap.errors import DatasetError, describe_error
from lightning_memmap.sampling import Integers
from lightning_memmap.store.sources.field_array import FieldArray, join
from lightning_memmap.store.sources.from_arrow import to_numpy
from lightning_memmap.store.sources.names import chosen


def parquet_columns(path: Path, names: Sequence[str] | None) -> dict[str, Any]:
    """Open a Parquet file, or all such files of a directory in the order of their names.

    Args:
        path: The file or directory.
        names: The columns to use; None for all.

    Returns:
        One `ParquetColumn` by name.

    Raises:
        ModuleNotFoundError: pyarrow is not installed.
        FileNotFoundError: There is no such file.
        ValueError: A name is not among those of the files, or is there twice.
        DatasetError: A file cannot be read.
    """
    from pyarrow.parquet import read_schema

    paths = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not paths:
        raise FileNotFoundError(f"{path}: the directory has no file that ends in .parquet")
    paths[0].stat()  # Its error has the name of a missing file, which that of pyarrow has not.
    with _reading(paths[0]):
        found = read_schema(paths[0]).names
    return {name: ParquetColumn(paths, name) for name in chosen(names, found)}


@contextmanager
def _reading(path: str | Path) -> Iterator[None]:
    """Name the file in an error of pyarrow, and in one of the file system."""
    from pyarrow import ArrowException

    try:
        yield
    except FileNotFoundError:
        raise  # It names the file.
    except (ArrowException, OSError) as error:
        raise DatasetError(
            f"{path}: it cannot be read as a Parquet file ({describe_error(error)})"
        ) from None


class ParquetColumn(FieldArray):
    """One column of Parquet files. The row group that was read last is kept.

    Args:
        paths: The files.
        name: The column.

    Attributes:
        files: Path, size in bytes and time of each file, which identify the rows.
        name: The column.
    """

    def __init__(self, paths: Sequence[Path], name: str) -> None:
        states = [(path, path.stat()) for path in paths]
        self.files = [(str(path), state.st_size, state.st_mtime_ns) for path, state in states]
        self.name = name
        self._last: tuple[int, Any] | None = None

    @property
    def has_missing(self) -> bool:
        """Whether rows have no value: by the statistics of the files, where these tell."""
        return any(map(self._lacks_values, self._groups[0]))

    @cached_property
    def _groups(self) -> tuple[list[tuple[str, Any, int]], Integers]:
        """Path, file and number of each row group, and where each ends in rows of all files.

        Raises:
            DatasetError: A file cannot be read, or has no such column, or one of another type.
        """
        from pyarrow.parquet import ParquetFile

        groups, sizes, kinds = [], [], list[Any]()
        for path, _, _ in self.files:
            with _reading(path):
                file = ParquetFile(path)
                schema = file.schema_arrow
            if schema.names.count(self.name) != 1:
                raise DatasetError(
                    f"{path}: it has no column {self.name!r}, which {self.files[0][0]} has; its"
                    f" columns are {', '.join(schema.names)}"
                )
            kinds.append(schema.field(self.name).type)
            if not _is_alike(kinds[0], kinds[-1]):
                raise DatasetError(
                    f"{path}: column {self.name!r} is {kinds[-1]}, and {kinds[0]} in"
                    f" {self.files[0][0]}: give files whose columns have one type"
                )
            for number in range(file.num_row_groups):
                groups.append((path, file, number))
                sizes.append(file.metadata.row_group(number).num_rows)
        return groups, np.cumsum(sizes, dtype=np.int64)

    def __len__(self) -> int:
        ends = self._groups[1]
        return int(ends[-1]) if len(ends) else 0

    def __getitem__(self, row: int) -> Any:
        return self.read(row, row + 1)[0]

    @override
    def read(self, first: int, end: int) -> Any:
        ends = self._groups[1]
        parts, number = [], int(np.searchsorted(ends, first, side="right"))
        while first < end:
            values, stop = self._read_group(number), int(ends[number])
            start = stop - len(values)
            parts.append(values[first - start : min(end, stop) - start])
            first, number = min(end, stop), number + 1
        return join(parts)

    @override
    def take(self, rows: Integers) -> Any:
        order = np.argsort(rows, kind="stable")
        numbers = np.searchsorted(self._groups[1], rows[order], side="right")
        parts = []
        for places in np.split(order, np.flatnonzero(np.diff(numbers)) + 1):
            number = int(np.searchsorted(self._groups[1], rows[places[0]], side="right"))
            values = self._read_group(number)
            parts.append(values[rows[places] - (int(self._groups[1][number]) - len(values))])
        return join(parts)[np.argsort(order)]

    def _lacks_values(self, place: tuple[str, Any, int]) -> bool:
        found = _null_count(*place[1:], self.name)
        return bool(self._read_arrow(*place).null_count if found is None else found)

    def _read_group(self, number: int) -> Any:
        if self._last is None or self._last[0] != number:
            self._last = number, to_numpy(self._read_arrow(*self._groups[0][number]))
        return self._last[1]

    def _read_arrow(self, path: str, file: Any, group: int) -> Any:
        with _reading(path):
            return file.read_row_group(group, columns=[self.name]).column(self.name)

    def __getstate__(self) -> dict[str, Any]:
        # Each process opens the files for itself.
        return {"files": self.files, "name": self.name, "_last": None}


def _null_count(file: Any, group: int, name: str) -> int | None:
    """How many rows of a column have no value in a row group; None where the file does not say.

    Of lists and structs it tells only that nothing is missing: an empty list counts as well.
    """
    metadata = file.metadata.row_group(group)
    columns = [metadata.column(index) for index in range(metadata.num_columns)]
    leaves = [c for c in columns if f"{c.path_in_schema}.".startswith(f"{name}.")]
    counts = []
    for leaf in leaves:
        found = leaf.statistics
        if found is None or not found.has_null_count:
            return None
        counts.append(found.null_count)
    is_whole = [leaf.path_in_schema for leaf in leaves] == [name]
    return sum(counts) if counts and (is_whole or not any(counts)) else None


def _is_alike(one: Any, other: Any) -> bool:
    """Whether the values of two types may make one column."""
    from pyarrow.types import is_primitive

    return one == other or not (is_primitive(one) and is_primitive(other))
