"""Changes of a store: what each starts from, does, and leaves, whole or interrupted."""

import operator
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from lightning_memmap.errors import StoreError, StoreNotFoundError
from lightning_memmap.schema.fields import Values
from lightning_memmap.schema.schema import Schema
from lightning_memmap.store import (
    append_store,
    build_part,
    build_store,
    finish_store,
    open_store,
    pull_store,
    push_store,
)
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.remote import shards
from lightning_memmap.store.remote.cache import DIRECTORY
from lightning_memmap.store.table import TableBuild, TableWriter
from tests.programs.reliability.dataset import Edited, Files, Reusing, expected_rows, files, rows_of
from tests.programs.reliability.forks import Raised, call
from tests.programs.reliability.outcome import Fault, Outcome, Subject
from tests.support.store.build_server import write_ranges_of

NUM_ROWS, NUM_SHARDS = 300, 3
_NUM_PARTS, _RANGE_ROWS = 2, 50
#: The edition of the store that was there; of the change; of a later build.
OLD, NEW, CHANGED = 1, 2, 3
#: The build that a resumed one goes on with was killed at this row, which is no probe.
_KILLED_AT_ROW = 215


@dataclass(frozen=True)
class Attempt:
    """One try of a change in a directory."""

    directory: Path
    edition: int = NEW
    fingerprint: str | None = None
    overwrite: bool = False
    num_workers: int = 0
    files: Files = field(default_factory=Files)

    @property
    def path(self) -> Path:
        """The store that is changed, or pushed."""
        return self.directory / "s"

    @property
    def url(self) -> str:
        """Where it is pushed to, or pulled from."""
        return (self.directory / "far").as_uri()

    @property
    def dataset(self) -> Edited:
        """What is stored."""
        return Edited(NUM_ROWS, self.edition)


class _Stream(IterableDataset[Any]):
    """The rows of a dataset, one after the other."""

    def __init__(self, rows: Edited) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[row] for row in range(len(self.rows)))


def _build(subject: Subject, attempt: Attempt) -> None:
    options = {} if attempt.fingerprint is None else {"fingerprint": attempt.fingerprint}
    subject.build(
        attempt.dataset,
        attempt.path,
        num_shards=NUM_SHARDS,
        num_workers=attempt.num_workers,
        overwrite=attempt.overwrite,
        progress=False,
        **options,
    )


def _build_reusing(_: Subject, attempt: Attempt) -> None:
    rows = Reusing(NUM_ROWS, attempt.edition)
    build_store(rows, attempt.path, num_shards=NUM_SHARDS, overwrite=True, progress=False)


def _write_part(attempt: Attempt, index: int) -> None:
    build_part(
        attempt.dataset,
        attempt.path,
        (index, _NUM_PARTS),
        num_shards=NUM_SHARDS,
        overwrite=True,
        progress=False,
    )


def _write_parts(_: Subject, attempt: Attempt) -> None:
    for index in range(_NUM_PARTS):
        _write_part(attempt, index)


def _finish(_: Subject, attempt: Attempt) -> None:
    finish_store(attempt.path, overwrite=True, progress=False)


def _parts_and_finish(subject: Subject, attempt: Attempt) -> None:
    _write_parts(subject, attempt)
    _finish(subject, attempt)


def _parts_by_threads(subject: Subject, attempt: Attempt) -> None:
    with ThreadPoolExecutor(_NUM_PARTS) as threads:
        list(threads.map(partial(_write_part, attempt), range(_NUM_PARTS)))
    _finish(subject, attempt)


def _append(_: Subject, attempt: Attempt) -> None:
    append_store(Reusing(NUM_ROWS, attempt.edition), attempt.path, progress=False)


def _stream(_: Subject, attempt: Attempt) -> None:
    rows = _Stream(Reusing(NUM_ROWS, attempt.edition))
    build_store(rows, attempt.path, num_shards=NUM_SHARDS, overwrite=True, progress=False)


def _table(_: Subject, attempt: Attempt) -> None:
    rows = torch.tensor(_table_rows(attempt.edition))
    draft = Manifest.draft(NUM_ROWS, NUM_SHARDS, Schema.from_batch({"value": rows}))
    build = TableBuild(attempt.path, draft, overwrite=True)
    writer = TableWriter(attempt.path, draft, build.token)
    half = NUM_ROWS // 2
    for first, end in ((half, NUM_ROWS), (0, half)):
        writer.write(range(first, end), [Values(rows[first:end])])
    writer.close()
    build.finish(writer.num_written)


def _table_rows(edition: int) -> list[int]:
    return list(range(1000 * edition, 1000 * edition + NUM_ROWS))


def _pull(_: Subject, attempt: Attempt) -> None:
    pull_store(attempt.url, attempt.path, overwrite=True, progress=False)


def _push(_: Subject, attempt: Attempt) -> None:
    push_store(attempt.path, attempt.url, overwrite=True, progress=False)


def _fetch(_: Subject, attempt: Attempt) -> None:
    os.environ[DIRECTORY] = str(attempt.directory / "cache")
    if rows_of(open_store(attempt.url)) != expected_rows(NUM_ROWS, NEW):
        raise AssertionError("the cache gives other rows")


@dataclass(frozen=True)
class Change:
    """A kind of change."""

    title: str
    run: Callable[[Subject, Attempt], None]
    stores: dict[str, int] = field(default_factory=dict)
    is_build: bool = False
    place: str = "s"
    begun: Callable[[Path], None] | None = None

    @property
    def before(self) -> list[Any] | None:
        """The rows of the store before; None where there is none."""
        edition = self.stores.get(self.place)
        if edition is None:
            return None
        if self.run is _table:
            return [{"value": value} for value in _table_rows(edition)]
        return expected_rows(NUM_ROWS, edition)

    @property
    def after(self) -> list[Any]:
        """The rows of the store after it."""
        if self.run is _table:
            return [{"value": value} for value in _table_rows(NEW)]
        added = expected_rows(NUM_ROWS, NEW)
        return [*expected_rows(NUM_ROWS, OLD), *added] if self.run is _append else added

    def prepare(self, directory: Path) -> None:
        """Make what it starts from."""
        directory.mkdir(parents=True)
        for place, edition in self.stores.items():
            make = _table if self.run is _table else _build
            built = call(run, make, Subject(), Attempt(directory, edition))
            if built.status != 0 or isinstance(built.value, Raised):
                raise RuntimeError(f"what {self.title} starts from was not built: {built}")
            (directory / "s").rename(directory / "moved")
            (directory / "moved").rename(directory / place)
        if self.begun is not None:
            self.begun(directory)


def _interrupt(directory: Path) -> None:
    attempt = Attempt(directory, overwrite=(directory / "s").exists())
    killed = call(_run_until_row, attempt, _KILLED_AT_ROW)
    if killed.status != -signal.SIGKILL:
        raise RuntimeError(f"the build to resume was not killed: {killed}")


def _run_until_row(attempt: Attempt, last: int) -> None:
    def read(dataset: Edited, row: int) -> object:
        if row == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(dataset, row)

    original = Edited.__getitem__
    Edited.__getitem__ = read  # type: ignore[assignment,method-assign]
    run(_build, Subject(), attempt)


def _write_both_parts(directory: Path) -> None:
    written = call(run, _write_parts, Subject(), Attempt(directory))
    if written.status != 0 or isinstance(written.value, Raised):
        raise RuntimeError(f"the parts to finish were not written: {written}")


CHANGES = {
    "new": Change("new build", _build, is_build=True),
    "overwrite": Change("build over another store", _build, {"s": OLD}, is_build=True),
    "resumed": Change("resumed build", _build, is_build=True, begun=_interrupt),
    "reusing": Change("build of rows in one buffer over another store", _build_reusing, {"s": OLD}),
    "parts": Change("two parts over another store", _parts_and_finish, {"s": OLD}),
    "threads": Change("two parts by two threads", _parts_by_threads),
    "finish": Change("finish of two parts", _finish, begun=_write_both_parts),
    "append": Change("append", _append, {"s": OLD}),
    "stream": Change("build of a stream over another store", _stream, {"s": OLD}),
    "table": Change("table over another table", _table, {"s": OLD}),
    "push": Change("push over another store", _push, {"far": OLD, "s": NEW}, place="far"),
    "pull": Change("pull over another store", _pull, {"far": NEW, "s": OLD}),
    "cache": Change("fetch into a cache", _fetch, {"far": NEW}, place="cache"),
}


def run(make: Callable[[Subject, Attempt], None], subject: Subject, attempt: Attempt) -> None:
    """Make a change in this process, in small steps."""
    write_ranges_of(_RANGE_ROWS)
    shards._NUM_THREADS = 1
    files.__dict__.update(attempt.files.__dict__)
    make(subject, attempt)


# What must hold afterwards


def look(
    outcome: Outcome,
    subject: Subject,
    path: Path,
    versions: Sequence[list[Any] | None],
    where: str,
) -> int | None:
    """Compare a store with the rows that it may hold, where None is no store."""
    ending = call(version_of, subject, path, versions)
    if not outcome.add_ending(ending, f"opening what {where} left"):
        return None
    number, fault = ending.value
    if fault is not None:
        outcome.add(fault[0], f"after {where}: {fault[1]}")
    return None if number is None else int(number)


def version_of(
    subject: Subject, path: Path, versions: Sequence[list[Any] | None]
) -> tuple[int | None, tuple[Fault, str] | None]:
    try:
        store = subject.open(path)
        found = rows_of(store)
    except StoreNotFoundError:
        if None in versions:
            return versions.index(None), None
        return None, (Fault.HALF_STORE, "there is no store")
    except StoreError as error:
        return None, (Fault.HALF_STORE, f"the store is refused: {error}")
    if found not in versions:
        counts = [sum(map(operator.eq, found, rows or ())) for rows in versions]
        return None, (Fault.WRONG_ROWS, f"{len(found)} rows, of versions that may be {counts}")
    if damage := subject.verify(path):
        return None, (Fault.HALF_STORE, f"its rows are right, and `verify` finds {damage}")
    return versions.index(found), None


def look_for_leftovers(outcome: Outcome, path: Path) -> None:
    """Look for what a finished change should have cleared away."""
    names = {re.sub(r"g-[0-9a-f]{16}$", "g-*", entry.name) for entry in path.iterdir()}
    rows = [entry for each in path.glob("g-*") for entry in each.iterdir()]
    left = sorted(names - {"manifest.json", "g-*", ".lock"})
    left += [each.name for each in rows if each.suffix not in (".memmap", ".index", ".values")]
    if len(list(path.glob("g-*"))) > 1:
        left.append("a generation")
    if left:
        outcome.add(Fault.LEFTOVER, f"the finished change left {', '.join(left)}")


def begin(beginnings: Path, scratch: Path, name: str) -> Path:
    """A directory of what a change starts from."""
    directory = scratch / "d"
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(beginnings / name, directory, symlinks=True)
    return directory
