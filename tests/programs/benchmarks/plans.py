"""Where well-known sets fit, and how long their stores take to build: tables of the docs.

    python tests/programs/benchmarks/plans.py --write                # about a minute
    python tests/programs/benchmarks/plans.py --write --clock cpu    # where the machine isn't idle

No set is downloaded. Rows of the same sizes are made by this program, and as many of them as take
a few seconds are stored, as ``lightning-memmap store plan --dataset`` does: arrays in memory by
slices, images one by one by this process alone. JPEG files have the size and the bytes of those of
ImageNet on average; they are decoded, and scaled as ``torchvision.transforms.Resize`` and
``CenterCrop`` do, by Pillow.
"""

import argparse
import io
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jpegs import make_jpeg
from PIL import Image, ImageOps
from timing import CLOCKS, machine
from torch.utils.data import Dataset, TensorDataset

from lightning_memmap.commands.store_placement import Machine, make_planned_manifest, plan_memory
from lightning_memmap.commands.store_rates import Trial, try_build
from lightning_memmap.sizes import format_bytes, format_duration
from lightning_memmap.store import TokenStream

ROOT = Path(__file__).resolve().parents[3]
START, END = "<!-- plans -->\n", "<!-- end of plans -->\n"
#: Devices, the memory of one, and of their host.
MACHINES = {
    "1 x 24 GiB, host 64 GiB": (1, "24GiB", "64GiB"),
    "4 x 24 GiB, host 256 GiB": (4, "24GiB", "256GiB"),
    "4 x 80 GiB, host 512 GiB": (4, "80GiB", "512GiB"),
    "8 x 80 GiB, host 2 TiB": (8, "80GiB", "2TiB"),
}
ROWS = "all rows"
BUILD = "building it"
#: The training images of ImageNet-1k.
IMAGENET = 1_281_167
_NUM_FILES = 16


class Files(Dataset[Any]):
    """JPEG files as bytes and labels, or images decoded and scaled to a square.

    Args:
        num_rows: Rows: the same few files again and again.
        side: Pixels of the square; None for the bytes.
    """

    def __init__(self, num_rows: int, side: int | None) -> None:
        self.num_rows = num_rows
        self.side = side
        self.files = [make_jpeg(seed) for seed in range(_NUM_FILES)]

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> Any:
        data, label = self.files[row % _NUM_FILES], row % 1000
        if self.side is None:
            return {"image": data, "label": label}
        image = ImageOps.fit(Image.open(io.BytesIO(data)), (self.side, self.side))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), label


def arrays(num_rows: int, *shape: int) -> TensorDataset:
    """Images and labels in memory."""
    images = torch.zeros(num_rows, *shape, dtype=torch.uint8)
    images.random_(generator=torch.Generator().manual_seed(0))
    return TensorDataset(images, torch.arange(num_rows) % 10)


def tokens() -> TokenStream:
    """As many tokens as a trial may need; the set has ten billion."""
    return TokenStream(np.arange(2**26, dtype=np.int64).astype(np.uint16), length=2048)


@dataclass(frozen=True)
class KnownSet:
    """A set that many people know."""

    name: str
    make: Callable[[], Any]
    num_bytes: int | None = None
    """Bytes of the whole set, where the dataset has a part of it."""


SETS = [
    KnownSet("CIFAR-10", lambda: arrays(50_000, 3, 32, 32)),
    KnownSet("ImageNet, 64x64", lambda: Files(IMAGENET, 64)),
    KnownSet("ImageNet, 224x224", lambda: Files(IMAGENET, 224)),
    KnownSet("ImageNet, JPEG files", lambda: Files(IMAGENET, None)),
    KnownSet("10 billion tokens, uint16", tokens, 2 * 10**10),
]


#: The tables: a page, its sets, and its columns.
TABLES = {
    "README.md": ([known.name for known in SETS], [ROWS, *list(MACHINES)[:3]]),
    "docs/placement.md": ([known.name for known in SETS], [ROWS, *MACHINES, BUILD]),
}


def measure(sets: list[KnownSet], folder: Path, clock: str) -> dict[str, dict[str, str]]:
    """Return the cells of each set by column."""
    plans = {}
    for known in sets:
        trial = try_build(known.make(), folder, clock=CLOCKS[clock])
        num_rows = trial.num_rows
        if known.num_bytes is not None:
            num_rows = known.num_bytes // trial.row_bytes
        plans[known.name] = {
            ROWS: format_bytes(make_planned_manifest(trial.row_bytes, num_rows).num_bytes),
            **{name: find_place(trial, num_rows, *each) for name, each in MACHINES.items()},
            BUILD: format_duration(num_rows * trial.seconds / trial.trial_rows),
        }
        print(known.name, plans[known.name], flush=True)
    return plans


def table(plans: dict[str, dict[str, str]], columns: list[str]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield f"| | {' | '.join(columns)} |"
    yield "|---" * (1 + len(columns)) + "|"
    for name, cells in plans.items():
        yield f"| {name} | {' | '.join(cells[column] for column in columns)} |"


def find_place(trial: Trial, num_rows: int, count: int, memory: str, host: str) -> str:
    """Return where the rows are on a machine, as a cell."""
    store = make_planned_manifest(trial.row_bytes, num_rows)
    machine = Machine.of(memory, host, 0.7)
    if 2 * trial.text_bytes > trial.row_bytes:  # It stays in host memory.
        return "host" if store.num_bytes <= machine.host_budget else "disk"
    use = plan_memory({"": store}, count, machine)
    devices = "GPU" if count == 1 else "GPUs"
    if use.residency == "auto":
        return f"{use.on_devices / store.num_bytes:.0%} {devices}, rest host"
    return {"device": devices, "host": "host"}.get(use.residency, "disk")


def main() -> None:
    """Measure, and write the tables to the pages where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="into the README and docs/")
    parser.add_argument("--folder", type=Path, help="where rows are stored for a trial")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as directory:
        plans = measure(SETS, Path(directory), args.clock)
    clock = "CPU time" if args.clock == "cpu" else "Wall time"
    note = f"{clock} of a build in one process: {machine()}."
    for page, (names, columns) in TABLES.items():
        lines = list(table({name: plans[name] for name in names}, columns))
        lines += ["", note] if BUILD in columns else []
        print(f"\n{page}", *lines, sep="\n")
        if args.write:
            write(ROOT / page, lines)


def write(path: Path, lines: list[str]) -> None:
    """Replace the table of a page."""
    before, start, rest = path.read_text(encoding="utf-8").partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"{path} has no lines {START.strip()} and {END.strip()}")
    text = "".join(f"{line}\n" for line in lines)
    path.write_text(before + start + text + end + after, encoding="utf-8")


if __name__ == "__main__":
    main()
