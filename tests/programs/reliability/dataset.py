"""A dataset whose editions differ where no probe looks, and what its rows must be."""

import functools
import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from lightning_memmap.store import Store
from lightning_memmap.store.samples import choose_probe_rows
from tests.support.datasets import Numbered


def _png(row: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (3 + row % 3, 2), row % 256).save(file, "PNG")
    return file.getvalue()


def _records(row: int) -> list[dict[str, Any]]:
    return [{"box": torch.arange(4) + row, "name": f"é{item}"} for item in range(row % 4)]


#: Fields whose rows differ in length, have None, or are bytes.
VARIABLE: dict[str, Callable[[int], Any]] = {
    "records": _records,
    "masked": lambda row: None if row % 3 == 1 else row / 7,
    "masked text": lambda row: None if row % 3 == 1 else "ü" * (row % 5),
    "lengths": lambda row: torch.full((row % 5, 2, 1 + row % 3), row).half(),
    "text": lambda row: f"row {row}" * (row % 3),
    "image": _png,
}


#: Those of `Edited`.
EDITED = ["records", "masked text"]


@dataclass
class Files:
    """What stands for the files that a dataset reads: shared by all of a process, and by none of
    the arguments that a dataset is made with."""

    edition: int = 0
    pause_s: float = 0.0
    slow_from: int | None = None
    slow_pause_s: float = 0.0


files = Files()


class Edited(Dataset[dict[str, Any]]):
    """Rows like those of `Numbered`, with records and masked text: each kind of file that a store
    has, and no more, since a build is killed at each of its calls. All but the probe rows tell the
    edition: that of the arguments, plus that of `files`."""

    def __init__(self, num_rows: int, edition: int = 0) -> None:
        self.num_rows = num_rows
        self.edition = edition

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        pause_s = files.pause_s
        if files.slow_from is not None and row >= files.slow_from:
            pause_s = files.slow_pause_s
        if pause_s and row not in probes_of(self.num_rows):
            time.sleep(pause_s)
        return sample_of(self.num_rows, row, self.edition + files.edition)


class Reusing(Edited):
    """The same rows, in one dict, whose tensors are overwritten by the next row."""

    def __init__(self, num_rows: int, edition: int = 0) -> None:
        super().__init__(num_rows, edition)
        self._sample: dict[str, Any] = {}

    def __getitem__(self, row: int) -> dict[str, Any]:
        for name, value in super().__getitem__(row).items():
            kept = self._sample.get(name)
            if isinstance(value, Tensor) and isinstance(kept, Tensor) and kept.shape == value.shape:
                kept.copy_(value)
            elif isinstance(value, list) and isinstance(kept, list):
                kept[:] = value
            else:
                self._sample[name] = value
        return self._sample


@functools.cache
def probes_of(num_rows: int) -> set[int]:
    return {*choose_probe_rows(num_rows)}


def sample_of(num_rows: int, row: int, edition: int) -> dict[str, Any]:
    """A row of an edition."""
    if row in probes_of(num_rows):
        edition = 0
    # By a step after which all remainders that the fields are made of are others.
    fields = {name: VARIABLE[name](row + 1009 * edition) for name in EDITED}
    return {**Numbered(num_rows, edition)[row], **fields}


@functools.cache
def expected_rows(num_rows: int, edition: int) -> list[Any]:
    """All rows of an edition in dataset order, as `plain` gives them."""
    return [plain(sample_of(num_rows, row, edition)) for row in range(num_rows)]


def rows_of(store: Store) -> list[Any]:
    """All rows of a store in dataset order, as `plain` gives them."""
    return [plain(store[row]) for row in range(store.num_rows)]


def plain(value: Any) -> Any:
    """A sample that can be compared: numbers for tensors, beside the shapes that these have."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.tolist()) if value.ndim else value.item()
    if isinstance(value, dict):
        return {key: plain(child) for key, child in value.items()}
    return [plain(child) for child in value] if isinstance(value, list) else value
