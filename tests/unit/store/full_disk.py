"""Builds stores on a file system of one mebibyte and prints, as JSON, what came of it.

Run in a mount namespace of its own (``unshare --mount``), so that the mount goes with the process.
"""

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


def attempt(directory: Path, rows: list[Any], **arguments: Any) -> dict[str, Any]:
    path = directory / "train"
    before = sorted(os.listdir(directory))
    free = shutil.disk_usage(directory).free
    try:
        store = build_store(rows, path, num_shards=2, progress=False, **arguments)
    except OSError as error:
        outcome: dict[str, Any] = {"errno": error.errno, "message": str(error)}
    else:
        outcome = {"num_rows": store.num_rows}
    left = [name for name in sorted(os.listdir(directory)) if not name.endswith(".lock")]
    return {**outcome, "free": free, "before": before, "left": left}


def main(mount_point: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount_point)], check=True)
    outcomes = {}
    outcomes["larger than the disk"] = attempt(
        mount_point, [torch.zeros(MIB // 4, dtype=torch.uint8)] * 5
    )
    # As many bytes as are free. What the file system and tensordict need besides fits no more,
    # so it is the kernel that refuses.
    free = shutil.disk_usage(mount_point).free
    outcomes["exactly what is free"] = attempt(
        mount_point, [torch.zeros(free // 4, dtype=torch.uint8)] * 4
    )
    outcomes["small"] = attempt(mount_point, [torch.full((1000,), row) for row in range(5)])
    outcomes["overwrite"] = attempt(
        mount_point, [torch.zeros(MIB // 4, dtype=torch.uint8)] * 5, overwrite=True
    )
    store = open_store(mount_point / "train")
    outcomes["overwrite"]["old rows"] = [int(store[row][0]) for row in range(len(store))]
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
