"""Building a store: by slices against writing the same bytes, item by item against a DataLoader.

    python tests/benchmarks/build.py
    python tests/benchmarks/build.py --case images --workers 0,2

The runs of a round take turns. A build is complete: probe rows, checksums, and everything brought
to the disk. It is compared with one file per field, written from memory in long pieces and brought
to the disk as well. An epoch of a DataLoader reads the rows item by item in batches of 256, without
storing them.
"""

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timing import CLOCKS, in_turn, machine, pairwise_ratios, spread
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_memmap import ColumnDataset, build_store

_WRITE_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Case:
    """A dataset whose rows lie in arrays, and the arrays."""

    dataset: Dataset[Any]
    arrays: list[np.ndarray]

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(array.nbytes for array in self.arrays)


class Items(Dataset[Any]):
    """The rows of another dataset, in a class of its own: they are read item by item."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> Any:
        return self.dataset[row]


def table(num_rows: int) -> Case:
    """Five columns of numbers."""
    generator = np.random.default_rng(0)
    columns = {
        "age": generator.integers(0, 99, num_rows).astype(np.int8),
        "price": generator.random(num_rows, np.float32),
        "balance": generator.random(num_rows),
        "count": generator.integers(0, 2**40, num_rows),
        "good": generator.random(num_rows) < 0.5,
    }
    return Case(ColumnDataset(columns), list(columns.values()))


def texts(num_rows: int) -> Case:
    """Eighteen columns of numbers, and one of texts."""
    generator = np.random.default_rng(0)
    columns: dict[str, Any] = {f"c{k}": generator.random(num_rows) for k in range(18)}
    lengths = generator.integers(0, 300, num_rows)
    letters = generator.integers(97, 123, int(lengths.sum()), np.uint8)
    all_texts, ends = letters.tobytes().decode(), np.cumsum(lengths)
    columns["text"] = [all_texts[end - n : end] for end, n in zip(ends, lengths, strict=True)]
    arrays = [column for column in columns.values() if isinstance(column, np.ndarray)]
    return Case(ColumnDataset(columns), [*arrays, letters, ends])


def tensors(*arrays: Tensor) -> Case:
    """A TensorDataset."""
    return Case(TensorDataset(*arrays), [array.numpy() for array in arrays])


def images(num_rows: int) -> Case:
    """Small images and labels."""
    pixels = torch.randint(0, 256, (num_rows, 3, 32, 32), dtype=torch.uint8)
    return tensors(pixels, torch.arange(num_rows) % 10)


def tokens(num_rows: int) -> Case:
    """Sequences of 1,024 tokens."""
    return tensors(torch.randint(0, 50_000, (num_rows, 1024), dtype=torch.int32))


CASES: dict[str, tuple[Callable[[int], Case], int]] = {
    "table": (table, 3_000_000),
    "texts": (texts, 200_000),
    "images": (images, 50_000),
    "tokens": (tokens, 50_000),
}


def write(case: Case, directory: Path) -> None:
    """Write the bytes of all rows, one file per array, and bring them to the disk."""
    directory.mkdir()
    for number, array in enumerate(case.arrays):
        with open(directory / str(number), "xb", buffering=0) as file:
            data = memoryview(array.reshape(-1).view(np.uint8))
            for first in range(0, len(data), _WRITE_BYTES):
                file.write(data[first : first + _WRITE_BYTES])
            os.fsync(file.fileno())


def removed(directory: Path) -> Path:
    """A directory that is not there."""
    shutil.rmtree(directory, ignore_errors=True)
    return directory


def epoch(dataset: Dataset[Any], num_workers: int) -> None:
    """Read all rows item by item."""
    for _ in DataLoader(dataset, batch_size=256, num_workers=num_workers):
        pass


def report(name: str, case: Case, workers: list[int], rounds: int, clock: str, path: Path) -> None:
    """Measure one case and print its ratios."""
    items = Items(case.dataset)
    runs: dict[str, Callable[[], object]] = {
        "write": lambda: write(case, removed(path / "write")),
        "slices": lambda: build_store(case.dataset, removed(path / "slices"), progress=False),
    }
    for count in workers:
        runs[f"epoch {count}"] = lambda count=count: epoch(items, count)  # type: ignore[misc]
        runs[f"items {count}"] = lambda count=count: build_store(  # type: ignore[misc]
            items, removed(path / "items"), num_workers=count, progress=False
        )
    seconds = in_turn(runs, rounds, clock)
    print(f"{name}: {len(case.dataset):,} rows, {case.num_bytes / 1e6:.0f} MB")  # type: ignore[arg-type]
    for run, values in seconds.items():
        print(f"  {run:>10}: {spread(values)} s")
    speed = pairwise_ratios(seconds["write"], seconds["slices"])
    print(f"  by slices: {spread(speed)} of the speed of writing the same bytes")
    for count in workers:
        speed = pairwise_ratios(seconds[f"epoch {count}"], seconds[f"items {count}"])
        print(f"  item by item, {count} workers: {spread(speed)} of the speed of a DataLoader")


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", choices=CASES, nargs="*", default=list(CASES))
    parser.add_argument("--rows", type=int, help="rows of each case, instead of its own number")
    parser.add_argument("--workers", default="", help="counts of workers, such as 0,2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    workers = [int(count) for count in args.workers.split(",") if count]
    print(f"{machine()}; {args.clock} time")
    for name in args.case:
        make, num_rows = CASES[name]
        with tempfile.TemporaryDirectory() as directory:
            case = make(args.rows or num_rows)
            report(name, case, workers, args.rounds, args.clock, Path(directory))


if __name__ == "__main__":
    main()
