"""Measures how fast stores are built on this machine, by storing some rows for a trial."""

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset

from lightning_memmap.errors import DatasetError, SchemaError, check_integer
from lightning_memmap.sampling.rows import default_shards
from lightning_memmap.sizes import format_bytes, format_duration
from lightning_memmap.store import Store, build_store
from lightning_memmap.store.build_spec import check_length
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.sources.iterable import is_iterable_only
from lightning_memmap.store.sources.source import is_read_by_item

#: A trial grows until it takes this long, plus a second for each worker.
_MIN_TRIAL_S = 2.0
_FIRST_ROWS = 32
#: Number of runs of consecutive rows that a trial reads from a dataset of items.
_NUM_RUNS = 8
#: The most bytes that a trial writes.
_MAX_BYTES = 512 * 2**20
#: How the errors about one row of a dataset begin.
_AT_ROW = re.compile(r"(row |the dataset raised at row )(\d+)\b")


@dataclass(frozen=True)
class Trial:
    """A trial build: the size of all rows, and how fast some of them were stored."""

    name: str
    """Name of the dataset."""
    num_rows: int
    """Rows of the whole dataset."""
    row_bytes: int
    """Stored bytes of one row, on average and rounded up."""
    text_bytes: int
    """Bytes of texts and encoded images among ``row_bytes``."""
    trial_rows: int
    seconds: float
    how: str
    """Description of how the rows were read."""

    @property
    def build_s(self) -> float:
        """Seconds that storing all rows takes at this rate."""
        return self.num_rows * self.seconds / self.trial_rows

    def __str__(self) -> str:
        rate = self.trial_rows / self.seconds
        took = format_duration(self.seconds)
        size = format_bytes(self.trial_rows * self.row_bytes)
        return (
            f"{self.trial_rows:,} rows ({size}) were stored here in {took}, {self.how}:"
            f" {rate:,.0f} rows/s, {format_bytes(rate * self.row_bytes)}/s"
        )


class _First(IterableDataset[Any]):
    """The first rows of an iterable dataset."""

    def __init__(self, dataset: Any, count: int) -> None:
        self.dataset = dataset
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.dataset), self.count)


def try_build(
    dataset: Any,
    folder: Path,
    num_rows: int | None = None,
    num_workers: int = 0,
    variable: Sequence[str] | Mapping[str, int] | None = None,
    nullable: Sequence[str] | None = None,
    *,
    clock: Callable[[], float] = perf_counter,
) -> Trial:
    """Store some rows of a dataset in a temporary directory, and remove them.

    Args:
        dataset: As for `build_store`.
        folder: An existing folder, on the disk that the store is for.
        num_rows: Rows of the dataset; required if it has no length.
        num_workers: As for `build_store`.
        variable: See `build_store`.
        nullable: See `build_store`.
        clock: Returns the time in seconds.

    Raises:
        ValueError: The dataset has no length and ``num_rows`` is None, or its length differs.
        SchemaError: A sample cannot be stored, or does not fit the first one; the message names the
            row of the whole dataset.
        DatasetError: The dataset raised an error, or is random.
    """
    total = _num_rows(dataset, num_rows)
    # With its module, because several modules may have a class of this name.
    name = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    min_trial_s = _MIN_TRIAL_S + num_workers
    count = min(total, _FIRST_ROWS)
    with tempfile.TemporaryDirectory(prefix=".plan-", dir=folder) as directory:
        while True:
            rows: Any = (
                _First(dataset, count)
                if is_iterable_only(dataset)
                else _choose_rows(dataset, count)
            )
            start = clock()
            with _dataset_rows_in_errors(rows):
                store = build_store(
                    rows,
                    Path(directory, str(count)),
                    num_shards=default_shards(total),
                    num_workers=num_workers,
                    variable=variable,
                    nullable=nullable,
                    progress=False,
                )
            seconds = clock() - start
            if store.num_rows < count:  # A stream that has ended.
                total = count = store.num_rows
            most = max(1, _MAX_BYTES // max(1, store.manifest.row_bytes))
            if seconds >= min_trial_s or count >= min(total, most):
                break
            count = min(total, most, count * max(2, min(16, round(min_trial_s / seconds))))
    workers = f"{num_workers} worker processes" if num_workers else "this process alone"
    return _trial(name, total, store, seconds, f"read by {workers}")


def _trial(name: str, num_rows: int, store: Store, seconds: float, how: str) -> Trial:
    text_bytes = count_text_bytes(store.manifest) // store.num_rows
    row_bytes = store.manifest.row_bytes
    return Trial(name, num_rows, row_bytes, text_bytes, store.num_rows, seconds, how)


def count_text_bytes(manifest: Manifest) -> int:
    """Count the bytes of texts and encoded images, which are never on a device."""
    return sum(column.num_bytes for column in manifest.columns if column.field.is_text)


def _num_rows(dataset: Any, num_rows: int | None) -> int:
    if not hasattr(type(dataset), "__len__") and is_iterable_only(dataset):
        if num_rows is None:
            raise ValueError(
                f"--rows is missing: {type(dataset).__name__} has no length, so pass the number of"
                " its rows"
            )
        return num_rows
    length = check_length(dataset)
    if num_rows not in (None, length):
        raise ValueError(f"rows={num_rows}: the dataset has {length:,} rows; leave --rows out")
    return length


def _choose_rows(dataset: Any, count: int) -> Subset[Any]:
    """Choose one run of consecutive rows of a table, or several runs of a dataset of items."""
    total = len(dataset)
    num_runs = _NUM_RUNS if is_read_by_item(dataset) else 1
    runs = np.array_split(np.arange(count), min(num_runs, count))
    gap = (total - count) // len(runs)
    rows = [run + gap * index for index, run in enumerate(runs)]
    return Subset(dataset, np.concatenate(rows).tolist())


@contextmanager
def _dataset_rows_in_errors(chosen: Any) -> Iterator[None]:
    """Replace indices of chosen rows in errors by their rows in the whole dataset."""
    try:
        yield
    except (DatasetError, SchemaError) as error:
        match = _AT_ROW.match(text := str(error))
        if match is None or not isinstance(chosen, Subset):
            raise
        row = chosen.indices[int(match[2])]
        raise type(error)(f"{match[1]}{row}{text[match.end() :]}") from error.__cause__


def try_writing(row_bytes: int, num_rows: int | None, folder: Path) -> Trial:
    """Store rows from memory, which takes as long as a build at least.

    Args:
        row_bytes: Bytes of a row.
        num_rows: Rows of the planned dataset.
        folder: An existing folder, on the disk that the store is for.
    """
    if num_rows is None:
        raise ValueError(f"row_bytes={row_bytes}: --rows is missing, the number of rows")
    row_bytes = check_integer("row_bytes", row_bytes, 1)
    num_rows = check_integer("rows", num_rows, 1)
    count = min(num_rows, max(1, _MAX_BYTES // 2 // row_bytes))
    data = np.random.default_rng(0).integers(0, 256, (count, row_bytes), np.uint8)
    rows = TensorDataset(torch.from_numpy(data))
    with tempfile.TemporaryDirectory(prefix=".plan-", dir=folder) as directory:
        start = perf_counter()
        shards = default_shards(num_rows)
        store = build_store(rows, Path(directory, "s"), num_shards=shards, progress=False)
        seconds = perf_counter() - start
    return _trial(f"{row_bytes:,} bytes", num_rows, store, seconds, "from memory")
