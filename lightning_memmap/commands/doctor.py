"""``lightning-memmap doctor``: what this machine has, and what will work on it."""

import mmap
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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


@dataclass(frozen=True)
class Finding:
    """Something that was looked at.

    Args:
        what: What it is.
        state: Whether it is as it should be.
        text: What was found, and what to do about it.
    """

    what: str
    state: State
    text: str


def doctor_parser() -> BriefParser:
    """Make the parser of the command."""
    parser = BriefParser(
        prog="lightning-memmap doctor",
        description="Look at devices and memory, and try out what stores need of the file system"
        " of a folder. Exit code: 0, 1 if something that is needed does not work there, or 2 for a"
        " wrong argument, such as a folder that is missing.",
    )
    parser.add_argument("folder", nargs="?", default=".", help="Where stores are, or will be.")
    return parser


def doctor(args: list[str]) -> int:
    """Run ``lightning-memmap doctor`` with these arguments.

    Args:
        args: Arguments of the command line, after ``lightning-memmap doctor``.

    Returns:
        The exit code: 0, 1 if something that is needed does not work, or 2 without such a folder.

    Raises:
        SystemExit: An argument is unknown (code 2), or help was asked for (0).
    """
    folder = Path(doctor_parser().parse_args(args).folder)
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
    """Look at the processor, GPUs and memory, within the limits of the control groups."""
    cores = len(os.sched_getaffinity(0))
    threads = f"{cores} cores for this process, {torch.get_num_threads()} threads of torch"
    yield Finding("processor", "ok", threads)
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        yield Finding(f"cuda:{index}", "ok", f"{found.name}, {format_bytes(found.total_memory)}")
    if not torch.cuda.is_available():
        cuda = torch.version.cuda
        built = f"for CUDA {cuda}, and finds no GPU" if cuda else "without CUDA"
        yield Finding("GPUs", "limited", f"torch {torch.__version__} is built {built}")
    total = psutil.virtual_memory().total
    text = f"{format_bytes(available_bytes())} free for this process, of {format_bytes(total)}"
    yield Finding("host memory", "ok", text)


def file_system(folder: Path) -> Iterator[Finding]:
    """Try out in a folder what building and reading a store needs. Nothing is left behind.

    Args:
        folder: Where stores are, or will be.

    Yields:
        Its file system, its free space, and each thing that was tried.
    """
    folder = folder.absolute()
    free = format_bytes(shutil.disk_usage(folder).free)
    yield Finding("folder", "ok", f"{folder}: {_file_system_of(folder)}, {free} free")
    try:
        temporary = tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder)
    except OSError as error:
        text = f"cannot be written ({error.strerror}): stores in it can be read, and not built"
        yield Finding("writing", "limited", text)
        return
    with temporary as name:
        for what, (attempt, otherwise, text) in _ATTEMPTS.items():
            try:
                attempt(Path(name))
            except (OSError, Timeout, _DoesNotHoldError) as error:
                yield Finding(what, otherwise, f"{text} ({error})")
            else:
                yield Finding(what, "ok", "works")


def _file_system_of(folder: Path) -> str:
    found = [
        (len(part.mountpoint), part.fstype)
        for part in psutil.disk_partitions(all=True)
        if folder.is_relative_to(part.mountpoint)
    ]
    return max(found)[1] if found else "unknown file system"


class _DoesNotHoldError(Exception):
    """The file system did something, and the outcome is wrong."""


def _hold(condition: bool, text: str) -> None:
    if not condition:
        raise _DoesNotHoldError(text)


def _map(folder: Path) -> None:
    path = folder / "mapped"
    path.write_bytes(bytes(_PAGE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        os.pwrite(file.fileno(), b"row", 7)
        _hold(mapping[7:10] == b"row", "what is written is not seen in the mapping")


def _rename(folder: Path) -> None:
    (folder / "building").mkdir()
    (folder / "building" / "row").write_bytes(b"row")
    os.rename(folder / "building", folder / "store")
    _hold((folder / "store" / "row").read_bytes() == b"row", "the renamed folder is another one")


def _lock(folder: Path) -> None:
    with FileLock(folder / "lock", timeout=1):
        try:
            with FileLock(folder / "lock", timeout=0):
                pass
        except Timeout:
            return
    raise _DoesNotHoldError("two holders at once")


def _claim(folder: Path) -> None:
    with (folder / "claimed").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, _PAGE)


def _read_directly(folder: Path) -> None:
    path = folder / "direct"
    path.write_bytes(b"row".ljust(_PAGE))
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, _PAGE) as buffer:
            _hold(os.preadv(descriptor, [buffer], 0) == _PAGE, "too few bytes")
            _hold(buffer[:3] == b"row", "other bytes")
    finally:
        os.close(descriptor)


#: What is tried, what it means if it fails, and what to say then.
_ATTEMPTS: dict[str, tuple[Callable[[Path], None], State, str]] = {
    "memory mapping": (_map, "bad", "stores cannot be opened here: choose a local disk"),
    "atomic rename": (_rename, "bad", "stores cannot be built here: choose a local disk"),
    "file locks": (_lock, "bad", "two builds could meet here: choose a local disk"),
    "claiming space": (_claim, "limited", "a full disk is only noticed while a store is written"),
    "direct reads": (_read_directly, "limited", "residency='stream' reads through the page cache"),
}
