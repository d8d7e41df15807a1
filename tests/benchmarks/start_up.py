"""Opening a store again: 10^6 rows in 1,000 shards.

    python tests/benchmarks/start_up.py

The store is built once, in a temporary directory. Opening it checks the manifest, the files and
their sizes, and maps them; the rows are not read.
"""

import argparse
import tempfile
from pathlib import Path
from time import perf_counter

import torch
from loaders import make_loader
from timing import CLOCKS, in_turn, machine, spread

from lightning_memmap.store import build_store, open_store


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Row ``i`` is the number ``i``."""

    def __init__(self, num_rows: int) -> None:
        self.rows = torch.arange(num_rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def first_batch(path: Path) -> None:
    """From nothing to the first shuffled batch."""
    store = open_store(path)
    cpu = torch.device("cpu")
    next(iter(make_loader(store, (cpu,), 1024, "mmap")))


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=10**6)
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    print(f"{machine()}; {args.rows:,} rows of one int64, {args.shards} shards, {args.clock} time")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "store"
        start = perf_counter()
        build_store(Numbers(args.rows), path, num_shards=args.shards, progress=False)
        print(f"built in {perf_counter() - start:.1f} s")
        runs = {"open": lambda: open_store(path), "first batch": lambda: first_batch(path)}
        for name, seconds in in_turn(runs, args.rounds, args.clock).items():
            print(f"{name:>12}: {spread([1e3 * value for value in seconds], '{:.1f}')} ms")


if __name__ == "__main__":
    main()
