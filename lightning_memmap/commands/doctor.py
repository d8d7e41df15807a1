"""``lightning-memmap doctor``: what this machine has, and what stores can do in a folder."""

import mmap
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
import torch
from filelock import FileLock, Timeout
from rich.console import Console
from rich.table import Table

from lightning_memmap.arguments import BriefParser, nearest_file
from lightning_memmap.host_memory import available_bytes
from lightning_memmap.sizes import format_bytes
from lightning_memmap.tables import printable

#: ``bad``: something that is needed is missing. ``limited``: some things will not work.
State = Literal["ok", "limited", "bad"]
_STYLES = {"ok": "green", "limited": "yellow", "bad": "bold red"}
_PAGE = 4096


class Finding(NamedTuple):
    """Something that was looked at, whether it is as it should be, and what to do about it."""

    what: str
    state: State
    text: str


def doctor(args: list[str]) -> int:
    """Run ``lightning-memmap doctor`` with these arguments."""
    parser = BriefParser(
        prog="lightning-memmap doctor",
        description="Look at GPUs and memory, and try out what stores need of the file system of a"
        " folder. Exit code: 0, 1 if something that is needed does not work there, or 2 for a wrong"
        " argument, such as a folder that is missing.",
    )
    parser.add_argument("folder", nargs="?", default=".", help="Where stores are, or will be.")
    folder = Path(parser.parse_args(args).folder)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else f"is not there{nearest_file(folder)}"
        print(f"error: {printable(folder)} {what}: name a folder", file=sys.stderr)
        return 2
    findings = [*machine(), *file_system(folder)]
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for each in findings:
        table.add_row(each.state, each.what, printable(each.text), style=_STYLES[each.state])
    Console(markup=False).print(table)
    return int(any(finding.state == "bad" for finding in findings))


def machine() -> Iterator[Finding]:
    """Look at GPUs and memory, within the limits of the control groups."""
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        yield Finding(f"cuda:{index}", "ok", f"{found.name}, {format_bytes(found.total_memory)}")
    if not torch.cuda.is_available():
        yield Finding("GPUs", "limited", f"torch {torch.__version__} finds none")
    total = format_bytes(psutil.virtual_memory().total)
    free = format_bytes(available_bytes())
    yield Finding("host memory", "ok", f"{free} free for this process, of {total}")


def file_system(folder: Path) -> Iterator[Finding]:
    """Try out in a folder what building and reading a store needs. Nothing is left behind."""
    folder = folder.absolute()
    disks = psutil.disk_partitions(all=True)
    found = [(len(d.mountpoint), d.fstype) for d in disks if folder.is_relative_to(d.mountpoint)]
    kind, free = max(found, default=(0, "unknown"))[1], shutil.disk_usage(folder).free
    yield Finding("folder", "ok", f"{folder}: file system {kind}, {format_bytes(free)} free")
    try:
        temporary = tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder)
    except OSError as error:
        text = f"cannot be written ({error.strerror}): stores in it can be read, and not built"
        yield Finding("writing", "limited", text)
        return
    with temporary as name:
        for what, (attempt, otherwise, text) in _ATTEMPTS.items():
            try:
                wrong = attempt(Path(name))
            except (OSError, Timeout) as error:
                wrong = str(error)
            yield Finding(
                what, otherwise if wrong else "ok", f"{text} ({wrong})" if wrong else "works"
            )


def _map(folder: Path) -> str:
    path = folder / "mapped"
    path.write_bytes(bytes(_PAGE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        os.pwrite(file.fileno(), b"row", 7)
        return "" if mapping[7:10] == b"row" else "what is written is not seen in the mapping"


def _rename(folder: Path) -> str:
    for name in ("old", "new"):
        (folder / name).write_text(name)
    os.replace(folder / "new", folder / "old")
    return (
        "" if (folder / "old").read_text() == "new" else "the file that was replaced is still there"
    )


def _lock(folder: Path) -> str:
    with FileLock(folder / "lock", timeout=1):
        try:
            with FileLock(folder / "lock", timeout=0):
                return "two holders at once"
        except Timeout:
            return ""


def _claim(folder: Path) -> str:
    with (folder / "claimed").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, _PAGE)
    return ""


def _read_directly(folder: Path) -> str:
    path = folder / "direct"
    path.write_bytes(b"row".ljust(_PAGE))
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, _PAGE) as buffer:
            os.preadv(descriptor, [buffer], 0)
            return "" if buffer[:3] == b"row" else "other bytes"
    finally:
        os.close(descriptor)


#: What is tried, what it means if it fails, and what to say then.
_ATTEMPTS: dict[str, tuple[Callable[[Path], str], State, str]] = {
    "memory mapping": (_map, "bad", "stores cannot be opened here: choose a local disk"),
    "atomic rename": (_rename, "bad", "stores cannot be built here: choose a local disk"),
    "file locks": (_lock, "bad", "two builds could meet here: choose a local disk"),
    "claiming space": (_claim, "limited", "a full disk is only noticed while a store is written"),
    "direct reads": (_read_directly, "limited", "residency='stream' reads through the page cache"),
}
