"""Builds stores on a disk of one mebibyte and prints the outcomes as JSON.

    python -m tests.unit.store.full_disk mounted DIRECTORY
    python -m tests.unit.store.full_disk pretended DIRECTORY

The first mounts a file system there, and is run in a mount namespace of its own (``unshare
--mount``), so that the mount goes with the process. The second needs no rights: this process is
told that the directory is a disk of that size, and is refused what does not fit there.
"""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from lightning_memmap.store import build_store, open_store

MIB = 2**20
BLOCK = 4096


def pretend(directory: Path) -> None:
    """Let a directory answer like a disk of one mebibyte, which needs a block besides for a file
    that is given its place."""
    allocate = os.posix_fallocate
    usage = type(shutil.disk_usage(directory))

    def used(but: int | None = None) -> int:
        states = [path.stat() for path in directory.rglob("*") if path.is_file()]
        return sum(512 * state.st_blocks for state in states if state.st_ino != but)

    def disk_usage(path: Any) -> Any:
        return usage(MIB, used(), MIB - used())

    def posix_fallocate(file: int, offset: int, length: int) -> None:
        blocks = BLOCK * (1 - (-(offset + length) // BLOCK))
        if used(os.fstat(file).st_ino) + blocks > MIB:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(file, offset, length)

    shutil.disk_usage = disk_usage  # type: ignore[assignment]
    os.posix_fallocate = posix_fallocate


class Sounds:
    """Rows that differ in length, of so many bytes in all. Notes what is free while they are read.

    Args:
        directory: On the disk.
        num_bytes: Bytes of all rows.
    """

    def __init__(self, directory: Path, num_bytes: int) -> None:
        self.directory, self.num_bytes = str(directory), num_bytes

    def __len__(self) -> int:
        return 200

    def __getitem__(self, row: int) -> torch.Tensor:
        free.append(shutil.disk_usage(self.directory).free)
        return torch.full((self.num_bytes // 200 + row % 3 - 1,), row, dtype=torch.uint8)


#: What is free at each reading of a row.
free: list[int] = []


def attempt(directory: Path, rows: Any, **arguments: Any) -> dict[str, Any]:
    path = directory / "train"
    before = sorted(os.listdir(directory))
    free[:] = [shutil.disk_usage(directory).free]
    try:
        store = build_store(rows, path, num_shards=2, progress=False, **arguments)
    except OSError as error:
        outcome: dict[str, Any] = {"errno": error.errno, "message": str(error)}
    else:
        outcome = {"num_rows": store.num_rows}
    names = sorted(os.listdir(directory))
    left = [name for name in names if os.listdir(directory / name) != [".lock"]]
    return {**outcome, "free": free[0], "before": before, "left": left}


def main(way: str, mount_point: Path) -> None:
    if way == "mounted":
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount_point)]
        subprocess.run(mount, check=True)
    else:
        pretend(mount_point)
    outcomes = {}
    outcomes["larger than the disk"] = attempt(
        mount_point, [torch.zeros(MIB // 4, dtype=torch.uint8)] * 5
    )
    # As many bytes as are free: there is no room for the other files of a build.
    room = shutil.disk_usage(mount_point).free
    outcomes["exactly what is free"] = attempt(
        mount_point, [torch.zeros(room // 4, dtype=torch.uint8)] * 4
    )
    # There is room for them, but not for twice as many bytes.
    outcomes["rows of variable length"] = attempt(mount_point, Sounds(mount_point, 3 * MIB // 4))
    outcomes["rows read"] = len(free) - 1
    outcomes["small"] = attempt(mount_point, [torch.full((1000,), row) for row in range(5)])
    outcomes["overwrite"] = attempt(
        mount_point, [torch.zeros(MIB // 4, dtype=torch.uint8)] * 5, overwrite=True
    )
    store = open_store(mount_point / "train")
    outcomes["overwrite"]["old rows"] = [int(store[row][0]) for row in range(len(store))]
    shutil.rmtree(mount_point / "train")
    outcomes["sounds"] = attempt(mount_point, Sounds(mount_point, 3 * MIB // 8))
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
