"""The loader with rows drawn by weight, and with some rows of a store, against the shuffled one.

    python tests/benchmarks/samplers.py --case A,C,small

The runs of a round take turns, so that all see the same noise. Each epoch is another one, so that
its set-up counts. Printed are rows per second and their ratio to the shuffled loader's, round by
round.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
from loader import CASES, LEAST_S, RandomRows, loader_epoch
from timing import CLOCKS, in_turn, machine, spread

from lightning_memmap.loading import SuperBatchLoader, load_split
from lightning_memmap.placement import DataTopology, SplitSize, plan_placement
from lightning_memmap.sampling import RandomSplit, Sampler, Shards, ShuffledSampler, Weighted
from lightning_memmap.store import Store, build_store

CPU = torch.device("cpu")


def make_loader(
    store: Store, batch: int, order: Callable[[Shards], Sampler], split: RandomSplit | None = None
) -> SuperBatchLoader:
    """A loader over the file mapping."""
    topology = DataTopology((CPU,), assemble_on=CPU)
    subset = None if split is None else split.subset("train", 0, store)
    size = SplitSize.of(
        "train", store.manifest, topology, subset, order=lambda shards, window: order(shards)
    )
    placement = plan_placement({"train": size}, topology, "mmap", budget_bytes={CPU: 2**40})
    rows = load_split(store, topology, placement.splits["train"])
    sampler = order(size.shards.base)
    return SuperBatchLoader(rows, sampler, batch, collate=store.schema.builder())


def epochs_of(loader: SuperBatchLoader) -> Callable[[], int]:
    """One epoch after the other."""
    epoch = 0

    def run() -> int:
        nonlocal epoch
        epoch += 1
        loader.set_epoch(epoch)
        return loader_epoch(loader)

    return run


def measure(name: str, rounds: int, clock: str) -> None:
    """Print the figures of one case."""
    case = CASES[name]
    weights = np.random.default_rng(0).exponential(size=case.num_rows)
    # A tenth of the rows has half of the weight, as rare classes do.
    rare = np.where(np.arange(case.num_rows) % 10 == 0, 9.0, 1.0)

    with tempfile.TemporaryDirectory() as directory:
        store = build_store(RandomRows(case), Path(directory, "store"), progress=False)

        def weighted(given: np.ndarray) -> Callable[[Shards], Sampler]:
            return lambda shards: Weighted(given).make(shards, 0, store)

        loaders = {
            "shuffled": make_loader(store, case.batch, ShuffledSampler),
            "weighted": make_loader(store, case.batch, weighted(weights)),
            "weighted, 2 classes": make_loader(store, case.batch, weighted(rare)),
            "9 tenths at random": make_loader(
                store, case.batch, ShuffledSampler, RandomSplit(0.1, seed=1)
            ),
        }
        runs = {name: epochs_of(loader) for name, loader in loaders.items()}
        seconds = in_turn(runs, rounds, clock, LEAST_S)
        rates = {
            name: [loaders[name].order.num_positions / each for each in seconds[name]]
            for name in loaders
        }
        for name_, found in rates.items():
            ratios = [a / b for a, b in zip(found, rates["shuffled"], strict=True)]
            print(f"{name:>6} {name_:<22} {median(found):>12,.0f} {spread(ratios):>24}", flush=True)


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", default="A,C,small")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine()}, {args.clock} time")
    print(f"{'case':>6} {'order':<22} {'rows/s':>12} {'ratio':>24}")
    for name in args.case.split(","):
        measure(name, args.rounds, args.clock)


if __name__ == "__main__":
    main()
