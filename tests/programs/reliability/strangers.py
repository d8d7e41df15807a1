"""What others do to a store that is not theirs: servers that lie, caches that vanish, indexes that
lead elsewhere."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lightning_memmap.errors import MemmapError
from lightning_memmap.store import Store, pull_store
from lightning_memmap.store.remote import files as remote_files
from lightning_memmap.store.remote.cache import DIRECTORY
from tests.programs.reliability.changes import NEW, NUM_ROWS, NUM_SHARDS
from tests.programs.reliability.damage import stores
from tests.programs.reliability.dataset import expected_rows, plain, rows_of
from tests.programs.reliability.forks import Forked, call
from tests.programs.reliability.outcome import Fault, Outcome, Subject
from tests.support.store.http_server import FAULTS, FileServer
from tests.support.store.http_server import Fault as Spoilt

_MEMORY_BYTES = 2**30
_FAR = Path("cache") / "far"  # Of what the change "cache" starts from.


# Servers


def meet_server(
    subject: Subject, beginnings: Path, scratch: Path, rng: random.Random, _: int
) -> Outcome:
    """Read, pull or verify a store whose server corrupts some of its responses."""
    outcome = Outcome()
    fault, share = rng.choice(FAULTS), rng.choice((1.0, 0.5, 0.1))
    suffix = rng.choice(("manifest.json", ".memmap", ".index", ".values", ""))
    action = rng.choice(("read", "pull", "verify"))
    what = f"{action} from a server whose answers with ...{suffix} are {fault} ({share:.0%})"
    seed = rng.getrandbits(32)
    serving = Forked(_serve, beginnings / _FAR, scratch / "port", suffix, fault, share, seed)
    try:
        while not (scratch / "port").exists():
            if serving.ended_within(0.01):
                raise RuntimeError(f"the server did not start: {serving.end()}")
        url = (scratch / "port").read_text()
        ending = call(_use, subject, url, action, scratch, memory_bytes=_MEMORY_BYTES)
    finally:
        serving.kill()
        serving.end()
    if outcome.add_ending(ending, what, allowed=True) and not ending.value:
        outcome.add(Fault.WRONG_ROWS, f"{what} gives other rows")
    return outcome


def _serve(
    directory: Path, port: Path, suffix: str, fault: Spoilt, share: float, seed: int
) -> None:
    rng = random.Random(seed)
    server = FileServer(directory)
    server.fault = lambda path: fault if path.endswith(suffix) and rng.random() < share else None
    temporary = port.with_suffix(".tmp")
    temporary.write_text(server.url)
    temporary.rename(port)
    server.wait()


def _use(subject: Subject, url: str, action: str, scratch: Path) -> bool:
    """Whether what the server gives are the rows of the store."""
    os.environ[DIRECTORY] = str(scratch / "cache")
    remote_files._FIRST_PAUSE_S, remote_files._SILENCE_S = 0.001, 0.3
    if action == "verify":  # What is damaged on the way is said to be damaged.
        subject.verify(url)  # type: ignore[arg-type]
        return True
    if action == "pull":
        pull_store(url, scratch / "s", progress=False)
        return rows_of(subject.open(scratch / "s")) == expected_rows(NUM_ROWS, NEW)
    return rows_of(subject.open(url)) == expected_rows(NUM_ROWS, NEW)  # type: ignore[arg-type]


# Caches


def empty_cache(
    subject: Subject, beginnings: Path, scratch: Path, rng: random.Random, _: int
) -> Outcome:
    """Empty the cache, or damage it, under a process that has a store in it open."""
    outcome, (name, harm) = Outcome(), rng.choice(sorted(_HARMS.items()))
    rows = rng.sample(range(NUM_ROWS), 40)
    what = f"reading rows {rows[:3]}... after {name}"
    url = (beginnings / _FAR).as_uri()
    ending = call(_read_under, subject, url, harm, rows, scratch / "cache", rng.random() < 0.8)
    if outcome.add_ending(ending, what):
        wrong, num_errors = ending.value
        if wrong:
            outcome.add(Fault.WRONG_ROWS, f"{what}: rows {wrong} are others")
        outcome.notes["rows of an emptied cache that were an error"] += num_errors
    return outcome


def _read_under(
    subject: Subject,
    url: Any,
    harm: Callable[[Path], None],
    rows: list[int],
    cache: Path,
    again: bool,
) -> tuple[list[int], int]:
    """Read rows, and again after the harm, and after another process fetched all."""
    os.environ[DIRECTORY] = str(cache)
    expected = expected_rows(NUM_ROWS, NEW)
    store = subject.open(url)
    for row in rows[: NUM_SHARDS - 1]:
        store[row]
    harm(cache)
    wrong, num_errors = [], 0
    if again and rows_of(subject.open(url)) != expected:
        wrong.append(-1)
    for row in rows:
        try:
            if plain(store[row]) != expected[row]:
                wrong.append(row)
        except MemmapError:
            num_errors += 1
    return wrong, num_errors


def _versions(cache: Path) -> list[Path]:
    return [path for path in cache.glob("*/g-*") if path.is_dir()]


def _remove_files(cache: Path) -> None:
    for path in cache.rglob("*.*"):
        if path.is_file() and path.suffix in (".memmap", ".index", ".values"):
            path.unlink()


def _remove_records(cache: Path) -> None:
    for version in _versions(cache):
        (version / "shards.tmp").unlink()


def _rename(cache: Path) -> None:
    for version in _versions(cache):
        version.rename(version.with_name("away"))


def _clear_records(cache: Path) -> None:
    for version in _versions(cache):
        os.truncate(version / "shards.tmp", 0)


_HARMS: dict[str, Callable[[Path], None]] = {
    "its cache was removed": shutil.rmtree,
    "the files of its cache were removed": _remove_files,
    "the records of its cache were removed": _remove_records,
    "the records of its cache were cut off": _clear_records,
    "the version in its cache was renamed": _rename,
}


# Indexes


def mislead(
    subject: Subject, beginnings: Path, scratch: Path, rng: random.Random, _: int
) -> Outcome:
    """Let an index of rows that differ in length lead anywhere, and read all rows."""
    outcome, path = Outcome(), scratch / "s"
    found = sorted(stores(beginnings).rglob("*.index"))
    index = rng.choice(found)
    name = index.relative_to(stores(beginnings)).parts[0]
    shutil.copytree(stores(beginnings) / name, path)
    file = path / index.relative_to(stores(beginnings) / name)
    values = np.fromfile(file, np.int64)
    for _ in range(rng.choice((1, 1, 2, len(values)))):
        values[rng.randrange(len(values))] = rng.choice(
            (-1, 0, 1, 2**62, 2**63 - 1, -(2**63), 2**40, 2**40 + 1, rng.getrandbits(62))
        )
    values.tofile(file)
    what = f"reading after {index.name} of {name!r} led elsewhere"
    ending = call(_read_all, subject, path, memory_bytes=_MEMORY_BYTES)
    outcome.add_ending(ending, what, allowed=True)
    ending = call(_is_damaged, subject, path, memory_bytes=_MEMORY_BYTES)
    changed = file.read_bytes() != index.read_bytes()
    if outcome.add_ending(ending, what, allowed=True) and changed and not ending.value:
        outcome.add(Fault.WRONG_ROWS, f"{what}: `verify` finds nothing")
    return outcome


def _read_all(subject: Subject, path: Path) -> None:
    """Read what can be read of a store, one by one and at once."""
    store: Store = subject.open(path)
    errors: list[MemmapError] = []
    reads: list[Callable[[], Any]] = [lambda row=row: store[row] for row in range(len(store))]
    rows = np.arange(len(store))
    reads += [lambda column=column: column.fetch(rows) for column in store.mapped_columns]
    for read in reads:
        try:
            read()
        except MemmapError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _is_damaged(subject: Subject, path: Path) -> bool:
    return bool(subject.verify(path))


KINDS = {
    "servers": ("store at a web server that corrupts its responses", meet_server),
    "caches": ("cache emptied or damaged under an open store", empty_cache),
    "indexes": ("index of rows that leads elsewhere", mislead),
}
