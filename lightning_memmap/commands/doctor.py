"""``lightning-memmap doctor``: what this machine has, and what will work on it."""

import importlib.metadata
import mmap
import os
import platform
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch
from filelock import FileLock, Timeout
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from lightning_memmap.arguments import BriefParser
from lightning_memmap.compare.run.variants import LIGHTNING_STRATEGIES, Machine, Variant
from lightning_memmap.host_memory import available_bytes
from lightning_memmap.sizes import format_bytes
from lightning_memmap.strategies import STRATEGIES

#: ``bad``: something that is needed is missing. ``limited``: some things will not work.
State = Literal["ok", "limited", "bad"]
_STYLES = {"ok": "green", "limited": "yellow", "bad": "bold red"}
_PACKAGE = "lightning_memmap"
#: What the extras are for. The others are for developers, or for data of certain libraries.
_EXTRAS = {
    "compare": "the pages of lightning-memmap compare and of lightning-memmap store show",
    "images": "image folders, and encoded images",
    "remote": "stores at s3://",
    "completion": "lightning-memmap completion",
    "examples": "the examples",
}
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
        description="Look at versions, devices, memory and the file system of a folder, and say"
        " what will work. Exit code: 0, 1 if something that is needed is missing, or 2 for a wrong"
        " argument.",
    )
    parser.add_argument("folder", nargs="?", default=".", help="Where stores are, or will be.")
    return parser


def doctor(args: list[str]) -> int:
    """Run ``lightning-memmap doctor`` with these arguments.

    Args:
        args: Arguments of the command line, after ``lightning-memmap doctor``.

    Returns:
        The exit code: 0, 1 if something that is needed is missing, or 2 if the folder is a file.

    Raises:
        SystemExit: An argument is unknown (code 2), or help was asked for (0).
    """
    folder = Path(doctor_parser().parse_args(args).folder)
    if not _nearest(folder).is_dir():
        print(f"error: {_nearest(folder)} is a file: name a folder", file=sys.stderr)
        return 2
    console = Console(markup=False)
    findings = []
    for title, found in (
        ("Versions", versions()),
        ("Devices", devices()),
        ("Memory and disk", [*memory(), *file_system(folder)]),
        ("What will work", strategies()),
    ):
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        for finding in found:
            findings.append(finding)
            table.add_row(
                finding.state, finding.what, finding.text, style=_STYLES.get(finding.state, "")
            )
        console.print(f"\n{title}", style="bold")
        console.print(table)
    return int(any(finding.state == "bad" for finding in findings))


def versions() -> Iterator[Finding]:
    """Look at what is installed.

    Yields:
        Python, each package that this one needs, and each of its extras.
    """
    yield Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")
    try:
        needed = importlib.metadata.requires(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding(_PACKAGE, "bad", "it is not installed: pip install -e . in its folder")
        return
    yield Finding(_PACKAGE, "ok", importlib.metadata.version(_PACKAGE))
    missing: dict[str, list[str]] = defaultdict(list)
    for requirement in map(Requirement, needed):
        problem, version = _problem(requirement)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield Finding(requirement.name, "bad" if problem else "ok", problem or version)
        else:
            for extra in _EXTRAS:
                if requirement.marker.evaluate({"extra": extra}):
                    missing[extra] += [f"{requirement.name}: {problem}"] if problem else []
    for extra, use in _EXTRAS.items():
        if missing[extra]:
            text = f'{"; ".join(missing[extra])}. For {use}: pip install "{_PACKAGE}[{extra}]"'
            yield Finding(f"extra {extra}", "limited", text)
        else:
            yield Finding(f"extra {extra}", "ok", use)


def _problem(requirement: Requirement) -> tuple[str, str]:
    """What is wrong with an installed package, if anything is, and its version."""
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return "it is not installed", ""
    if requirement.specifier.contains(version, prereleases=True):
        return "", version
    return f"{version} is installed, {requirement.specifier} is needed", version


def devices() -> Iterator[Finding]:
    """Look at what can compute.

    Yields:
        The processor, GPUs, and what processes can use to exchange tensors.
    """
    cores = len(os.sched_getaffinity(0))
    threads = f"{cores} cores for this process, {torch.get_num_threads()} threads of torch"
    yield Finding("processor", "ok", threads)
    if torch.version.cuda is None:
        there = " There is an NVIDIA GPU here: install a build of torch for CUDA."
        text = f"torch {torch.__version__} is built without CUDA."
        yield Finding("GPUs", "limited", text + there * Path("/dev/nvidia0").exists())
    elif not torch.cuda.is_available():
        text = f"torch is built for CUDA {torch.version.cuda} and finds no GPU: is there a driver?"
        yield Finding("GPUs", "limited", text)
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        text = f"{found.name}, {format_bytes(found.total_memory)}"
        yield Finding(f"cuda:{index}", "ok", text)
    backends = _backends()
    text = ", ".join(backends) or "torch has none: strategies with several processes cannot run"
    yield Finding("between processes", "ok" if backends else "limited", text)


def _backends() -> list[str]:
    distributed = torch.distributed
    if not distributed.is_available():
        return []
    found = {"nccl": distributed.is_nccl_available(), "gloo": distributed.is_gloo_available()}
    return [name for name, is_there in found.items() if is_there]


def memory() -> Iterator[Finding]:
    """Look at the memory of the host.

    Yields:
        What this process may still use, within the limits of its control groups.
    """
    total = psutil.virtual_memory().total
    text = f"{format_bytes(available_bytes())} free for this process, of {format_bytes(total)}"
    yield Finding("host memory", "ok", text)


def file_system(folder: Path) -> Iterator[Finding]:
    """Try out in a folder what building and reading a store needs. Nothing is left behind.

    Args:
        folder: Where stores are, or will be. If it is missing, the nearest folder above it.

    Yields:
        Its file system, its free space, and each thing that was tried.
    """
    existing = _nearest(folder)
    if existing != folder.absolute():
        text = f"{folder.absolute()} is not there: make it. What follows is of {existing}, above it"
        yield Finding("missing", "bad", text)
    kind = _file_system_of(existing)
    free = format_bytes(shutil.disk_usage(existing).free)
    yield Finding("folder", "ok", f"{existing}: {kind}, {free} free")
    try:
        temporary = tempfile.TemporaryDirectory(prefix=".doctor-", dir=existing)
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


def _nearest(folder: Path) -> Path:
    """A folder, or if it is missing, the nearest path above it that is there."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


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


def strategies() -> Iterator[Finding]:
    """Say which strategies can run here.

    Yields:
        Each strategy of this pack, and those of Lightning's that can be compared with it.
    """
    count = torch.cuda.device_count()
    machine = Machine("cuda", count) if count else Machine("cpu", 1)
    where = f"on {count} GPUs" if count else "on the CPU, with logical devices or processes"
    for name in (*(name for name, *_ in STRATEGIES), *LIGHTNING_STRATEGIES):
        obstacle = Variant(name).obstacle(machine, max(count, 1), configures_itself=True)
        yield Finding(name, "limited" if obstacle else "ok", obstacle or where)
