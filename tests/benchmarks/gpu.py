"""What the pack is worth on a GPU: takes against copies, loading a store, waiting for data, graphs.

    python tests/benchmarks/gpu.py
    python tests/benchmarks/gpu.py --data-devices cuda:0,cuda:1,cuda:2,cuda:3 --only wait
    python tests/benchmarks/gpu.py --device cpu --mib 16 --rounds 1

Takes: the bandwidth at which random rows are gathered on the device, against a copy of as many
bytes that lie together; both read and write each byte once. Loading: a store brought to the device,
against copies from page-locked memory, and against reading the files and nothing else, from the
disk and from the page cache. Waiting: the share of a training step that goes by waiting for data,
which is what the step takes longer than one that is given the same batch again and again; with
steps made ready ahead and without, for rows on the device and for rows in page-locked memory.
Graph: steps of a Trainer with the step as a CUDA graph and without.

Without a GPU it says so and fails. On ``--device cpu`` it shows that it runs; what it prints then
says nothing about a GPU. The runs of a round take turns.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning as L
import torch
from loaders import make_loader
from timing import in_turn, machine, pairwise_ratios, spread
from torch import Tensor, nn

from lightning_memmap.loading import DeviceLoader, SuperBatchLoader, has_streams
from lightning_memmap.store import Store, build_store
from lightning_memmap.strategies import SuperBatchStrategy

ROW_BYTES = (256, 1024, 4096, 16384, 65536, 150528)
IMAGE = (3, 32, 32)
MIB = 2**20
#: What files are read into: its pages are there.
_BUFFER = bytearray(32 * MIB)


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

    # Takes

    def takes(self) -> Iterator[str]:
        """A line for each size of rows."""
        yield f"{'row, bytes':>12} {'take, GB/s':>28} {'copy, GB/s':>28} {'take / copy':>20}"
        for row_bytes in ROW_BYTES:
            yield self._take_line(row_bytes)

    def _take_line(self, row_bytes: int) -> str:
        num_rows = self.num_bytes // row_bytes
        rows = torch.zeros(num_rows, row_bytes, dtype=torch.uint8, device=self.device)
        count = max(1, num_rows // 16)
        out = torch.empty(count, row_bytes, dtype=torch.uint8, device=self.device)
        places = torch.randperm(num_rows)[: 8 * count].to(self.device).split(count)
        parts = rows.split(count)[: len(places)]

        def take() -> None:
            for chosen in places:
                torch.index_select(rows, 0, chosen, out=out[: len(chosen)])

        def copy() -> None:
            for part in parts:
                out[: len(part)].copy_(part)

        seconds = self.seconds({"take": take, "copy": copy})
        moved = 2 * sum(map(len, places)) * row_bytes
        rates = {name: [moved / value / 1e9 for value in times] for name, times in seconds.items()}
        ratios = pairwise_ratios(rates["take"], rates["copy"])
        return (
            f"{row_bytes:>12,} {spread(rates['take'], '{:.1f}'):>28}"
            f" {spread(rates['copy'], '{:.1f}'):>28} {spread(ratios):>20}"
        )

    # Loading

    def loads(self, store: Store) -> Iterator[str]:
        """A line for each way that the bytes of a store can go."""
        num_bytes = store.num_rows * store.manifest.row_bytes
        source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=has_streams(self.device))
        source.zero_()
        target = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        files = sorted(store.path.glob("*.memmap"))
        runs: dict[str, Callable[[], object]] = {
            "page-locked memory to the device": lambda: target.copy_(source, non_blocking=True),
            "reading the files, page cache": lambda: _read(files, cold=False),
            "reading the files, disk": lambda: _read(files, cold=True),
            "store to the device, page cache": lambda: self.loader(store, "device"),
            "store to the device, disk": lambda: (_evict(files), self.loader(store, "device")),
        }
        seconds = self.seconds(runs)
        for name, times in seconds.items():
            rates = [num_bytes / value / 1e9 for value in times]
            yield f"{name:>36} {spread(rates):>24} GB/s"
        for cache in ("page cache", "disk"):
            slower = [
                max(one, other)
                for one, other in zip(
                    seconds["page-locked memory to the device"],
                    seconds[f"reading the files, {cache}"],
                    strict=True,
                )
            ]
            ratios = pairwise_ratios(slower, seconds[f"store to the device, {cache}"])
            yield f"{f'rate against the slower part, {cache}':>47} {spread(ratios)}"

    def loader(
        self, store: Store, residency: str, batch_size: int = 1, **options: Any
    ) -> SuperBatchLoader:
        """A shuffled loader, once its rows are where they belong."""
        return make_loader(store, self.data_devices, batch_size, residency, **options)

    # Waiting

    def waits(self, store: Store, batch: int, width: int) -> Iterator[str]:
        """A line for each residency and number of steps ahead."""
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, stride=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, 10),
        ).to(self.device)
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
        (ready, *_) = DeviceLoader(loaders["device"], self.device)
        runs: dict[str, Callable[[], object]] = {"ideal": lambda: train([ready] * steps)}
        for residency, loader in loaders.items():
            for prefetch in (0, 1, 2, 4):
                batches = DeviceLoader(loader, self.device, prefetch)
                runs[f"{residency}, {prefetch} ahead"] = lambda batches=batches: train(batches)
        seconds = self.seconds(runs)
        yield f"{'':>20} {'us/step':>30} {'share of the step spent waiting':>36}"
        for name, times in seconds.items():
            shares = [1 - ratio for ratio in pairwise_ratios(seconds["ideal"], times)]
            step_us = [1e6 * value / steps for value in times]
            yield f"{name:>20} {spread(step_us, '{:,.1f}'):>30} {spread(shares, '{:.3f}'):>36}"

    # Graphs

    def graphs(self, store: Store, batch: int) -> Iterator[str]:
        """A line for a fit with a CUDA graph and one without, of many small kernels."""
        if self.device.type != "cuda":
            yield "left out: graphs are of CUDA devices"
            return
        names = {"kernel by kernel": False, "one graph": True}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(self.rounds):
            for name, cuda_graph in names.items():
                module = Deep(self.wait)
                trainer = L.Trainer(
                    accelerator="gpu",
                    devices=[self.device.index or 0],
                    strategy=SuperBatchStrategy(cuda_graph=cuda_graph),
                    max_epochs=3,
                    logger=False,
                    enable_checkpointing=False,
                    enable_progress_bar=False,
                    enable_model_summary=False,
                )
                loader = self.loader(store, "device", batch, drop_last=True)
                trainer.fit(module, loader)
                # The first epoch warms up and captures.
                seconds[name] += [epoch_s / loader.num_steps for epoch_s in module.epochs_s[1:]]
        for name, values in seconds.items():
            yield f"{name:>20} {spread([1e6 * value for value in values], '{:,.1f}')} us/step"


class Deep(L.LightningModule):
    """Layers so small that starting them takes longer than they do.

    Args:
        wait: Waits for the device.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(3072, 64)]
        for _ in range(30):
            layers += [nn.Linear(64, 64), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Linear(64, 10))
        self.wait = wait
        self.epochs_s: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images.float() / 255), labels)

    def on_train_epoch_start(self) -> None:
        self.wait()
        self.start = perf_counter()

    def on_train_epoch_end(self) -> None:
        self.wait()
        self.epochs_s.append(perf_counter() - self.start)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-4, capturable=True)


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


def lines(args: argparse.Namespace, bench: Bench, directory: Path) -> Iterator[str]:
    """The report, line by line."""
    names = ", ".join(str(device) for device in bench.data_devices)
    yield f"{machine()}; {_name(bench.device)}; rows on {names}; {args.rounds} rounds"
    if bench.device.type == "cpu":
        yield "On a CPU: this shows that the program runs, and nothing of a GPU."
    if "take" in args.only:
        yield "takes of random rows:"
        yield from bench.takes()
    num_rows = max(24, bench.num_bytes // Images(1).images.nbytes)
    store = build_store(Images(num_rows), directory / "images", progress=False)
    if "load" in args.only:
        yield f"loading a store of {num_rows:,} rows:"
        yield from bench.loads(store)
    if "wait" in args.only:
        yield f"training steps of {args.batch} rows:"
        yield from bench.waits(store, args.batch, args.width)
    if "graph" in args.only:
        yield f"Trainer steps of {args.batch} rows:"
        yield from bench.graphs(store, args.batch)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda:0", help="the root device")
    parser.add_argument("--data-devices", help="such as cuda:0,cuda:1; by default the root device")
    parser.add_argument("--only", default="take,load,wait,graph", help="of these, some")
    parser.add_argument("--mib", type=int, default=2048, help="bytes of rows, in MiB")
    parser.add_argument("--batch", type=int, default=512, help="rows of a training step")
    parser.add_argument("--width", type=int, default=64, help="channels of the network")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type != "cpu" and not torch.accelerator.is_available():
        sys.exit(
            f"--device {args.device}: there is no GPU here, and this program measures one. With"
            " --device cpu it runs all the same, and measures nothing of a GPU"
        )
    names = (args.data_devices or args.device).split(",")
    bench = Bench(device, [torch.device(name) for name in names], args.mib, args.rounds)
    with tempfile.TemporaryDirectory() as directory:
        for line in lines(args, bench, Path(directory)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
