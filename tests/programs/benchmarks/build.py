"""Building a store: by slices against writing the same bytes, item by item against a DataLoader.

    python tests/programs/benchmarks/build.py
    python tests/programs/benchmarks/build.py --case images --workers 0,2
    python tests/programs/benchmarks/build.py --case mixed jpegs slow --workers 2,4

The runs of a round take turns. A build is complete: probe rows, checksums, and everything brought
to the disk. It is compared with one file per field, written from memory in long pieces and brought
to the disk as well. An epoch of a DataLoader reads the rows item by item in batches of up to 256,
without storing them. Cases whose rows lie in no arrays need --workers.
"""

import argparse
import io
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import torch
from PIL import Image
from timing import CLOCKS, in_turn, machine, pairwise_ratios, spread
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_memmap import ColumnDataset, build_store

_WRITE_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Case:
    """A dataset whose rows lie in arrays, and the arrays: none where it is read item by item alone.
    Then a DataLoader may need a collate function."""

    dataset: Dataset[Any]
    arrays: list[np.ndarray]
    collate: Callable[[list[Any]], Any] | None = None

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


class Mixed(Dataset[dict[str, Any]]):
    """A text, and numbers of another length in each row."""

    def __init__(self, num_rows: int) -> None:
        generator = np.random.default_rng(0)
        self.lengths = generator.integers(10, 200, num_rows)
        self.numbers = torch.from_numpy(generator.random(200, np.float32))
        self.text = "".join(map(chr, generator.integers(97, 123, 200)))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> dict[str, Any]:
        length = int(self.lengths[row])
        numbers = self.numbers[:length]
        return {"text": self.text[:length], "x": numbers, "y": numbers.numpy(), "label": row % 7}


def padded(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """What a DataLoader makes of rows of `Mixed`."""
    rows = [[torch.as_tensor(sample[name]) for sample in samples] for name in "xy"]
    return {
        "text": [sample["text"] for sample in samples],
        "x": pad_sequence(rows[0], batch_first=True),
        "y": pad_sequence(rows[1], batch_first=True),
        "label": torch.tensor([sample["label"] for sample in samples]),
    }


class Jpegs(Dataset[Any]):
    """Images of 224 x 224 that are decoded when they are read, and labels."""

    def __init__(self, num_rows: int) -> None:
        generator, self.files = np.random.default_rng(0), list[bytes]()
        for _ in range(16):
            coarse = generator.integers(0, 256, (14, 14, 3), np.uint8)
            file = io.BytesIO()
            Image.fromarray(coarse).resize((224, 224)).save(file, "JPEG", quality=90)
            self.files.append(file.getvalue())
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> Any:
        return np.asarray(Image.open(io.BytesIO(self.files[row % 16]))), row % 10


class Slow(Dataset[Tensor]):
    """Rows that take 50 ms each."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> Tensor:
        sleep(0.05)
        return torch.full((64,), row)


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
    "mixed": (lambda num_rows: Case(Mixed(num_rows), [], padded), 50_000),
    "jpegs": (lambda num_rows: Case(Jpegs(num_rows), []), 4_000),
    "slow": (lambda num_rows: Case(Slow(num_rows), []), 400),
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


def epoch(case: Case, num_workers: int) -> None:
    """Read all rows item by item."""
    # So that each worker has several batches.
    batch_size = min(256, -(-len(case.dataset) // (8 * max(1, num_workers))))  # type: ignore[arg-type]
    items = Items(case.dataset)
    for _ in DataLoader(items, batch_size, num_workers=num_workers, collate_fn=case.collate):
        pass


def report(name: str, case: Case, workers: list[int], rounds: int, clock: str, path: Path) -> None:
    """Measure one case and print its ratios."""
    items = Items(case.dataset)
    runs: dict[str, Callable[[], object]] = {}
    if case.arrays:
        runs["write"] = lambda: write(case, removed(path / "write"))
        runs["slices"] = lambda: build_store(case.dataset, removed(path / "slices"), progress=False)
    for count in workers:
        runs[f"epoch {count}"] = lambda count=count: epoch(case, count)  # type: ignore[misc]
        runs[f"items {count}"] = lambda count=count: build_store(  # type: ignore[misc]
            items, removed(path / "items"), num_workers=count, progress=False
        )
    if not runs:
        print(f"{name}: is built item by item alone; give --workers")
        return
    seconds = in_turn(runs, rounds, clock)
    size = f", {case.num_bytes / 1e6:.0f} MB" if case.arrays else ""
    print(f"{name}: {len(case.dataset):,} rows{size}")  # type: ignore[arg-type]
    for run, values in seconds.items():
        print(f"  {run:>10}: {spread(values)} s")
    if case.arrays:
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
