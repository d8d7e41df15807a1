"""Where well-known sets fit, and how long their stores take to build: a table of the docs.

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

PAGE = Path(__file__).resolve().parents[3] / "docs" / "placement.md"
START, END = "<!-- plans -->\n", "<!-- end of plans -->\n"
#: Devices, the memory of one, and of their host.
MACHINES = [
    (1, "24GiB", "64GiB"),
    (4, "24GiB", "256GiB"),
    (4, "80GiB", "512GiB"),
    (8, "80GiB", "2TiB"),
]
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


def table(sets: list[KnownSet], folder: Path, clock: str) -> Iterator[str]:
    """The lines of the table, as they are measured."""
    heads = [f"{count} x {memory}, host {host}" for count, memory, host in MACHINES]
    columns = ["", "all rows", *heads, "building it"]
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for known in sets:
        trial = try_build(known.make(), folder, clock=CLOCKS[clock])
        num_rows = trial.num_rows
        if known.num_bytes is not None:
            num_rows = known.num_bytes // trial.row_bytes
        store = make_planned_manifest(trial.row_bytes, num_rows)
        cells = [
            format_bytes(store.num_bytes),
            *(residency(trial, num_rows, *each) for each in MACHINES),
            format_duration(num_rows * trial.seconds / trial.trial_rows),
        ]
        yield f"| {known.name} | {' | '.join(cells)} |"


def residency(trial: Trial, num_rows: int, count: int, memory: str, host: str) -> str:
    """Where the rows are on a machine, as a cell."""
    store = make_planned_manifest(trial.row_bytes, num_rows)
    machine = Machine.of(memory, host, 0.7)
    if 2 * trial.text_bytes > trial.row_bytes:  # It stays in host memory.
        return "`host`" if store.num_bytes <= machine.host_budget else "`stream`"
    use = plan_memory({"": store}, count, machine)
    share = use.on_devices / store.num_bytes
    return f"`{use.residency}`" + f", {share:.0%} on devices" * (use.residency == "auto")


def main() -> None:
    """Print the table, and write it to the page where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="into docs/placement.md")
    parser.add_argument("--sets", default="", help="of these names, by default all")
    parser.add_argument("--folder", type=Path, help="where rows are stored for a trial")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    sets = [known for known in SETS if not args.sets or known.name in args.sets.split(";")]
    lines = []
    with tempfile.TemporaryDirectory(dir=args.folder) as directory:
        for line in table(sets, Path(directory), args.clock):
            print(line, flush=True)
            lines.append(line)
    what = "processor time" if args.clock == "cpu" else "wall time"
    lines += ["", f"Builds by {what}, without worker processes: {machine()}."]
    print(lines[-1])
    if args.write:
        before, start, rest = PAGE.read_text(encoding="utf-8").partition(START)
        _, end, after = rest.partition(END)
        if not (start and end):
            raise ValueError(f"{PAGE} has no lines {START.strip()} and {END.strip()}")
        text = "".join(f"{line}\n" for line in lines)
        PAGE.write_text(before + start + text + end + after, encoding="utf-8")


if __name__ == "__main__":
    main()
