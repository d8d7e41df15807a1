"""Batches of rows that differ in length, against bare copies and a DataLoader.

    python tests/programs/benchmarks/variable.py --clock cpu

Token sequences, and speech at 16 kHz. The rows lie in the file mapping, in the page cache, and are
shuffled. "bare" copies rows of one size with `index_select` into memory that is used again,
as many bytes as the padded batch has; "useful" counts only the bytes of the rows themselves. The
DataLoader reads the same rows from tensors in memory, with pad_sequence.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from timing import CLOCKS, in_turn, machine, pairwise_ratios, spread
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lightning_memmap import MemmapDataModule

#: Rows, shortest and longest row in items, dtype.
SETS: dict[str, tuple[int, int, int, torch.dtype]] = {
    "tokens (int64, 128 to 512)": (40_000, 128, 512, torch.int64),
    "tokens (uint16, 128 to 512)": (80_000, 128, 512, torch.uint16),
    "speech (float32, 0.5 to 2 s)": (1_000, 8_000, 32_000, torch.float32),
}


class Rows:
    """Rows that differ in length, in memory."""

    def __init__(self, num_rows: int, shortest: int, longest: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(shortest, longest + 1, (num_rows,), generator=generator)
        items = torch.randint(0, 1000, (int(lengths.sum()),), generator=generator).to(dtype)
        self.rows = items.split_with_sizes(lengths.tolist())

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Tensor:
        return self.rows[row]


def epoch(loader: Any) -> Callable[[], None]:
    """Takes all batches of an epoch."""

    def run() -> None:
        for batch in loader:
            del batch

    return run


def bare(num_rows: int, width: int, dtype: torch.dtype, batch: int, steps: int) -> Any:
    """Copies rows of one size, in random order."""
    # Written to: the kernel gives one page of zeros for all memory that never was.
    rows = torch.arange(num_rows * width).to(dtype).view(num_rows, width)
    out = torch.empty(batch, width, dtype=dtype)

    def run() -> None:
        order = torch.randperm(num_rows)
        for step in range(steps):
            first = step * batch % (num_rows - batch)
            torch.index_select(rows, 0, order[first : first + batch], out=out)

    return run


def measured(path: Path, name: str, batch: int, rounds: int, clock: str) -> Iterator[str]:
    """The lines of one set."""
    num_rows, _, _, dtype = SETS[name]
    dataset = Rows(*SETS[name])
    runs: dict[str, Callable[[], None]] = {}
    for form in ("pad", "jagged", "list"):
        data = MemmapDataModule(
            dataset, store_dir=path / "s", batch_size=batch, residency="mmap",
            layout={"value": form},
        )  # fmt: skip
        data.prepare_data()
        data.setup("fit")
        runs[form] = epoch(data.train_dataloader())
    loader = DataLoader(
        dataset,
        batch,
        shuffle=True,
        collate_fn=lambda rows: (pad_sequence(rows, True), torch.tensor([len(r) for r in rows])),
    )
    runs["DataLoader, pad_sequence"] = epoch(loader)
    padded_bytes = sum(values.nbytes for values, _ in loader)
    row_bytes = sum(row.nbytes for row in dataset.rows)
    steps = len(loader)
    # In rows of the mean length of the set, so that as many rows are copied.
    for what, num_bytes in (("bare, padded bytes", padded_bytes), ("bare, useful", row_bytes)):
        width = num_bytes // num_rows // dtype.itemsize
        runs[what] = bare(num_rows, width, dtype, batch, steps)
    seconds = in_turn(runs, rounds, clock)
    sizes = f"{row_bytes / 2**20:,.0f} MiB, padded {padded_bytes / 2**20:,.0f}"
    yield f"{name}: {num_rows:,} rows, {sizes}"
    for run, times in seconds.items():
        rates = [num_rows / each for each in times]
        ratios = [
            spread(pairwise_ratios(seconds[other], times))
            for other in ("bare, padded bytes", "bare, useful", "DataLoader, pad_sequence")
        ]
        yield f"  {run:<26} {spread(rates, '{:,.0f}'):>34}" + "".join(f"{r:>22}" for r in ratios)


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    print(f"{machine()}; batches of {args.batch}, {args.clock} time")
    heads = ("of bare, padded", "of bare, useful", "of DataLoader")
    print(f"  {'':<26} {'rows/s':>34}" + "".join(f"{head:>22}" for head in heads))
    for name in SETS:
        with tempfile.TemporaryDirectory() as path:
            for line in measured(Path(path), name, args.batch, args.rounds, args.clock):
                print(line, flush=True)


if __name__ == "__main__":
    main()
