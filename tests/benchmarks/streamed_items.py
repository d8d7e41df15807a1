"""Rows that differ in length, and windows of a token stream, read window by window, against those
of the file mapping.

    python tests/benchmarks/streamed_items.py --clock cpu

The store is in the page cache for `mmap`; `stream` reads it past that, where the file system can.
Both have the same order, and so the same batches. A round is an epoch of each. For windows, it is
also counted how many bytes are read for each one that is used.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loaders import make_loader
from timing import CLOCKS, in_turn, machine, pairwise_ratios, spread

from lightning_memmap.loading import FormedCollate
from lightning_memmap.loading.row_file import RowFile
from lightning_memmap.schema import Windows, read_forms
from lightning_memmap.store import Store, TokenStream, build_store

CPU = torch.device("cpu")
#: Rows, and the shortest and the longest of them in samples of int16.
CASES = {"speech, 4 to 60 KB": (6000, 2_000, 30_000), "tokens, 0.2 to 4 KB": (60_000, 100, 2_000)}
#: Tokens of uint16, and lengths and strides of windows over them.
NUM_TOKENS, WINDOWS = 32 * 2**20, ((1024, 1024), (1024, 256), (128, 128))


def sounds(num_rows: int, shortest: int, longest: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(shortest, longest, (num_rows,), generator=generator).tolist()
    noise = torch.randint(-(2**15), 2**15, (longest,), generator=generator).to(torch.int16)
    return [{"sound": noise[:length]} for length in lengths]


def epoch(store: Store, residency: str, window: int, forms: dict[str, Any]) -> Callable[[], None]:
    collate = FormedCollate(store.schema, read_forms(forms))
    windows = {name: form for name, form in forms.items() if isinstance(form, Windows)}
    loader = make_loader(store, [CPU], 64, residency, window, windows, collate=collate)

    def run() -> None:
        for step in loader:
            step.to(CPU)

    return run


def rate(store: Store, window: int, forms: dict[str, Any], args: argparse.Namespace) -> str:
    runs = {r: epoch(store, r, window, forms) for r in ("mmap", "stream")}
    seconds = in_turn(runs, args.rounds, args.clock)
    ratios = pairwise_ratios(seconds["mmap"], seconds["stream"])
    return f"rate of stream over mmap {spread(ratios)}"


def bytes_read(run: Callable[[], None]) -> float:
    """The bytes that are read from files in one run."""
    counts = list[int]()
    read_bytes = RowFile.read_bytes

    def counted(file: RowFile, begin: int, end: int, memory: memoryview) -> None:
        counts.append(len(memory))
        read_bytes(file, begin, end, memory)

    RowFile.read_bytes = counted  # type: ignore[method-assign]
    run()
    RowFile.read_bytes = read_bytes  # type: ignore[method-assign]
    return sum(counts)


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
                print(f"{name}, {form}: {rate(store, window, {'sound': form}, args)}")
        tokens = np.random.default_rng(0).integers(0, 2**16, NUM_TOKENS).astype(np.uint16)
        for length, stride in WINDOWS:
            rows = TokenStream(tokens, length, stride)
            store = build_store(rows, Path(directory) / f"{length} {stride}", progress=False)
            forms = {"tokens": Windows(length, stride)}
            found = rate(store, NUM_TOKENS // stride // 24 // 8, forms, args)
            ratio = bytes_read(epoch(store, "stream", NUM_TOKENS // stride // 24 // 8, forms))
            ratio /= tokens.nbytes
            print(f"windows of {length} tokens at each {stride}: {found}, bytes read {ratio:.3f}")


if __name__ == "__main__":
    main()
