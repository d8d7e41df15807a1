"""Rows that differ in length, read window by window, against those of the file mapping.

    python tests/benchmarks/streamed_items.py --clock cpu

The store is in the page cache for `mmap`; `stream` reads it past that, where the file system can.
Both have the same order, and so the same batches. A round is an epoch of each.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from loaders import make_loader
from timing import CLOCKS, in_turn, machine, pairwise_ratios, spread

from lightning_memmap.loading import FormedCollate
from lightning_memmap.schema import read_forms
from lightning_memmap.store import Store, build_store

CPU = torch.device("cpu")
#: Rows, and the shortest and the longest of them in samples of int16.
CASES = {"speech, 4 to 60 KB": (6000, 2_000, 30_000), "tokens, 0.2 to 4 KB": (60_000, 100, 2_000)}


def sounds(num_rows: int, shortest: int, longest: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(shortest, longest, (num_rows,), generator=generator).tolist()
    noise = torch.randint(-(2**15), 2**15, (longest,), generator=generator).to(torch.int16)
    return [{"sound": noise[:length]} for length in lengths]


def epoch(store: Store, residency: str, window: int, form: str) -> Callable[[], None]:
    collate = FormedCollate(store.schema, read_forms({"sound": form}))
    loader = make_loader(store, [CPU], 64, residency, window, collate=collate)

    def run() -> None:
        for step in loader:
            step.to(CPU)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    print(f"{machine()}; {args.clock} time")
    with tempfile.TemporaryDirectory() as directory:
        for index, (name, case) in enumerate(CASES.items()):
            rows, window = sounds(*case), case[0] // 24 // 8
            store = build_store(rows, Path(directory) / str(index), progress=False)
            for form in ("pad", "jagged"):
                runs = {r: epoch(store, r, window, form) for r in ("mmap", "stream")}
                seconds = in_turn(runs, args.rounds, args.clock)
                rate = spread(pairwise_ratios(seconds["mmap"], seconds["stream"]))
                print(f"{name}, {form}: rate of stream over mmap {rate}")


if __name__ == "__main__":
    main()
