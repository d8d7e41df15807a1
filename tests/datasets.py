"""Datasets that the tests store: small, deterministic, and known row by row."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_memmap.sampling import shard_starts
from lightning_memmap.store import Store


class Numbered(Dataset[dict[str, Any]]):
    """Row ``i`` is ``{"x": int64 (4,), "label": int}``; every value tells row and version."""

    def __init__(self, num_rows: int, version: int = 0) -> None:
        self.num_rows = num_rows
        self.version = version

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < self.num_rows:
            raise IndexError(row)
        first = self.version * 1_000_000_007 + row * 4
        return {
            "x": torch.arange(first, first + 4),
            "label": self.version * 1000 + row % 10,
        }

    def expected(self) -> dict[str, Tensor]:
        """All rows in dataset order, by field."""
        first = self.version * 1_000_000_007
        return {
            "x": torch.arange(first, first + 4 * self.num_rows).view(self.num_rows, 4),
            "label": self.version * 1000 + torch.arange(self.num_rows) % 10,
        }


class Wrapped(Dataset[Any]):
    """Passes everything on to another dataset."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> Any:
        return self.dataset[row]


class Counting(Wrapped):
    """Notes which rows were read, in order."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self.rows: list[int] = []

    def __getitem__(self, row: int) -> Any:
        self.rows.append(row)
        return super().__getitem__(row)


class Logged(Wrapped):
    """Notes which rows were read in a file that several processes may share."""

    def __init__(self, dataset: Any, log: Path | str) -> None:
        super().__init__(dataset)
        self.log = str(log)

    def __getitem__(self, row: int) -> Any:
        descriptor = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(descriptor, f"{row}\n".encode())
        finally:
            os.close(descriptor)
        return super().__getitem__(row)


class Slow(Wrapped):
    """Sleeps before every 16th row."""

    def __init__(self, dataset: Any, delay_s: float) -> None:
        super().__init__(dataset)
        self.delay_s = delay_s

    def __getitem__(self, row: int) -> Any:
        if row % 16 == 0:
            time.sleep(self.delay_s)
        return super().__getitem__(row)


class Replaced(Wrapped):
    """Other samples at some rows; an exception given as a sample is raised."""

    def __init__(self, dataset: Any, samples: Mapping[int, Any]) -> None:
        super().__init__(dataset)
        self.samples = samples

    def __getitem__(self, row: int) -> Any:
        if row not in self.samples:
            return super().__getitem__(row)
        if isinstance(self.samples[row], Exception):
            raise self.samples[row]
        return self.samples[row]


def column_files(store: Store) -> dict[str, bytes]:
    """What the files of fields of fixed shape contain, by their names."""
    return {path.name: path.read_bytes() for path in store.files.glob("*.memmap")}


def in_dataset_order(store: Store) -> dict[str, Tensor]:
    """All rows of a store by field, put in dataset order by the rule of the layout: row ``i``
    lies at ``start[i % C] + i // C``."""
    rows = torch.arange(store.num_rows)
    starts = torch.from_numpy(shard_starts(store.num_rows, store.num_shards))
    places = starts[rows % store.num_shards] + rows // store.num_shards
    names = [field.name for field in store.schema.fields]
    return {name: mapped[places] for name, mapped in zip(names, store.tensors, strict=True)}


def holds(store: Store, dataset: Numbered) -> bool:
    """Whether a store holds exactly the rows of a `Numbered` dataset."""
    found, expected = in_dataset_order(store), dataset.expected()
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )
