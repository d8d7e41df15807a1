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
from lightning_memmap.tables import GOOD, make_table

_NUM_ROWS = 1000


def doctor(args: list[str]) -> int:
    """Run the command with these arguments."""
    parser = BriefParser(
        prog="lightning-memmap doctor",
        description="Inspect GPUs and memory, and build, verify and read a small store in a folder."
        " Exit code: 0, 1 if stores cannot be built there, or 2 for a wrong argument, such as a"
        " folder that is missing.",
    )
    parser.add_argument("folder", nargs="?", default=".", help="The folder of stores.")
    folder = Path(parser.parse_args(args).folder)
    if not folder.is_dir():
        reason = "is a file" if folder.exists() else f"does not exist{nearest_file(folder)}"
        print_error(ValueError(f"{folder} {reason}: pass a folder"))
        return 2
    rows = describe_machine(folder.absolute())
    console = Console(markup=False)
    console.print(make_table(("machine", "found"), rows, ("found",)))
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as name:
            check_store(Path(name))
    except (OSError, MemmapError) as error:
        print_error(StoreError(f"stores cannot be built in {folder}: {error}"))
        return 1
    console.print("A store was built, verified and read in this folder.", style=GOOD)
    return 0


def describe_machine(folder: Path) -> Iterator[tuple[str, str]]:
    """Describe GPUs, memory within the limits of the control groups, and the folder's disk."""
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}", f"{gpu.name}, {format_bytes(gpu.total_memory)}"
    if not torch.cuda.is_available():
        yield "GPUs", f"torch {torch.__version__} finds none"
    total = format_bytes(psutil.virtual_memory().total)
    yield "host memory", f"{format_bytes(available_bytes())} free for this process, of {total}"
    disks = psutil.disk_partitions(all=True)
    systems = [
        (len(disk.mountpoint), disk.fstype)
        for disk in disks
        if folder.is_relative_to(disk.mountpoint)
    ]
    _, file_system = max(systems, default=(0, "unknown"))
    free = format_bytes(shutil.disk_usage(folder).free)
    yield "folder", f"{folder}: file system {file_system}, {free} free"


def check_store(folder: Path) -> None:
    """Build a store, verify it, and read it as training does."""
    rows = torch.arange(_NUM_ROWS)
    store = build_store(TensorDataset(rows), folder / "store", progress=False)
    damages = verify_store(store.path)
    read = [int(store[row][0]) for row in range(_NUM_ROWS)]
    if damages or read != rows.tolist():
        raise StoreError("; ".join(map(str, damages)) or "rows differ from the written rows")
