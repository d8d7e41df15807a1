"""What `gpu.py` measures: each function gives the rows of one table.

A row has a label and, by column, a value for each round.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from loaders import make_loader
from timing import in_turn, pairwise_ratios
from torch import Tensor, nn

from lightning_memmap.loading.device_streams import has_streams
from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.store import Store

ROOT = Path(__file__).resolve().parents[3]
ROW_BYTES = (256, 1024, 4096, 16384, 65536, 150528)
IMAGE = (3, 32, 32)
MIB = 2**20
#: What files are read into: its pages are there.
_BUFFER = bytearray(32 * MIB)


class Row(NamedTuple):
    """A line of a table."""

    label: str
    values: dict[str, list[float]]
    """By column, with its unit, a value for each round."""


class Images(torch.utils.data.Dataset[Any]):
    """Random images, made once."""

    def __init__(self, num_rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randint(
            0, 256, (num_rows, *IMAGE), generator=generator, dtype=torch.uint8
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        return self.images[index], index % 10


def flip(batch: list[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Mirror half of the images and make them floats: something for the data devices to do."""
    images, labels = batch
    chosen = torch.rand(len(images), generator=generator, device=images.device) < 0.5
    images = torch.where(chosen[:, None, None, None], images.flip(-1), images)
    return [images.float().div_(255), labels]


class Bench:
    """The devices, and what is timed on them.

    Args:
        device: The root device.
        data_devices: Where the rows are.
        mib: Bytes of rows, in MiB.
        rounds: Rounds that count.
    """

    def __init__(
        self, device: torch.device, data_devices: list[torch.device], mib: int, rounds: int
    ) -> None:
        self.device = device
        self.data_devices = data_devices
        self.num_bytes = mib * MIB
        self.rounds = rounds

    def wait(self) -> None:
        """Until the devices have done all that they were given."""
        for device in {self.device, *self.data_devices}:
            torch.get_device_module(device).synchronize(device)

    def seconds(self, runs: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
        """Of each run in each round, until the devices are done."""

        def timed(run: Callable[[], object]) -> Callable[[], None]:
            def until_done() -> None:
                run()
                self.wait()

            return until_done

        return in_turn({name: timed(run) for name, run in runs.items()}, self.rounds)

    # Fetches

    def fetches(self) -> Iterator[Row]:
        """A row for each size of rows."""
        for row_bytes in ROW_BYTES:
            yield self._fetch_row(row_bytes)

    def _fetch_row(self, row_bytes: int) -> Row:
        num_rows = self.num_bytes // row_bytes
        rows = torch.zeros(num_rows, row_bytes, dtype=torch.uint8, device=self.device)
        count = max(1, num_rows // 16)
        out = torch.empty(count, row_bytes, dtype=torch.uint8, device=self.device)
        places = torch.randperm(num_rows)[: 8 * count].to(self.device).split(count)
        parts = rows.split(count)[: len(places)]

        def fetch() -> None:
            for chosen in places:
                torch.index_select(rows, 0, chosen, out=out[: len(chosen)])

        def copy() -> None:
            for part in parts:
                out[: len(part)].copy_(part)

        seconds = self.seconds({"fetch": fetch, "copy": copy})
        moved = 2 * sum(map(len, places)) * row_bytes
        rates = {name: [moved / value / 1e9 for value in times] for name, times in seconds.items()}
        return Row(
            f"{row_bytes:,} bytes",
            {
                "fetch, GB/s": rates["fetch"],
                "copy, GB/s": rates["copy"],
                "fetch / copy": pairwise_ratios(rates["fetch"], rates["copy"]),
            },
        )

    # Loading

    def loads(self, store: Store) -> Iterator[Row]:
        """A row for each way that the bytes of a store can go."""
        num_bytes = store.num_rows * store.manifest.row_bytes
        source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=has_streams(self.device))
        source.zero_()
        target = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        files = sorted(store.files.glob("*.memmap"))
        runs: dict[str, Callable[[], object]] = {
            "pinned memory to the device": lambda: target.copy_(source, non_blocking=True),
            "reading the files, page cache": lambda: _read(files, cold=False),
            "reading the files, disk": lambda: _read(files, cold=True),
            "store to the device, page cache": lambda: self.loader(store, "device"),
            "store to the device, disk": lambda: (_evict(files), self.loader(store, "device")),
        }
        seconds = self.seconds(runs)
        for name, times in seconds.items():
            values = {"GB/s": [num_bytes / value / 1e9 for value in times]}
            if name.startswith("store"):
                cache = name.partition(", ")[2]
                slower = [
                    max(one, other)
                    for one, other in zip(
                        seconds["pinned memory to the device"],
                        seconds[f"reading the files, {cache}"],
                        strict=True,
                    )
                ]
                values["rate / slower part"] = pairwise_ratios(slower, times)
            yield Row(name, values)

    def loader(
        self, store: Store, residency: str, batch_size: int = 1, **options: Any
    ) -> SuperBatchLoader:
        """A shuffled loader, once its rows are where they belong."""
        return make_loader(store, self.data_devices, batch_size, residency, **options)

    # Waiting

    def waits(self, store: Store, batch: int, width: int) -> Iterator[Row]:
        """A row for each residency and number of steps ahead."""
        torch.manual_seed(0)
        net = convolutions(width).to(self.device)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

        def train(batches: Any) -> None:
            for images, labels in batches:
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(images), labels).backward()
                optimizer.step()

        per_device = max(1, batch // len(self.data_devices))
        loaders = {
            residency: self.loader(store, residency, per_device, transform=flip, drop_last=True)
            for residency in ("device", "host")
        }
        steps = loaders["device"].num_steps
        (ready, *_) = loaders["device"].assembled(self.device)
        runs: dict[str, Callable[[], object]] = {"ideal": lambda: train([ready] * steps)}
        for residency, loader in loaders.items():
            for prefetch in (0, 1, 2, 4):
                batches = loader.assembled(self.device, prefetch)
                runs[f"{residency}, {prefetch} ahead"] = lambda batches=batches: train(batches)
        seconds = self.seconds(runs)
        for name, times in seconds.items():
            shares = [1 - ratio for ratio in pairwise_ratios(seconds["ideal"], times)]
            step_us = [1e6 * value / steps for value in times]
            yield Row(name, {"us a step": step_us, "share of waiting": shares})


def convolutions(width: int) -> nn.Module:
    """Two convolutions for images of 32x32."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 10),
    )


def _evict(files: list[Path]) -> None:
    """Let the page cache forget files, as far as they are on the disk."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _read(files: list[Path], *, cold: bool) -> None:
    if cold:
        _evict(files)
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(_BUFFER):
                pass
