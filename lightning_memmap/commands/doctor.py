"""``lightning-memmap doctor``: what this machine has, and whether stores work in a folder."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from rich.console import Console
from torch.utils.data import TensorDataset

from lightning_memmap.arguments import BriefParser, print_error
from lightning_memmap.errors import MemmapError, StoreError, nearest_file
from lightning_memmap.host_memory import available_bytes
from lightning_memmap.sizes import format_bytes
from lightning_memmap.store import build_store, verify_store
from lightning_memmap.tables import GOOD, make_table, text

_NUM_ROWS = 1000


def doctor(args: list[str]) -> int:
    """Run ``lightning-memmap doctor`` with these arguments."""
    parser = BriefParser(
        prog="lightning-memmap doctor",
        description="Look at GPUs and memory, and build, verify and read a small store in a folder."
        " Exit code: 0, 1 if stores cannot be built there, or 2 for a wrong argument, such as a"
        " folder that is missing.",
    )
    parser.add_argument("folder", nargs="?", default=".", help="Where stores are, or will be.")
    folder = Path(parser.parse_args(args).folder)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else f"is not there{nearest_file(folder)}"
        print_error(ValueError(f"{folder} {what}: name a folder"))
        return 2
    rows = [[text(what), text(found)] for what, found in look_at(folder.absolute())]
    console = Console(markup=False)
    console.print(make_table(("machine", "found"), rows, ("found",)))
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as name:
            try_out(Path(name))
    except (OSError, MemmapError) as error:
        print_error(StoreError(f"stores cannot be built in {folder}: {error}"))
        return 1
    console.print("A store was built, verified and read in this folder.", style=GOOD)
    return 0


def look_at(folder: Path) -> Iterator[tuple[str, str]]:
    """Look at GPUs, at memory within the limits of the control groups, and at the folder's disk."""
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}", f"{found.name}, {format_bytes(found.total_memory)}"
    if not torch.cuda.is_available():
        yield "GPUs", f"torch {torch.__version__} finds none"
    total = format_bytes(psutil.virtual_memory().total)
    yield "host memory", f"{format_bytes(available_bytes())} free for this process, of {total}"
    disks = psutil.disk_partitions(all=True)
    kinds = [(len(d.mountpoint), d.fstype) for d in disks if folder.is_relative_to(d.mountpoint)]
    kind, free = max(kinds, default=(0, "unknown"))[1], shutil.disk_usage(folder).free
    yield "folder", f"{folder}: file system {kind}, {format_bytes(free)} free"


def try_out(folder: Path) -> None:
    """Build a store, verify it, and read it as training does."""
    rows = torch.arange(_NUM_ROWS)
    store = build_store(TensorDataset(rows), folder / "store", progress=False)
    damages = verify_store(store.path)
    read = [int(store[row][0]) for row in range(_NUM_ROWS)]
    if damages or read != rows.tolist():
        raise StoreError("; ".join(map(str, damages)) or "other rows are read than were written")
