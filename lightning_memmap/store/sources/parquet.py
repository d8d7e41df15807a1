"""The row groups of Parquet files."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
from pyarrow.parquet import ParquetFile
from typing_extensions import override

from lightning_memmap.errors import DatasetError, describe_error
from lightning_memmap.store.sources.arrow_types import check_lossless, common_type, takeable_type
from lightning_memmap.store.sources.row_groups import (
    GroupedColumn,
    RowGroups,
    count_recorded_nulls,
)


def open_parquet(path: Path, choose: Callable[[list[str]], list[str]]) -> dict[str, GroupedColumn]:
    """Open a Parquet file, or all Parquet files below a directory sorted by name.

    Args:
        path: The file or directory.
        choose: Returns the columns to keep, from all names of a file.
    """
    paths = [path]
    if path.is_dir():
        files = sorted(file.relative_to(path) for file in _list_parquet_files(path))
        # Other readers skip hidden files, and names that start with "_", too.
        files = [file for file in files if not any(part[0] in "._" for part in file.parts)]
        if partitioned := [file for file in files if "=" in str(file.parent)]:
            raise ValueError(
                f"{path / partitioned[0]}: the folder names hold values of columns, which would"
                f" not be read: pass pyarrow.dataset.dataset({str(path)!r}, partitioning='hive')"
            )
        paths = [path / file for file in files]
    if not paths:
        raise FileNotFoundError(f"{path}: the directory has no file that ends in .parquet")
    return ParquetRowGroups(paths, choose).columns


def _list_parquet_files(path: Path) -> Iterator[Path]:
    """Yield the Parquet files below a directory. Raises an OSError if a folder can't be listed."""

    def fail(error: OSError) -> NoReturn:
        raise error

    for folder, _, names in os.walk(path, onerror=fail):
        yield from (Path(folder, name) for name in names if name.endswith(".parquet"))


@contextmanager
def _name_file_in_errors(path: str | Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise  # Its message has the path already.
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(
            f"{path}: it can't be read as a Parquet file ({describe_error(error)}). For another"
            " format, read it with a library such as pandas.read_csv, and pass the table"
        ) from None


class ParquetRowGroups(RowGroups):
    """The row groups of several Parquet files."""

    def __init__(self, paths: Sequence[Path], choose: Callable[[list[str]], list[str]]) -> None:
        super().__init__()
        stats = [path.stat() for path in paths]
        self.files = [
            (str(path), stat.st_size, stat.st_mtime_ns)
            for path, stat in zip(paths, stats, strict=True)
        ]
        self.types = {}
        #: The file of each row group, and its number in the file.
        self._groups: list[tuple[Path, int]] = []
        sizes: list[int] = []
        for path in paths:
            file = self._open(path)
            self._add_columns(path, file.schema_arrow, choose)
            for number in range(file.num_row_groups):
                self._groups.append((path, number))
                sizes.append(file.metadata.row_group(number).num_rows)
        self.stops = np.cumsum(sizes, dtype=np.int64)
        #: The file opened last.
        self._file: tuple[Path | None, Any] = None, None

    @override
    def __getstate__(self) -> dict[str, Any]:
        # Each process opens the files itself.
        return {**super().__getstate__(), "_file": (None, None)}

    def _add_columns(
        self, path: Path, schema: Any, choose: Callable[[list[str]], list[str]]
    ) -> None:
        """Check the columns of one more file, and widen their types to hold its values."""
        if not self.types:
            self.types = {name: schema.field(name).type for name in choose(schema.names)}
        for name, known_type in self.types.items():
            self._check_name(path, schema, name)
            check_lossless(name, schema.field(name).type)
            self.types[name] = self._common_type(path, name, known_type, schema.field(name).type)
        if new := [name for name in choose(schema.names) if name not in self.types]:
            raise DatasetError(
                f"{path}: it has the column {new[0]!r}, but {self.files[0][0]} doesn't: add it"
                " there, or keep only some columns with names=[...]"
            )

    def _open(self, path: Path) -> Any:
        with _name_file_in_errors(path):
            return ParquetFile(path)

    def _check_name(self, path: Path, schema: Any, name: str) -> None:
        if schema.names.count(name) != 1:
            raise DatasetError(
                f"{path}: it has no column {name!r}, which {self.files[0][0]} has; its columns are"
                f" {', '.join(schema.names)}"
            )

    def _common_type(self, path: Path, name: str, known_type: Any, new_type: Any) -> Any:
        common = common_type(takeable_type(known_type), takeable_type(new_type))
        if common is None:
            raise DatasetError(
                f"{path}: column {name!r} has type {new_type}, but {known_type} in"
                f" {self.files[0][0]}: convert one of them, so that all files share one type"
            )
        return common

    @override
    def _read_column(self, group: int, name: str) -> Any:
        path = self._open_file_of(group)
        with _name_file_in_errors(path):
            number = self._groups[group][1]
            return self._file[1].read_row_group(number, columns=[name]).column(name)

    def _open_file_of(self, group: int) -> Path:
        """Open the file of a row group, if it isn't open, and return its path."""
        path = self._groups[group][0]
        if self._file[0] != path:
            self._file = path, self._open(path)
        return path

    @override
    def num_nulls(self, group: int, name: str) -> int | None:
        self._open_file_of(group)
        metadata = self._file[1].metadata.row_group(self._groups[group][1])
        return count_recorded_nulls(metadata, name)
