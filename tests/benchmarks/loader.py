"""The loader against the limit: ``torch.index_select(out=)`` on the same rows, in the same run.

    python tests/benchmarks/loader.py --case A --devices 1,2,4,8 --residency mmap,device

Each round times one epoch of the loader and one of the bare takes, in turn, so that both see the
same noise. Printed are the medians, the spread, and the ratio pair by pair. The rows are random
bytes: only their size matters here.
"""

import argparse
import platform
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lightning_memmap.loading import ZippedLoader, load_split
from lightning_memmap.placement import Consumers, plan_placement
from lightning_memmap.store import Store, build_store


@dataclass(frozen=True)
class Case:
    """What is loaded: rows of one field, with a label or without, and the rows of a step."""

    num_rows: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    batch: int
    label: bool = False


CASES = {
    "A": Case(50_000, torch.uint8, (3, 32, 32), 512, label=True),
    "B": Case(4_000, torch.uint8, (3, 224, 224), 64),
    "C": Case(200_000, torch.float32, (64,), 1024),
    "D": Case(20_000, torch.int32, (1024,), 32),
    "small": Case(200_000, torch.float32, (8,), 4),
}


class RandomRows(torch.utils.data.Dataset[Any]):
    """Rows made once, in memory."""

    def __init__(self, case: Case) -> None:
        size = (case.num_rows, *case.shape)
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(0, 127, size, generator=generator, dtype=torch.uint8)
        self.rows = rows.to(case.dtype)
        self.label = case.label

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return (self.rows[index], index % 10) if self.label else self.rows[index]


def make_loader(store: Store, case: Case, num_devices: int, residency: str) -> ZippedLoader:
    """A shuffled loader over logical CPU devices whose global batch is the case's."""
    devices = (torch.device("cpu"),) * num_devices
    consumers = Consumers(devices)
    plan = plan_placement(
        {"train": store.manifest},
        consumers,
        residency,
        budget_bytes={devices[0]: 2**40},
        pinned_budget_bytes=0,
    ).splits["train"]
    split = load_split(store, consumers, plan)
    return ZippedLoader(
        split, case.batch // num_devices, build=store.schema.builder(), shuffle=True
    )


def loader_epoch(loader: ZippedLoader) -> int:
    """All steps of one epoch, each assembled; the number of rows.

    A batch is let go of before the next one is asked for, as the Trainer does.
    """
    rows = 0
    for batch in loader.to(torch.device("cpu")):
        rows += len(batch[0] if isinstance(batch, list) else batch)
        del batch
    return rows


def bare_epoch(tensors: list[Tensor], places: Tensor, batch: int) -> int:
    """The same takes with nothing around them."""
    buffers = [torch.empty((batch, *t.shape[1:]), dtype=t.dtype) for t in tensors]
    for chosen in places.split(batch):
        for tensor, buffer in zip(tensors, buffers, strict=True):
            torch.index_select(tensor, 0, chosen, out=buffer[: len(chosen)])
    return len(places)


def timed(function: Callable[..., int], *args: Any) -> float:
    """Rows per second."""
    start = perf_counter()
    rows = function(*args)
    return rows / (perf_counter() - start)


def measure(store: Store, case: Case, num_devices: int, residency: str, rounds: int) -> str:
    """One line: medians with spread, and the ratio."""
    loader = make_loader(store, case, num_devices, residency)
    stream = loader.stream
    source = loader._split.sources[0]
    tensors = source.tensors
    places = {}
    for epoch in range(rounds + 1):
        shards, offsets = stream.at(epoch, range(stream.num_rows))
        places[epoch] = torch.from_numpy(source.locate(shards, offsets, stream.num_shards))
    ours, bare = [], []
    for epoch in range(rounds + 1):
        loader.set_epoch(epoch)
        # In turn, so that neither always runs after the other.
        if epoch % 2:
            ours.append(timed(loader_epoch, loader))
        bare.append(timed(bare_epoch, tensors, places[epoch], case.batch))
        if not epoch % 2:
            ours.append(timed(loader_epoch, loader))
    ours, bare = ours[1:], bare[1:]
    ratios = [one / other for one, other in zip(ours, bare, strict=True)]
    step_us = 1e6 * case.batch / statistics.median(ours)
    return (
        f"{num_devices:>7} {residency:>9} {spread(ours, '{:,.0f}'):>36}"
        f" {spread(bare, '{:,.0f}'):>36} {spread(ratios, '{:.2f}'):>18} {step_us:>9.1f}"
    )


def spread(values: list[float], form: str) -> str:
    """Median and range."""
    low, middle, high = (
        form.format(value) for value in (min(values), statistics.median(values), max(values))
    )
    return f"{middle} ({low}..{high})"


def lines(args: argparse.Namespace, directory: Path) -> Iterator[str]:
    """The report, line by line."""
    yield (
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads,"
        f" Python {platform.python_version()}, torch {torch.__version__}"
    )
    for name in args.case.split(","):
        case = CASES[name]
        store = build_store(RandomRows(case), directory / name, progress=False)
        yield f"case {name}: {case}, {args.rounds} rounds"
        yield (
            f"{'devices':>7} {'residency':>9} {'loader, samples/s':>36}"
            f" {'index_select(out=), samples/s':>36} {'ratio':>18} {'us/step':>9}"
        )
        for num_devices in (int(count) for count in args.devices.split(",")):
            if case.batch % num_devices:
                continue
            for residency in args.residency.split(","):
                yield measure(store, case, num_devices, residency, args.rounds)


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", default="A", help=f"of {','.join(CASES)}")
    parser.add_argument("--devices", default="1", help="logical data devices, such as 1,2,4,8")
    parser.add_argument("--residency", default="mmap", help="of mmap,device")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        for line in lines(args, Path(directory)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
