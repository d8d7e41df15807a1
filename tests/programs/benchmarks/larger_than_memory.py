"""An epoch over data larger than memory, against the sequential read of the same files.

    python tests/programs/benchmarks/larger_than_memory.py --data 2GiB --limit 512MiB --window 64MiB

The measuring process runs under a memory limit, the page cache included, where a control group
can be made (as root); else it says so. Before each run the files are put out of the page cache. The
runs of a round take turns. Compared are:

- plain: one thread reads the files from their beginning to their end, in pieces of 8 MiB.
- plain, letting go: the same, and pages are put out of the page cache once they are read.
- plain, direct: the same past the page cache.
- direct, kept: the same into as much memory as a window has, instead of the same 8 MiB.
- stream: a shuffled epoch of the loader with `residency="stream"`. What it is held against in each
  round is the fastest of the plain reads, and the one that keeps what it reads.
- mmap: a shuffled epoch of the loader over the file mapping, all rows mixed; for some seconds.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, cycle
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from loaders import make_loader
from timing import machine, pairwise_ratios, spread
from torch import Tensor

from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.loading.row_file import aligned_memory
from lightning_memmap.sizes import format_bytes, parse_bytes
from lightning_memmap.store import Store, build_store, open_store

CPU = torch.device("cpu")
PIECE_BYTES = 8 * 2**20
GROUP = f"lightning_memmap-{os.getpid()}"


class RandomRows(torch.utils.data.Dataset[Any]):
    """Rows that are cut out of some random bytes, and a label."""

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        self.num_rows, self.row_bytes = num_rows, row_bytes
        generator = torch.Generator().manual_seed(0)
        size = (row_bytes + 2**20,)
        self.bytes = torch.randint(0, 255, size, dtype=torch.uint8, generator=generator)

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        first = index * 4099 % 2**20
        return self.bytes[first : first + self.row_bytes], index % 1000


@contextmanager
def memory_group(limit: int) -> Iterator[tuple[Path | None, str]]:
    """A control group with a memory limit, and what is said of it; None where there can be none."""
    for root, name in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = root / GROUP
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / name).write_text(str(limit))
        except OSError:
            group.rmdir()
            continue
        try:
            yield group, f"limited to {format_bytes(limit)} by the control group {group}"
        finally:
            group.rmdir()
        return
    yield None, "NOT limited: no control group could be made; only the page cache is emptied"


def empty_page_cache(paths: list[Path]) -> None:
    """Put files out of the page cache."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def plain_read(paths: list[Path], buffer: memoryview, lets_go: bool, flags: int = 0) -> int:
    """Read files from beginning to end, over and over a buffer; the bytes that were read."""
    total = 0
    begins = range(0, len(buffer), PIECE_BYTES)
    pieces = cycle([buffer[begin : begin + PIECE_BYTES] for begin in begins])
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | flags)
        place = 0
        while found := os.preadv(descriptor, [next(pieces)], place):
            if lets_go:
                os.posix_fadvise(descriptor, place, found, os.POSIX_FADV_DONTNEED)
            place += found
        os.close(descriptor)
        total += place
    return total


def windowed_loader(store: Store, residency: str, args: argparse.Namespace) -> SuperBatchLoader:
    """A shuffled loader."""
    window = max(1, parse_bytes(args.window) // (store.num_shards * store.manifest.row_bytes))
    batch_size = args.batch // args.devices
    return make_loader(store, (CPU,) * args.devices, batch_size, residency, window)


def epoch_of(loader: SuperBatchLoader, row_bytes: int, most_s: float) -> Callable[[], int]:
    """An epoch, or some seconds of it; the bytes of the rows that were taken."""
    epochs = count()

    def run() -> int:
        loader.set_epoch(next(epochs))
        rows, started = 0, perf_counter()
        for batch in loader.assembled(CPU):
            rows += len(batch[0])
            del batch
            if perf_counter() - started > most_s:
                break
        return rows * row_bytes

    return run


def measure(args: argparse.Namespace, path: Path) -> dict[str, Any]:
    """What the process under the limit does: MiB/s of each run in each round, and its memory."""
    store = open_store(path)
    row_bytes = store.manifest.row_bytes
    paths = sorted(open_store(path).files.glob("*.memmap"))
    buffer, window = aligned_memory(PIECE_BYTES), parse_bytes(args.window)
    runs = {
        "plain": lambda: plain_read(paths, buffer, False),
        "plain, letting go": lambda: plain_read(paths, buffer, True),
        "plain, direct": lambda: plain_read(paths, buffer, False, os.O_DIRECT),
        "direct, kept": lambda: plain_read(paths, aligned_memory(window), False, os.O_DIRECT),
        "stream": epoch_of(windowed_loader(store, "stream", args), row_bytes, float("inf")),
    }
    if args.mmap_seconds:
        mapped = windowed_loader(store, "mmap", args)
        runs["mmap"] = epoch_of(mapped, row_bytes, args.mmap_seconds)
    rates: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for index in range(args.rounds + 1):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            empty_page_cache(paths)
            started = perf_counter()
            num_bytes = runs[name]()
            if index:
                rates[name].append(num_bytes / 2**20 / (perf_counter() - started))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    status = Path("/proc/self/status").read_text().splitlines()
    memory = {line.split(":")[0]: line.split(":")[1].strip() for line in status}
    return {"rates": rates, "peak": peak, "anonymous": memory.get("RssAnon", "")}


def report(found: dict[str, Any], args: argparse.Namespace, store: Store) -> Iterator[str]:
    """The figures, line by line."""
    rates = found["rates"]
    for name, values in rates.items():
        yield f"{name:>20} {spread(values, '{:,.0f}'):>28} MiB/s"
    plain = [values for name, values in rates.items() if name.startswith("plain")]
    ratios = pairwise_ratios(rates["stream"], [max(each) for each in zip(*plain, strict=True)])
    yield f"stream against the fastest plain read: {spread(ratios)}"
    ratios = pairwise_ratios(rates["stream"], rates["direct, kept"])
    yield f"stream against the direct read that keeps as much: {spread(ratios)}"
    if "mmap" in rates:
        ratios = pairwise_ratios(rates["stream"], rates["mmap"])
        yield f"stream against mmap: {spread(ratios, '{:.1f}')}"
    windows = 2 * parse_bytes(args.window)
    yield (
        f"peak RSS {format_bytes(found['peak'])}, of which mapped libraries and files; anonymous at"
        f" the end {found['anonymous']}; two windows are {format_bytes(windows)}, the limit"
        f" {format_bytes(parse_bytes(args.limit))}, the data"
        f" {format_bytes(store.manifest.num_bytes)}"
    )


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", default="2GiB", help="bytes of all rows")
    parser.add_argument("--limit", default="512MiB", help="memory of the measuring process")
    parser.add_argument("--window", default="64MiB", help="bytes of a window of all shards")
    parser.add_argument("--row", default="12KiB", help="bytes of a row")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--devices", type=int, default=1, help="logical data devices")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mmap-seconds", type=float, default=10.0, help="0 leaves mmap out")
    parser.add_argument("--directory", help="on the disk that is measured")
    parser.add_argument("--path", help=argparse.SUPPRESS)
    parser.add_argument("--group", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.path:
        if args.group:
            (Path(args.group) / "cgroup.procs").write_text(str(os.getpid()))
        print(json.dumps(measure(args, Path(args.path))))
        return
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        row_bytes = parse_bytes(args.row)
        rows = RandomRows(parse_bytes(args.data) // row_bytes, row_bytes)
        store = build_store(rows, Path(directory) / "rows", progress=False)
        os.sync()
        with memory_group(parse_bytes(args.limit)) as (group, said):
            print(f"{format_bytes(store.manifest.num_bytes)} in rows of {args.row}, {said}")
            child = [sys.executable, *sys.argv, "--path", str(store.path)]
            child += ["--group", str(group)] if group else []
            output = subprocess.run(child, check=True, stdout=subprocess.PIPE, text=True).stdout
            if group is not None:
                for name in ("memory.max_usage_in_bytes", "memory.peak"):
                    if (group / name).exists():
                        used = format_bytes(int((group / name).read_text()))
                        print(f"most memory of the group, page cache included: {used}")
        for line in report(json.loads(output), args, store):
            print(line, flush=True)


if __name__ == "__main__":
    main()
