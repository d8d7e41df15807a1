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
from lightning_memmap.store.sources.arrow import TableColumn, plain, take
from lightning_memmap.store.sources.column import Rows, by_piece

#: Files that are open at once.
_MAX_OPEN_FILES = 16


def chosen(names: Sequence[str] | None, found: Sequence[Any]) -> list[Any]:
    """The names of the columns to use, in order: all, or those that a user gives."""
    if isinstance(names, str):
        raise TypeError(f"names={names!r}: give a list of names")
    wanted = list(found if names is None else names)
    for name in wanted:
        if found.count(name) != 1 or wanted.count(name) != 1:
            what = "there is no such column" if name not in found else "it is there twice"
            raise ValueError(
                f"column {name!r}: {what}; the columns are {', '.join(map(str, found))}"
            )
    return wanted


def parquet_columns(path: Path, names: Sequence[str] | None) -> dict[str, Any]:
    """Open a Parquet file, or all such files of a directory in the order of their names."""
    from pyarrow.parquet import read_schema

    paths = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not paths:
        raise FileNotFoundError(f"{path}: the directory has no file that ends in .parquet")
    paths[0].stat()  # Its error has the name of a missing file, which that of pyarrow has not.
    with _reading(paths[0]):
        found = read_schema(paths[0]).names
    wanted = chosen(names, found)
    files = _Files(paths, wanted)
    return {name: ParquetColumn(files, name) for name in wanted}


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
            f"{path}: it cannot be read as a Parquet file ({describe_error(error)}); read another"
            " format with a library of tables, such as pandas.read_csv, and give the table"
        ) from None


class _Files:
    """The files of a dataset, of which few are open at once."""

    def __init__(self, paths: Sequence[Path], names: Sequence[str]) -> None:
        stats = [path.stat() for path in paths]
        self.states = [
            (str(path), stat.st_size, stat.st_mtime_ns)
            for path, stat in zip(paths, stats, strict=True)
        ]
        self._names = names
        self._open: dict[str, Any] = {}
        #: By column, the row group that was read last.
        self._last: dict[str, tuple[int, Any]] = {}

    @cached_property
    def _groups(self) -> tuple[list[tuple[str, int]], Integers]:
        """The row groups, and where each ends, in rows of all files."""
        groups, sizes, kinds = list[tuple[str, int]](), list[int](), dict[str, Any]()
        first = self.states[0][0]
        for path, *_ in self.states:
            file = self._file(path)
            schema = file.schema_arrow
            for name in self._names:
                if schema.names.count(name) != 1:
                    raise DatasetError(
                        f"{path}: it has no column {name!r}, which {first} has; its columns are"
                        f" {', '.join(schema.names)}"
                    )
                found = schema.field(name).type
                kind = kinds.setdefault(name, found)
                if not _is_alike(kind, found):
                    raise DatasetError(
                        f"{path}: column {name!r} is {found}, and {kind} in {first}: give files"
                        " whose columns have one type"
                    )
            for number in range(file.num_row_groups):
                groups.append((path, number))
                sizes.append(file.metadata.row_group(number).num_rows)
        return groups, np.cumsum(sizes, dtype=np.int64)

    @property
    def ends(self) -> Integers:
        """Where each row group ends, in rows of all files."""
        return self._groups[1]

    def read(self, group: int, name: str) -> Any:
        """One column of a row group."""
        path, number = self._groups[0][group]
        with _reading(path):
            table = self._file(path).read_row_group(number, columns=[name])
        return plain(table.column(name))

    def group(self, group: int, name: str) -> Any:
        """One column of a row group, kept until another one is asked for."""
        if name not in self._last or self._last[name][0] != group:
            self._last[name] = group, self.read(group, name)
        return self._last[name][1]

    def has_missing(self, name: str) -> bool:
        """Whether rows of a column have no value: by the statistics of each row group, or by its
        rows where these do not tell."""
        for group, (path, number) in enumerate(self._groups[0]):
            count = _null_count(self._file(path), number, name)
            if count is None:
                count = self.read(group, name).null_count
            if count:
                return True
        return False

    def _file(self, path: str) -> Any:
        from pyarrow.parquet import ParquetFile

        if (file := self._open.pop(path, None)) is None:
            while len(self._open) >= _MAX_OPEN_FILES:
                self._open.pop(next(iter(self._open))).close()
            with _reading(path):
                file = ParquetFile(path)
        self._open[path] = file  # The last one of those that are open.
        return file

    def __getstate__(self) -> dict[str, Any]:
        # Each process opens the files for itself.
        return {**vars(self), "_open": {}, "_last": {}}


class ParquetColumn(TableColumn):
    """One column of Parquet files."""

    def __init__(self, files: _Files, name: str) -> None:
        self._files = files
        self.files = files.states
        self.name = name

    @override
    def has_missing(self) -> bool:
        return self._files.has_missing(self.name)

    def __len__(self) -> int:
        ends = self._files.ends
        return int(ends[-1]) if len(ends) else 0

    @override
    def pieces(self, rows: Integers) -> Integers:
        # A row group is read as a whole.
        return np.searchsorted(self._files.ends, rows, side="right")

    @override
    def take(self, rows: Rows) -> Any:
        import pyarrow as pa

        groups, back = by_piece(rows, self._files.ends)
        taken = [take(self._files.group(group, self.name), within) for group, within in groups]
        joined = pa.chunked_array([chunk for column in taken for chunk in column.chunks])
        return joined if back is None else take(joined, back)


def _null_count(file: Any, group: int, name: str) -> int | None:
    """How many rows of a column have no value in a row group; None where the file does not say."""
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
