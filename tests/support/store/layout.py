"""What lies in the directory of a store."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_memmap.store.building import describe_unfinished_build
from lightning_memmap.store.directory import DRAFT, PARTS_DRAFT, StoreDirectory
from lightning_memmap.store.manifest import MANIFEST, Manifest


def files_of(path: Path) -> Path:
    """Where the files of a store are."""
    return StoreDirectory(path).files(Manifest.read(path))


def names_in(path: Path) -> list[str]:
    """The names of all files of a store, beside which only its lock may be there."""
    files = files_of(path)
    assert {MANIFEST, files.name} <= set(os.listdir(path)) <= {MANIFEST, files.name, ".lock"}
    return sorted([MANIFEST, *os.listdir(files)])


def is_empty(path: Path) -> bool:
    """Whether nothing is where a store was to be, but for its lock."""
    return not path.exists() or set(os.listdir(path)) <= {".lock"}


def building_path(path: Path) -> Path:
    """The generation of the one unfinished build of one process."""
    (found,) = StoreDirectory(path).unfinished(DRAFT)
    return found


def rows_there(path: Path) -> int:
    """How many rows of an unfinished build are on the disk."""
    there = describe_unfinished_build(path)
    return 0 if there is None else int(there.split()[0].replace(",", ""))


def parts_path(path: Path) -> Path:
    """The generation of the one unfinished build in parts."""
    (found,) = StoreDirectory(path).unfinished(PARTS_DRAFT)
    return found


def fail_to_list(monkeypatch: pytest.MonkeyPatch, directory: Path, code: int = errno.EIO) -> None:
    """Let the system fail to list one directory."""

    def failing(list_: Any) -> Any:
        def listed(path: Any = ".") -> Any:
            if Path(path) == directory:
                raise OSError(code, os.strerror(code), str(path))
            return list_(path)

        return listed

    monkeypatch.setattr(os, "listdir", failing(os.listdir))
    monkeypatch.setattr(os, "scandir", failing(os.scandir))
