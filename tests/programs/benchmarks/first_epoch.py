"""Training while the store is built, beside a DataLoader with as many workers.

``python -m tests.programs.benchmarks.first_epoch [--rows 20000] [--workers 2] [--repeats 3]
[--train]`` makes small JPEG files and reads them: seconds to the first batch, rows per second of
the first epoch, and of a later one beside those of a finished store. Without ``--train``, a batch
is only added up, and with it, a small network trains on it. Beside other work, later epochs are
compared by the CPU time of the training thread. A training is measured with
``MALLOC_TRIM_THRESHOLD_`` and ``MALLOC_MMAP_THRESHOLD_`` set to 4000000000: otherwise, in some
epochs and not in others, the C library returns memory to the system in each step, which takes as
long as the step.
"""

import argparse
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from time import perf_counter, sleep, thread_time
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from lightning_memmap import MemmapDataModule
from lightning_memmap.store.directory import REQUESTS

BATCH = 64
#: What is done with each batch.
Use: TypeAlias = Callable[[dict[str, Any]], None]


class Photographs(Dataset[dict[str, Any]]):
    """Small JPEG files, decoded."""

    def __init__(self, directory: Path, num_rows: int) -> None:
        self.directory, self.num_rows = directory, num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        with Image.open(self.directory / f"{row}.jpg") as image:
            pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return {"image": pixels, "label": row % 10}


def add_up(batch: dict[str, Any]) -> None:
    """Read all of a batch."""
    batch["image"].float().mean()


def training() -> Callable[[dict[str, Any]], None]:
    """Makes a small network, and trains it on each batch."""
    layers = (nn.Conv2d(3, 32, 3, 2), nn.ReLU(), nn.Conv2d(32, 32, 3, 2), nn.ReLU())
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(batch: dict[str, Any]) -> None:
        optimizer.zero_grad()
        cross_entropy(model(batch["image"].float() / 255), batch["label"]).backward()
        optimizer.step()

    return step


def make_files(directory: Path, num_rows: int) -> None:
    """Noise that is smooth, as photographs are."""
    generator = np.random.default_rng(0)
    for row in range(num_rows):
        small = generator.integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(small).resize((64, 64)).save(directory / f"{row}.jpg", quality=85)


def later_epoch(batches: Iterable[Any], use: Use, name: str) -> dict[str, float]:
    """Rows per second, and per second of CPU time of this thread."""
    cpu = thread_time()
    _, seconds, rows = epoch(batches, use, perf_counter())
    cpu = thread_time() - cpu
    return {f"{name} (rows/s)": rows / seconds, f"{name} (rows/CPU s)": rows / cpu}


def epoch(batches: Iterable[Any], use: Use, begin: float) -> tuple[float, float, int]:
    """Seconds to the first batch, seconds of all, and rows."""
    first, num_rows = 0.0, 0
    for batch in batches:
        first = first or perf_counter() - begin
        num_rows += len(batch["label"])
        use(batch)
    return first, perf_counter() - begin, num_rows


def measure(dataset: Photographs, workers: int, use: Use, stores: Path) -> dict[str, float]:
    """One round of all."""
    found = dict[str, float]()
    begin = perf_counter()
    loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=workers)
    first, seconds, rows = epoch(loader, use, begin)
    found |= {"DataLoader, first batch (s)": first, "DataLoader (rows/s)": rows / seconds}
    begin = perf_counter()
    data = MemmapDataModule(
        dataset, store_dir=stores, batch_size=BATCH, num_workers=workers, build="while_training"
    )
    data.prepare_data()
    data.setup("fit")
    batches = data.train_dataloader()
    first, seconds, rows = epoch(batches, use, begin)
    found |= {"first epoch, first batch (s)": first, "first epoch (rows/s)": rows / seconds}
    found |= later_epoch(batches, use, "second epoch")
    # Until the store is durable.
    while any(stores.rglob(REQUESTS)):
        sleep(0.01)
    found |= later_epoch(batches, use, "next epoch, durable")
    data.teardown()
    finished = MemmapDataModule(dataset, store_dir=stores, batch_size=BATCH, num_workers=workers)
    finished.prepare_data()
    finished.setup("fit")
    batches = finished.train_dataloader()
    epoch(batches, use, perf_counter())
    found |= later_epoch(batches, use, "finished store")
    finished.teardown()
    return found


def main() -> None:
    """Print the median of some rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("rows", 20_000), ("workers", 2), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--train", action="store_true")
    options = parser.parse_args()
    use = training() if options.train else add_up
    with tempfile.TemporaryDirectory() as directory:
        files = Path(directory) / "files"
        files.mkdir()
        make_files(files, options.rows)
        rounds = list[dict[str, float]]()
        for _ in range(options.repeats):
            stores = Path(directory) / "stores"
            rounds.append(measure(Photographs(files, options.rows), options.workers, use, stores))
            shutil.rmtree(stores)
    for name in rounds[0]:
        values = [each[name] for each in rounds]
        print(f"{name:32} {median(values):12.3f}   {min(values):.3f} to {max(values):.3f}")


if __name__ == "__main__":
    main()
