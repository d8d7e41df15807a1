"""The loader with rows drawn by weight, with some rows of a store, with windows over series, and
with rows of two stores, against the shuffled one.

    python tests/programs/benchmarks/samplers.py --case A,C,small,tokens

The runs of a round take turns, so that all see the same noise. Each epoch is another one, so that
its set-up counts. Printed are rows per second and their ratio to the shuffled loader's, round by
round.
"""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from loader import CASES, LEAST_S, RandomRows
from timing import CLOCKS, in_turn, machine, spread

from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.loading.split import load_split
from lightning_memmap.loading.variable_batch import LayoutCollate
from lightning_memmap.placement.plan import SplitShards, make_pool, plan_placement
from lightning_memmap.placement.topology import DataTopology
from lightning_memmap.sampling import (
    Mixture,
    Pool,
    RandomSplit,
    Sampler,
    ShuffledSampler,
    Weighted,
)
from lightning_memmap.schema import Windows
from lightning_memmap.store import ColumnDataset, Store, build_store
from lightning_memmap.store.joined import JoinedStore
from lightning_memmap.store.series import cut_into_windows

CPU = torch.device("cpu")
#: Of the two stores of a mixture, each with half of the rows.
SHARES = {"one": 0.7, "other": 0.3}
#: Steps of a window, and of a row that it is compared with.
WINDOW = 128


def make_loader(
    store: Store,
    batch: int,
    order: Callable[[Pool], Sampler],
    split: RandomSplit | None = None,
    windows: Windows | None = None,
) -> SuperBatchLoader:
    """A loader over the file mapping."""
    topology = DataTopology((CPU,), assemble_on=CPU)
    subset = None if split is None else split.subset("train", 0, store)
    rows = cut_into_windows(store, store.rows(subset), windows)
    pool = make_pool("train", rows, store.num_shards, topology)
    size = SplitShards.of(order(pool), store.manifest, topology)
    placement = plan_placement({"train": size}, topology, "mmap", budget_bytes={CPU: 2**40})
    held = load_split(store, topology, placement.splits["train"])
    schema = store.schema
    if windows is not None:
        schema = schema.windowed(windows.fields, windows.length)
    collate = LayoutCollate(schema)
    return SuperBatchLoader(held, topology, size.order, batch, collate=collate)


def epochs_of(loader: SuperBatchLoader) -> Callable[[], int]:
    """One epoch after the other."""
    epoch = 0

    def run() -> int:
        nonlocal epoch
        epoch += 1
        loader.set_epoch(epoch)
        num_rows = 0
        for super_batch in loader:
            super_batch.to(CPU)
            num_rows += super_batch.num_rows
        return num_rows

    return run


def measure(name: str, rounds: int, clock: str) -> None:
    """Print the figures of one case."""
    case = CASES[name]
    weights = np.random.default_rng(0).exponential(size=case.num_rows)
    # A tenth of the rows has half of the weight, as rare classes do.
    rare = np.where(np.arange(case.num_rows) % 10 == 0, 9.0, 1.0)

    with tempfile.TemporaryDirectory() as directory:
        store = build_store(RandomRows(case), Path(directory, "store"), progress=False)
        half = replace(case, num_rows=case.num_rows // 2)
        joined = JoinedStore(
            Path(directory),
            {
                name: build_store(RandomRows(half), Path(directory, name), progress=False)
                for name in SHARES
            },
        )

        def weighted(given: np.ndarray) -> Callable[[Pool], Sampler]:
            return lambda pool: Weighted(given).make(pool, 0, store)

        loaders = {
            "shuffled": make_loader(store, case.batch, ShuffledSampler),
            "weighted": make_loader(store, case.batch, weighted(weights)),
            "weighted, 2 classes": make_loader(store, case.batch, weighted(rare)),
            "9 tenths at random": make_loader(
                store, case.batch, ShuffledSampler, RandomSplit(0.1, seed=1)
            ),
            "mixture": make_loader(
                joined, case.batch, lambda pool: Mixture(SHARES).make(pool, 0, joined)
            ),
        }
        report(name, loaders, "shuffled", rounds, clock)


def report(
    case: str, loaders: dict[str, SuperBatchLoader], first: str, rounds: int, clock: str
) -> None:
    """Print the rates of loaders, and their ratio to that of the first."""
    runs = {name: epochs_of(loader) for name, loader in loaders.items()}
    seconds = in_turn(runs, rounds, clock, LEAST_S)
    rates = {
        name: [loaders[name].order.num_positions / each for each in seconds[name]]
        for name in loaders
    }
    for name, found in rates.items():
        ratios = [a / b for a, b in zip(found, rates[first], strict=True)]
        print(f"{case:>6} {name:<22} {median(found):>12,.0f} {spread(ratios):>24}", flush=True)


def measure_windows(rounds: int, clock: str) -> None:
    """Print the figures of windows: of a stream, and of series, against rows of the same size."""
    values = np.random.default_rng(0).integers(0, 2**15, 20_000_000).astype(np.int16)
    windows = Windows("tokens", WINDOW, WINDOW)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        rows = values[: len(values) // WINDOW * WINDOW].reshape(-1, WINDOW)
        plain = build_store(ColumnDataset({"tokens": rows}), path / "rows", progress=False)
        stream = build_store([{"tokens": values}], path / "stream", progress=False)
        # 20,000 series of 500 to 1,500 steps.
        edges = np.sort(np.random.default_rng(1).integers(0, len(values), 20_000))
        pieces = [{"tokens": piece} for piece in np.split(values, edges) if len(piece)]
        series = build_store(pieces, path / "series", variable=["tokens"], progress=False)
        loaders = {
            "shuffled rows": make_loader(plain, 256, ShuffledSampler),
            "windows of a stream": make_loader(stream, 256, ShuffledSampler, windows=windows),
            "windows of series": make_loader(series, 256, ShuffledSampler, windows=windows),
            "half overlapping": make_loader(
                stream, 256, ShuffledSampler, windows=Windows("tokens", WINDOW, WINDOW // 2)
            ),
        }
        report("tokens", loaders, "shuffled rows", rounds, clock)


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", default="A,C,small,tokens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine()}, {args.clock} time")
    print(f"{'case':>6} {'order':<22} {'rows/s':>12} {'ratio':>24}")
    for name in args.case.split(","):
        if name == "tokens":
            measure_windows(args.rounds, args.clock)
        else:
            measure(name, args.rounds, args.clock)


if __name__ == "__main__":
    main()
