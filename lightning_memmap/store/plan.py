"""A store that is to be made, and its files during the build."""

import errno
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_memmap.errors import StoreError
from lightning_memmap.sampling import Shards
from lightning_memmap.schema import Schema
from lightning_memmap.store.columns import Column, columns_to_json, grow_columns
from lightning_memmap.store.files import TEMPORARY, claim, sync_path
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.recovery import building_path, parts_path, remove_tree
from lightning_memmap.store.row_bytes import rows_bytes

#: What a build needs on the disk beside the rows: its plan, its journal, the manifest.
_ROOM_BYTES = 64 * 2**10
#: Files that are brought to the disk at once.
_NUM_SYNCS = 4


@dataclass(frozen=True)
class StorePlan:
    """A store that is to be made, the same for all processes that write its rows.

    Args:
        path: Directory of the store.
        num_rows: Rows of the store.
        num_shards: Shards that the rows are divided into.
        schema: The fields and the nesting of a sample.
        classes: The names of the dataset's classes, by label.
        in_parts: Whether processes that know nothing of each other write the rows.
    """

    path: Path
    num_rows: int
    num_shards: int
    schema: Schema
    classes: tuple[str, ...] = ()
    in_parts: bool = False

    @cached_property
    def shards(self) -> Shards:
        """The rows, and the shards that they are divided into."""
        return Shards(self.num_rows, self.num_shards)

    @cached_property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the store before a row is written, in the order of the fields.

        Raises:
            StoreError: The files would be larger than any file can be.
        """
        try:
            return grow_columns(self.schema, self.shards)
        except ValueError as error:
            raise StoreError(f"no store can be made of this: {error}") from error

    @property
    def building(self) -> Path:
        """The directory in which the store is built."""
        return parts_path(self.path) if self.in_parts else building_path(self.path)

    @property
    def file_bytes(self) -> dict[str, int]:
        """The size of each file that is made before the first row is written, by its name."""
        return {name: size for column in self.columns for name, size in column.file_bytes.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return rows_bytes(self.columns, range(self.num_rows))

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values what must be the same in a build that resumes this one."""
        return {
            "num_rows": self.num_rows,
            "num_shards": self.num_shards,
            **self.schema.to_json(),
            **columns_to_json(self.columns),
        }

    def check(self) -> None:
        """Check that the store can be opened once it is built.

        Raises:
            StoreError: It has too many rows, shards, fields or names for a manifest.
        """
        sums = {field.name: ("0" * 16,) * self.num_shards for field in self.schema.fields}
        Manifest(
            self.shards, self.schema, self.columns, (), sums, {}, classes=self.classes
        ).encode()

    def make_files(self) -> None:
        """Make the files and claim their space.

        A full disk is thus an error now, and not a late error or a SIGBUS. Those of another build
        are removed, and not used again: a worker of it may still have them open.

        Raises:
            StoreError: Those of another build are not ours, or cannot be removed.
            OSError: The disk is too small. Everything is removed again.
        """
        if os.path.lexists(self.building):
            remove_tree(self.building)
        allocate_files(self.building, self.columns, self.path)

    def sync(self) -> None:
        """Bring the files of `file_bytes`, and the temporary ones of columns, to the disk.

        Raises:
            OSError: The disk reports an error.
        """
        temporary = (name for name in os.listdir(self.building) if name.endswith(TEMPORARY))
        paths = [self.building / name for name in {*self.file_bytes, *temporary}]
        # A disk can take several files at once.
        with ThreadPoolExecutor(_NUM_SYNCS) as pool:
            list(pool.map(sync_path, paths))

    def __str__(self) -> str:
        fields = ", ".join(f"{field.name} {field}" for field in self.schema.fields)
        return f"{self.num_rows} rows of {fields} at {self.path}"


def allocate_files(directory: Path, columns: Sequence[Column], path: Path) -> None:
    """Make the files of columns in a new directory, and claim their space.

    Args:
        directory: The directory.
        columns: The columns.
        path: Where the store is to be, for messages.

    Raises:
        OSError: The disk is too small, or the directory is there already. In the first case
            everything is removed again.
    """
    directory.mkdir()
    try:
        # Several columns may have a file in common.
        files = {
            name: (num_bytes, column.field.name)
            for column in columns
            for name, num_bytes in column.file_bytes.items()
        }
        needed = sum(num_bytes for num_bytes, _ in files.values())
        free = shutil.disk_usage(directory).free
        if needed + _ROOM_BYTES > free:
            raise _disk_full(path, needed, free)
        for name, (num_bytes, field) in files.items():
            try:
                _allocate(directory / name, num_bytes)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise _disk_full(path, needed, free) from error
                if error.errno != errno.EFBIG:
                    raise
                raise OSError(
                    errno.EFBIG,
                    f"field {field!r} needs a file of {num_bytes} bytes, more than this process"
                    " (`ulimit -f`) or the file system allows",
                    str(path),
                ) from error
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _disk_full(path: Path, needed: int, free: int) -> OSError:
    return OSError(
        errno.ENOSPC,
        f"the store needs {needed} bytes, and {free} are free, of which {_ROOM_BYTES} must stay"
        " free: make room, or choose a directory on a larger disk",
        str(path),
    )


def _allocate(path: Path, num_bytes: int) -> None:
    with open(path, "xb") as file:
        claim(file.fileno(), num_bytes, "for its rows")
