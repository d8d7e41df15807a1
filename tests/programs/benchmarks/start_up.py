"""Importing the package, and opening a store again: 10^6 rows in 1,000 shards.

    python tests/programs/benchmarks/start_up.py
    python tests/programs/benchmarks/start_up.py --rows 10000000 --shards 24

The store is built once, in a temporary directory. Opening it checks the manifest, the files and
their sizes, and maps them; the rows are not read. The package is imported in fresh processes, each
after `lightning`, whose time is shown beside it.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

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


#: Prints the seconds of `import lightning`, and those of this package after it.
_IMPORTS = """
from time import CLOCK as now
start = now()
import lightning
between = now()
import lightning_memmap
print(between - start, now() - between)
"""


def import_times(rounds: int, clock: str) -> dict[str, list[float]]:
    """Seconds of imports in each of several fresh processes; the first one isn't counted."""
    name = {"wall": "perf_counter", "cpu": "process_time"}[clock]
    program = [sys.executable, "-c", _IMPORTS.replace("CLOCK", name)]
    # Compiled once, in the first process, as in an installed package.
    with tempfile.TemporaryDirectory() as directory:
        env = {**os.environ, "PYTHONPYCACHEPREFIX": directory}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        printed = [
            subprocess.check_output(program, text=True, env=env).split() for _ in range(rounds + 1)
        ]
    names = "import lightning", "lightning_memmap after it"
    return {name: [float(each[i]) for each in printed[1:]] for i, name in enumerate(names)}


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=10**6)
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    for name, seconds in import_times(min(args.rounds, 5), args.clock).items():
        print(f"{name}: {spread(seconds)} s")
    print(f"{machine()}; {args.rows:,} rows of one int64, {args.shards} shards, {args.clock} time")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "store"
        numbers, start = Numbers(args.rows), CLOCKS[args.clock]()
        before = getrusage(RUSAGE_SELF).ru_maxrss
        build_store(numbers, path, num_shards=args.shards, progress=False)
        more = (getrusage(RUSAGE_SELF).ru_maxrss - before) / 1024
        seconds_of_build = CLOCKS[args.clock]() - start
        print(f"built in {seconds_of_build:.1f} s, with {more:.0f} MiB beside the dataset's own")
        runs = {"open": lambda: open_store(path), "first batch": lambda: first_batch(path)}
        for name, seconds in in_turn(runs, args.rounds, args.clock).items():
            print(f"{name:>12}: {spread([1e3 * value for value in seconds], '{:.1f}')} ms")


if __name__ == "__main__":
    main()
