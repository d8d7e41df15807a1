"""Changes a store of texts in one way, and prints how it ended.

    python -m tests.unit.store.change_texts WAY DIRECTORY

It is run where a system call fails, in a process of its own.
"""

import secrets
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

if __name__ == "__main__":
    # Stores do without Lightning, which takes long to import.
    package = sys.modules["lightning_memmap"] = ModuleType("lightning_memmap")
    package.__path__ = [str(Path(__file__).parents[3] / "lightning_memmap")]

from torch.utils.data import Dataset

from lightning_memmap.errors import MemmapError
from lightning_memmap.store import (
    append_store,
    build_part,
    build_store,
    finish_store,
)

NUM_ROWS = 3000
GENERATION = "g-" + "f" * 16
OPTIONS: dict[str, Any] = {"num_shards": 3, "progress": False}


class Texts(Dataset[dict[str, str]]):
    """Row ``i`` is a text that tells row and edition."""

    def __init__(self, edition: int) -> None:
        self.edition = edition

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, row: int) -> dict[str, str]:
        return {"t": f"{self.edition} " + f"{row} " * (row % 7)}


class Arriving:
    """The same rows as a stream."""

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter([Texts(2)[row] for row in range(NUM_ROWS)])


def change(way: str, path: Path) -> None:
    """Change the store at a path: what was there has edition 1, what is new edition 2."""
    if way in ("new", "overwrite"):
        build_store(Texts(2), path, overwrite=way == "overwrite", **OPTIONS)
    elif way == "stream":
        build_store(Arriving(), path, **OPTIONS)
    elif way == "append":
        append_store(Texts(2), path, progress=False)
    elif way == "part":
        build_part(Texts(2), path, (0, 1), overwrite=True, **OPTIONS)
    elif way == "finish":
        finish_store(path, overwrite=True, progress=False)


if __name__ == "__main__":
    # So that it is known in which generation the files are.
    secrets.token_hex = lambda num_bytes: GENERATION[2:]  # type: ignore[assignment,misc]
    try:
        change(sys.argv[1], Path(sys.argv[2]))
    except (MemmapError, OSError) as error:
        print(f"{type(error).__name__}: {error}")
        sys.exit(3)
