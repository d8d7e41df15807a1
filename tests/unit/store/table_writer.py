"""Writes tables in processes that kill themselves, and prints, as JSON, what each left behind.

For each change to the file system that the writing of a table makes, one process is forked that
dies just before it: once where nothing is there, and once where an old table is. Argument: an empty
directory.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from lightning_memmap.errors import StoreNotFoundError
from lightning_memmap.schema import Schema
from lightning_memmap.store import open_store, verify_store
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.table import TableBuild, TableWriter
from tests.datasets import in_dataset_order
from tests.unit.store.build_server import kill_before_change

NUM_ROWS = 50
OLD, NEW = 1, 2


def values(version: int) -> torch.Tensor:
    return torch.arange(NUM_ROWS) + 1000 * version


def write_table(path: Path, version: int) -> None:
    rows = values(version)
    draft = Manifest.draft(NUM_ROWS, 4, Schema.from_batch({"value": rows}))
    build = TableBuild(path, draft, overwrite=True)
    writer = TableWriter(path, draft, build.token)
    writer.write(range(30), [rows[:30]])
    writer.write(range(30, NUM_ROWS), [rows[30:]])
    writer.close()
    build.finish(writer.num_written)


def run(path: Path, version: int, event: int) -> bool:
    """Write a table in a process that dies before a change. Returns whether it finished."""
    pid = os.fork()
    if not pid:
        try:
            kill_before_change(event)
            write_table(path, version)
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def version_at(path: Path) -> int:
    """The version of the table at a path; 0 where there is none, -1 where it is not whole."""
    try:
        store = open_store(path)
    except StoreNotFoundError:
        return 0
    found = in_dataset_order(store)["value"]
    whole = [version for version in (OLD, NEW) if torch.equal(found, values(version))]
    return whole[0] if whole and not verify_store(path) else -1


def main(directory: Path) -> None:
    print(json.dumps([kill_at_each_change(directory / str(old), old) for old in (False, True)]))


def kill_at_each_change(directory: Path, old: bool) -> list[list[Any]]:
    """By change: the version that was left, the one that the next run left, and the files there."""
    outcomes = []
    for event in range(1000):
        path = directory / str(event) / "table"
        if old:
            write_table(path, OLD)
        ended = run(path, NEW, event)
        left = version_at(path)
        # Nothing that was left may stop the next run.
        write_table(path, NEW)
        names = sorted(entry.name for entry in path.parent.iterdir())
        outcomes.append([left, version_at(path), names])
        if ended:
            break
    return outcomes


if __name__ == "__main__":
    main(Path(sys.argv[1]))
