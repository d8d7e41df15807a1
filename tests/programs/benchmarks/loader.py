"""The loader against the limit, ``torch.index_select(out=)`` on the same rows in the same run, and
against torch's DataLoader; and over 192 shards against 24.

    python tests/programs/benchmarks/loader.py --case A --devices 1,2,4,8 --residency mmap,device
    python tests/programs/benchmarks/loader.py --case A --against dataloader
    python tests/programs/benchmarks/loader.py --case A --against shards

The runs of a round take turns, so that all see the same noise. Printed are the medians, the range,
and the ratio round by round. The rows are random bytes: only their size matters here.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from loaders import make_loader
from tensordict import TensorDict
from timing import CLOCKS, in_turn, machine, pairwise_ratios, spread
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.store import Store, build_store

#: An epoch that is over sooner is repeated.
LEAST_S = 0.2


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


class RowsAtOnce(RandomRows):
    """The same rows, handed over as a batch: what DataLoader asks for where a dataset can."""

    def __getitems__(self, indices: list[int]) -> Any:
        chosen = torch.tensor(indices)
        rows = self.rows.index_select(0, chosen)
        return [rows, chosen % 10] if self.label else rows


def case_loader(store: Store, case: Case, num_devices: int, residency: str) -> SuperBatchLoader:
    """A shuffled loader over logical CPU devices whose global batch is the case's."""
    devices = (torch.device("cpu"),) * num_devices
    return make_loader(store, devices, case.batch // num_devices, residency)


def loader_epoch(loader: SuperBatchLoader) -> int:
    """All steps of one epoch, each assembled; the number of rows.

    A batch is dropped before the next one is asked for, as the Trainer does.
    """
    rows = 0
    for batch in loader.assembled(torch.device("cpu")):
        rows += (batch[0] if isinstance(batch, list) else batch).size(0)
        del batch
    return rows


def bare_epoch(tensors: list[Tensor], places: Tensor, batch: int) -> int:
    """The same fetches with nothing around them."""
    buffers = [torch.empty((batch, *t.shape[1:]), dtype=t.dtype) for t in tensors]
    for chosen in places.split(batch):
        for tensor, buffer in zip(tensors, buffers, strict=True):
            torch.index_select(tensor, 0, chosen, out=buffer[: len(chosen)])
    return len(places)


def bare_epochs_of(loader: SuperBatchLoader, batch: int) -> Callable[[], int]:
    """The fetches of an epoch, of the same rows in the same order."""
    rows, order = loader._rows.sources[0], loader.order
    places = torch.from_numpy(rows.locate(order, 0, range(order.num_positions)))
    tensors = [column for column, _ in rows.columns._columns]
    return lambda: bare_epoch(tensors, places, batch)


def unchanged(batch: Any) -> Any:
    """For a batch that needs no collating."""
    return batch


def dataloaders(case: Case) -> dict[str, DataLoader[Any]]:
    """The ways to use a shuffling DataLoader over rows in memory, without and with workers."""
    rows = RandomRows(case)
    fields = {"rows": rows.rows}
    if case.label:
        fields["label"] = torch.arange(case.num_rows) % 10
    datasets: dict[str, tuple[Any, Any]] = {
        "item by item": (rows, None),
        "__getitems__": (RowsAtOnce(case), unchanged),
        "TensorDict": (TensorDict(fields, batch_size=[case.num_rows]), unchanged),
    }
    return {
        f"DataLoader, {name}, {workers} workers": DataLoader(
            dataset,
            batch_size=case.batch,
            shuffle=True,
            collate_fn=collate,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        for name, (dataset, collate) in datasets.items()
        for workers in (0, 2)
    }


def batches(loader: DataLoader[Any]) -> None:
    """An epoch, at most 400 steps of it: item by item is slow."""
    for batch in islice(loader, 400):
        del batch


def epochs_of(loader: SuperBatchLoader) -> Callable[[], int]:
    """One epoch after the other."""
    epochs = count()

    def run() -> int:
        loader.set_epoch(next(epochs))
        return loader_epoch(loader)

    return run


def against_takes(
    store: Store, case: Case, num_devices: int, residency: str, args: argparse.Namespace
) -> str:
    """One line: medians with their range, and the ratio."""
    loader = case_loader(store, case, num_devices, residency)
    runs = {"loader": epochs_of(loader), "takes": bare_epochs_of(loader, case.batch)}
    seconds = in_turn(runs, args.rounds, args.clock, LEAST_S)
    rates = {name: [case.num_rows / value for value in times] for name, times in seconds.items()}
    ratios = pairwise_ratios(rates["loader"], rates["takes"])
    step_us = [1e6 * value / loader.num_steps for value in seconds["loader"]]
    return (
        f"{num_devices:>7} {residency:>9} {spread(rates['loader'], '{:,.0f}'):>36}"
        f" {spread(rates['takes'], '{:,.0f}'):>36} {spread(ratios):>18}"
        f" {spread(step_us, '{:.1f}'):>22}"
    )


def against_dataloaders(
    store: Store, case: Case, residency: str, args: argparse.Namespace
) -> Iterator[str]:
    """A line for each way to use a DataLoader, which of them is the fastest, and how much faster
    than that one takes with nothing around them are."""
    loader = case_loader(store, case, 1, residency)
    others = dataloaders(case)
    runs: dict[str, Callable[[], object]] = {
        "loader": epochs_of(loader),
        "takes": bare_epochs_of(loader, case.batch),
    }
    for name, other in others.items():
        runs[name] = lambda other=other: batches(other)
    seconds = in_turn(runs, args.rounds, args.clock, LEAST_S)
    rows = {name: min(case.num_rows, 400 * case.batch) for name in others}
    rows["loader"] = rows["takes"] = case.num_rows
    rates = {name: [rows[name] / value for value in times] for name, times in seconds.items()}
    ours, takes = rates.pop("loader"), rates.pop("takes")
    yield f"{f'loader, {residency}':>40} {spread(ours, '{:,.0f}'):>36} samples/s"
    ratios = {name: pairwise_ratios(ours, theirs) for name, theirs in rates.items()}
    for name, theirs in rates.items():
        ratio = spread(ratios[name], "{:.1f}")
        yield f"{name:>40} {spread(theirs, '{:,.0f}'):>36} loader is faster {ratio} times"
    fastest = min(ratios, key=lambda name: median(ratios[name]))
    limit = spread(pairwise_ratios(takes, rates[fastest]), "{:.1f}")
    yield f"{'the fastest of them':>40} {fastest}; bare takes are faster {limit} times"


def against_shards(
    directory: Path, case: Case, num_devices: int, residency: str, args: argparse.Namespace
) -> str:
    """One line: what the same rows in more shards cost."""
    runs = dict[str, Callable[[], int]]()
    for shards in (24, 192):
        path = directory / f"{shards}"
        store = build_store(RandomRows(case), path, num_shards=shards, progress=False)
        runs[f"{shards}"] = epochs_of(case_loader(store, case, num_devices, residency))
    seconds = in_turn(runs, args.rounds, args.clock, LEAST_S)
    ratio = spread(pairwise_ratios(seconds["24"], seconds["192"]), "{:.3f}")
    return f"{num_devices:>7} {residency:>9} 192 shards are {ratio} times as fast as 24"


def lines(args: argparse.Namespace, directory: Path) -> Iterator[str]:
    """The report, line by line."""
    yield f"{machine()}; {args.clock} time, {args.rounds} rounds"
    for name in args.case.split(","):
        case = CASES[name]
        if args.against == "shards":
            yield f"case {name}: {case}"
            for num_devices in (int(number) for number in args.devices.split(",")):
                with tempfile.TemporaryDirectory(dir=directory) as stores:
                    yield against_shards(Path(stores), case, num_devices, args.residency, args)
            continue
        store = build_store(RandomRows(case), directory / name, progress=False)
        yield f"case {name}: {case}"
        if args.against == "dataloader":
            for residency in args.residency.split(","):
                yield from against_dataloaders(store, case, residency, args)
            continue
        yield (
            f"{'devices':>7} {'residency':>9} {'loader, samples/s':>36}"
            f" {'index_select(out=), samples/s':>36} {'ratio':>18} {'us/step':>22}"
        )
        for num_devices in (int(number) for number in args.devices.split(",")):
            if case.batch % num_devices:
                continue
            for residency in args.residency.split(","):
                yield against_takes(store, case, num_devices, residency, args)


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", default="A", help=f"of {','.join(CASES)}")
    parser.add_argument("--against", choices=("takes", "dataloader", "shards"), default="takes")
    parser.add_argument("--devices", default="1", help="logical data devices, such as 1,2,4,8")
    parser.add_argument("--residency", default="mmap", help="of mmap,device")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--threads", type=int, help="of torch; its own choice by default")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as directory:
        for line in lines(args, Path(directory)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
