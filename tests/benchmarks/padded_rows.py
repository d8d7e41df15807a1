"""What a padded batch costs at least, without compiled code of one's own.

    python tests/benchmarks/padded_rows.py --dtype uint16

Token sequences of 128 to 512 items in a file mapping, shuffled, in steps of 256 rows. Each part of
a padded batch is measured by itself, and so is `pad_sequence`. "bare" copies rows of 512 items,
which lie in memory. No loader runs.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator

import numpy as np
import torch
from timing import CLOCKS, in_turn, machine, pairwise_ratios, spread
from torch.nn.utils.rnn import pad_sequence

from lightning_memmap.store.segments import copy_segments

NUM_ROWS, SHORTEST, WIDTH, STEP = 40_960, 128, 512, 256


def parts(path: str, dtype: str, together: int) -> dict[str, Callable[[], None]]:
    """Each part over all rows, by what it does.

    Args:
        path: A file for the rows.
        dtype: Of their items.
        together: Steps for which numpy is called once.
    """
    random = np.random.default_rng(0)
    lengths = random.integers(SHORTEST, WIDTH + 1, NUM_ROWS)
    ends = np.cumsum(lengths)
    starts, order = ends - lengths, random.permutation(NUM_ROWS)
    random.integers(0, 1000, ends[-1] + WIDTH).astype(dtype).tofile(path)
    mapped = np.memmap(path, dtype, "c")
    items = torch.from_numpy(mapped)
    rows = torch.arange(WIDTH).to(items.dtype).repeat(NUM_ROWS, 1)
    windows = items.as_strided((len(items) - WIDTH + 1, WIDTH), (1, 1))
    tails = torch.arange(2 * WIDTH).ge(WIDTH).as_strided((WIDTH + 1, WIDTH), (1, 1))
    num_rows, size = STEP * together, mapped.itemsize
    out = torch.empty(num_rows, WIDTH, dtype=items.dtype)
    target, places = out.view(-1).view(torch.uint8).numpy(), np.arange(num_rows) * WIDTH

    def taken(count: int) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
        for first in range(0, NUM_ROWS, count):
            here = order[first : first + count]
            yield here, torch.from_numpy(here)

    def bare() -> None:
        for _, here in taken(STEP):
            torch.index_select(rows, 0, here, out=out[:STEP])

    def locate() -> None:
        for here, _ in taken(num_rows):
            ends.take(here) - ends.take(here - 1, mode="wrap")

    def with_tails() -> None:
        for here, _ in taken(STEP):
            torch.index_select(windows, 0, torch.from_numpy(starts[here]), out=out[:STEP])

    def mask() -> None:
        for here, _ in taken(STEP):
            is_padding = tails.index_select(0, torch.from_numpy(WIDTH - lengths[here]))
            np.copyto(out[:STEP].numpy(), 0, where=is_padding.numpy())

    def fill() -> None:
        for _ in taken(num_rows):
            target[:] = 0

    def pieces() -> None:
        for here, _ in taken(num_rows):
            begins, sizes = starts[here] * size, lengths[here] * size
            copy_segments(mapped.view(np.uint8), begins, target, places * size, sizes)

    def sequence() -> None:
        for here, _ in taken(STEP):
            found = zip(starts[here].tolist(), ends[here].tolist(), strict=True)
            pad_sequence([items[start:end] for start, end in found], True)

    return {
        "bare": bare,
        "locate rows": locate,
        "copy with what follows": with_tails,
        "  overwrite by a mask": mask,
        "fill everything": fill,
        "  copy what is no padding": pieces,
        "pad_sequence": sequence,
    }


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dtype", choices=["uint8", "uint16", "int64"], default="uint16")
    parser.add_argument("--together", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    with tempfile.NamedTemporaryFile() as file:
        seconds = in_turn(parts(file.name, args.dtype, args.together), args.rounds, args.clock)
    print(f"{machine()}; {args.dtype}, {args.together} steps at once, {args.clock} time")
    for name, times in seconds.items():
        each = spread([1e9 * took / NUM_ROWS for took in times], "{:,.0f}")
        ratio = spread(pairwise_ratios(times, seconds["bare"]))
        print(f"  {name:<28} {each:>24} ns a row {ratio:>22} of bare")


if __name__ == "__main__":
    main()
