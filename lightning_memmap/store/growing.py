"""Stores that are trained from while they are built: what readers wait for is read first.

The readers on the machine of the building process look into its journal, which says by row whether
it is there, and at a count of these. In ``serving`` in the generation, ``wanted-*`` has the rows
that a reader needs next.
"""

import fcntl
import logging
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from typing_extensions import Self, override

from lightning_memmap.errors import StoreError, naming
from lightning_memmap.sampling.rows import Integers, starts_of
from lightning_memmap.schema.schema import Schema
from lightning_memmap.store.build import Asked, check_length
from lightning_memmap.store.building import Building, read_draft
from lightning_memmap.store.columns import RaggedColumn
from lightning_memmap.store.directory import (
    JOURNAL,
    KEY,
    SERVING,
    StoreDirectory,
    check_free,
    is_store,
)
from lightning_memmap.store.files import TEMPORARY, is_there
from lightning_memmap.store.identity import Fingerprint
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.open_columns import (
    ComingItems,
    ItemRows,
    Located,
    MappedRows,
    Supplied,
)
from lightning_memmap.store.samples import Probes, RandomDatasetError, ReadAhead, read_probes
from lightning_memmap.store.sources.column import as_range
from lightning_memmap.store.sources.source import is_read_by_item, source_of, telling_samples
from lightning_memmap.store.store import Store, Supply, open_directory
from lightning_memmap.store.workers import IN_HAND, RowNumbers, Workers, calling, give_way
from lightning_memmap.store.writing import run_writers, writer_of

_WANTED, _COUNT = "wanted-", f"count{TEMPORARY}"
#: Work of the first tasks, and of later ones; the most bytes of the rows of one.
_FIRST_TASK_S, _TASK_S, _TASK_BYTES = 0.005, 0.05, 32 * 2**20
#: How often a reader looks whether rows are there, less and less often, and at whether the build is
#: alive.
_PAUSE_S, _LONGEST_PAUSE_S, _LOOK_S = 0.0005, 0.005, 1.0
#: How long `BackgroundBuild.stop` waits for rows that are being read.
_PATIENCE_S = 60.0
#: Why builds of this process have ended, by generation.
_errors: dict[Path, BaseException] = {}
#: What readers in this process wait for.
_waiting = set[Event]()
_NO_BYTES = np.empty(0, np.uint8)
#: Of a store before any row is read.
_ANY_SCHEMA = Schema.infer([torch.zeros(1)])
_log = logging.getLogger(__name__)


class Serving(Supply):
    """The rows of a store that is being built, as one reader or the building process has them.

    Args:
        generation: The generation of the store.
        num_rows: Its rows.
        mode: In which the count of rows is opened.
    """

    def __init__(self, generation: Path, num_rows: int, mode: Literal["r", "r+"] = "r") -> None:
        self.generation, self.path = generation.resolve(), generation / SERVING
        #: By row, what is not 0 where it is there.
        self.present = np.memmap(generation / JOURNAL, np.uint8, "r", shape=num_rows)
        #: How many are there, int64 of shape (1,).
        self.count = np.memmap(generation / _COUNT, np.int64, mode, shape=1)
        self._said: Path | None = None

    @classmethod
    def make(cls, generation: Path, num_rows: int) -> "Serving":
        """Begin to share the rows of a build. What an interrupted one has left is removed."""
        path = generation / SERVING
        shutil.rmtree(path, ignore_errors=True)
        # Another one, where a reader is left that looks at the old count.
        (generation / _COUNT).unlink(missing_ok=True)
        (generation / _COUNT).write_bytes(bytes(8))
        _errors.pop(generation.resolve(), None)
        made = cls(generation, num_rows, "r+")
        made.count[:] = np.count_nonzero(made.present)
        path.mkdir()  # From now on readers find all of it.
        return made

    @property
    @override
    def is_complete(self) -> bool:
        # Committed, or removed since then: a build has its journal.
        self.check()
        return not is_there(self.generation / JOURNAL)

    @property
    @override
    def share(self) -> float:
        return int(self.count[0]) / len(self.present)

    def wanted(self) -> list[Path]:
        """The files in which readers say which rows they need. None of them ever changes."""
        return list(self.path.glob(f"{_WANTED}*"))

    @override
    def want(self, rows: Integers, turns: Integers | None = None) -> None:
        name = secrets.token_hex(8)
        turns = np.arange(len(rows)) if turns is None else turns
        with suppress(FileNotFoundError):  # The store has just been committed.
            (self.path / name).write_bytes(np.stack([turns, rows]).tobytes())
            said, self._said = self._said, self.path / f"{_WANTED}{name}"
            (self.path / name).rename(self._said)
            if said is not None:
                said.unlink(missing_ok=True)

    @override
    def wait(self, rows: Integers) -> None:
        self._wait(lambda: bool(self.present.take(rows).all()))

    @override
    def close(self) -> None:
        if self._said is not None:
            self._said.unlink(missing_ok=True)
            self._said = None

    def get(self, rows: Integers | None) -> None:
        """Ask for rows, or all, and wait until they are there."""
        if rows is None:
            self.wait_for_commit()
        else:
            self.want(rows)
            self.wait(rows)

    def wait_for_commit(self) -> None:
        """Wait until the store is committed."""
        self._wait(lambda: self.is_complete)

    def check(self) -> None:
        """Raise why the build has ended, if it has failed in this process."""
        if (error := _errors.get(self.generation)) is not None:
            raise error

    def _wait(self, is_there: Callable[[], bool]) -> None:
        heard, looked, pause_s = Event(), monotonic(), _PAUSE_S
        _waiting.add(heard)
        try:
            while not is_there():
                self.check()
                if monotonic() - looked > _LOOK_S:
                    looked = monotonic()
                    self._check_alive()
                # Of another process nothing is heard.
                heard.wait(pause_s)
                heard.clear()
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        finally:
            _waiting.remove(heard)

    def _check_alive(self) -> None:
        """Check that a process builds the store: it holds the lock of the journal."""
        directory = self.generation.parent
        try:
            with open(self.generation / JOURNAL, "rb+") as journal:
                fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:  # It was just committed, or removed.
            if is_store(directory) and Manifest.read(directory).generation == self.generation.name:
                return
        except OSError:  # It is held.
            return
        raise StoreError(
            f"the process that builds the store at {directory} has ended, and the one"
            " with local rank 0 says why: start again, and it goes on with the rows that are there"
        )


class _Build:
    """One of the stores that are built together: what is there of it, and what is read next."""

    def __init__(self, building: Building, probes: Probes, pieces: Integers | None) -> None:
        self.building, self.probes = building, probes
        num_rows = building.draft.num_rows
        self.serving = Serving.make(building.path, num_rows)
        self._taken = self.serving.present != 0
        self._row_s, self._num_others = probes.row_s, 0
        self._most = max(1, _TASK_BYTES // max(1, probes.row_bytes))
        #: What readers have said: turns, and rows, int64 of shape (2, rows).
        self._wants: dict[Path, Integers] = {}
        #: By process, rows that it has read before it was known how they are stored.
        self.ahead: list[Integers] = []
        #: By row, the piece of a file that it is read with, and the rows of each.
        self._piece_of, self._pieces = pieces, dict[int, Integers]()
        if pieces is not None:
            order = np.argsort(pieces, kind="stable")
            parts = np.split(order, np.flatnonzero(np.diff(pieces[order])) + 1)
            self._pieces = {int(pieces[part[0]]): part for part in parts}

    def begin(self, wanted: Integers, ahead: list[Integers]) -> None:
        """Note what is needed before a reader asks, and which of it each process reads already."""
        self.serving.want(wanted[1], wanted[0])
        self.ahead = ahead
        for rows in ahead:
            self._taken[rows] = True

    def wants(self) -> list[tuple[int, Integers]]:
        """What each reader wants that nobody reads yet: the turn of the first row, and rows."""
        known, self._wants = self._wants, {}
        for path in self.serving.wanted():
            with suppress(FileNotFoundError):  # Its reader has just said something else.
                found = known.get(path)
                if found is None:
                    found = np.fromfile(path, np.int64).reshape(2, -1)
                self._wants[path] = found.compress(~self._taken[found[1]], axis=1)
        return [(int(turns[0]), rows) for turns, rows in self._wants.values() if len(rows)]

    def others(self) -> Integers:
        """Some of the rows that nobody has asked for."""
        self._num_others += int(self._taken[self._num_others :].argmin())
        return self._num_others + np.flatnonzero(~self._taken[self._num_others :][: self._most])

    def take(self, rows: Integers, task_s: float) -> RowNumbers:
        """The first of some rows, as many as are read in a time, and what is read with them."""
        count = max(1, min(self._most, int(task_s / max(self._row_s, 1e-9))))
        found = _distinct(rows[:count])
        if self._piece_of is not None:
            pieces = [self._pieces[piece] for piece in _distinct(self._piece_of[found]).tolist()]
            ends = np.cumsum([len(piece) for piece in pieces])
            found = np.concatenate(pieces[: 1 + int(np.searchsorted(ends, count))])
            found = found[~self._taken[found]]
        self._taken[found] = True
        return as_range(found)

    def note(self, rows: RowNumbers, duration_s: float) -> None:
        """Tell the readers that rows are there, and take into account how long they took."""
        if len(rows):
            self.building.wrote(rows)
            self.serving.count += len(rows)
            for reader in [*_waiting]:
                reader.set()
            self._row_s = (self._row_s + duration_s / len(rows)) / 2


def _distinct(numbers: Integers) -> Integers:
    """The different numbers, in the order in which they come first."""
    return numbers[np.sort(np.unique(numbers, return_index=True)[1])]


#: Finds the rows of stores that are needed first, from the stores by name, of which no row is read
#: yet: turns, and rows, int64 of shape (2, rows).
Plan: TypeAlias = Callable[[Mapping[str, Store]], Mapping[str, Integers]]


class BackgroundBuild:
    """Builds stores in a thread, or goes on with interrupted builds.

    Once it is made, rows of all of them can be read. They have the same worker processes.

    Args:
        asked: By name, what is to be built.
        num_workers: Processes that read and write.
        plan: Finds the rows that are needed first.
        step_rows: Those of them that are needed together.
    """

    def __init__(
        self, asked: Mapping[str, Asked], num_workers: int, plan: Plan, step_rows: int
    ) -> None:
        self._step_rows = step_rows
        self._builds, self._locks = dict[str, _Build](), dict[str, ExitStack]()
        self._is_stopped = False
        with ExitStack() as stack:
            # In one order: two trainings that name the same stores would wait for each other.
            for name, each in sorted(asked.items(), key=lambda item: item[1].directory.path):
                check_free(each.directory.path, "`store_dir`")
                self._locks[name] = stack.enter_context(ExitStack())
                self._locks[name].enter_context(each.directory.locked())
            # Another process may have built them meanwhile.
            self._asked = {
                n: each for n, each in asked.items() if not is_store(each.directory.path)
            }
            datasets = {name: each.dataset for name, each in self._asked.items()}
            for name, dataset in datasets.items():
                # What was stored before is not read again.
                is_new = not self._asked[name].directory.unfinished(KEY)
                if is_new and not isinstance(dataset, Store) and is_read_by_item(dataset):
                    datasets[name] = ReadAhead(dataset)
            self._workers = stack.enter_context(Workers(datasets, num_workers))
            self._begin(plan)
            self._held = stack.pop_all()
        # It does not keep a program from ending: the next build goes on with its rows.
        self._thread = Thread(target=self._run, name="lightning_memmap build", daemon=True)
        self._thread.start()

    def is_building(self, name: str) -> bool:
        """Whether rows of a store are still read, or it is being finished."""
        return self._thread.is_alive() and name in self._builds

    def stop(self) -> None:
        """End: stores that have all rows are finished, others go on in the next run."""
        has_all = [each.serving.share == 1.0 for each in self._builds.values()]
        self._is_stopped = not all(has_all)
        self._thread.join(None if any(has_all) else _PATIENCE_S)
        # With its frames, an error would keep files open. Readers that are left see the lock.
        for build in self._builds.values():
            _errors.pop(build.serving.generation, None)

    def _run(self) -> None:
        """What the thread does."""
        give_way()
        try:
            with self._held:
                self._read()
        except BaseException as error:  # Whoever waits for rows must get it.
            for build in self._builds.values():
                if not build.building.is_committed:
                    _errors[build.serving.generation] = error

    def _begin(self, plan: Plan) -> None:
        """Read the probe rows, and begin all builds, or go on with them."""
        asked, planned = self._asked, dict[str, Store]()
        for name, each in asked.items():
            shards = each.shards(check_length(each.dataset))
            # Enough of a store to find an order of its rows.
            draft = Manifest.draft(shards.num_rows, shards.num_shards, _ANY_SCHEMA)
            planned[name] = Store(each.directory.path, draft, ())
        probers = {
            name: calling(read_probes, one.forms, telling_samples) for name, one in asked.items()
        }
        identities, probes = dict[str, Fingerprint](), dict[str, Probes]()
        first, ahead = dict[str, Integers](), dict[str, list[Integers]]()

        def tasks() -> Iterator[tuple[str, int]]:
            for name, store in planned.items():
                yield name, store.num_rows
            if not asked:
                return
            # While the rows are read, by others.
            self._workers.start()
            first.update(plan(planned))
            ahead.update(self._read_ahead(first))
            identities.update((name, each.identity) for name, each in asked.items())

        self._workers.run(
            partial(_Each, probers), tasks(), lambda task, found: probes.update({task[0]: found})
        )
        for name, one in asked.items():
            draft = one.draft(one.dataset, probes[name], identities[name])
            path, row_bytes = one.directory.path, probes[name].typical_bytes
            building = Building.begin(path, draft, resume=True, row_bytes=row_bytes)
            self._locks[name].enter_context(building)
            pieces = source_of(one.dataset, draft.schema).pieces()
            build = self._builds[name] = _Build(building, probes[name], pieces)
            if name in first:
                build.begin(first[name], ahead.get(name, []))

    def _read_ahead(self, first: Mapping[str, Integers]) -> dict[str, list[Integers]]:
        """Have the first step's rows read by all processes, until it is known how they are stored.

        Returns:
            The rows of each process, by store: of as many stores as it can have tasks of.
        """
        workers, found = self._workers, dict[str, list[Integers]]()
        names = [name for name in first if isinstance(workers.dataset[name], ReadAhead)]
        for name in names[:IN_HAND]:
            turns, rows = first[name]
            some, count = _distinct(rows[turns < self._step_rows]), workers.num_workers
            found[name] = [some[index::count] for index in range(count)]
            for index, share in enumerate(found[name]):
                keep = partial(_Each, {name: calling(ReadAhead.keep)})
                workers.tell(index, keep, (name, share))
        return found

    def _read(self) -> None:
        """Read and write all rows that are missing, and finish each store."""
        makers = {n: writer_of(b.building, b.probes.row_bytes) for n, b in self._builds.items()}
        make, note = partial(_Each, makers), lambda task, s: self._builds[task[0]].note(task[1], s)
        try:
            buildings = [build.building for build in self._builds.values()]
            run_writers(buildings, self._workers, make, self._tasks(), note)
            self._finish()
            if not all(each.building.is_committed for each in self._builds.values()):
                raise StoreError(f"the build of {', '.join(self._builds)} was stopped")
        except BaseException as error:
            for build in self._builds.values():
                if not (build.building.is_committed or isinstance(error, RandomDatasetError)):
                    build.building.sync()
                    # Not the error: who keeps it keeps the frames that it went through.
                    text = "%s (%s); the next run goes on with them"
                    _log.warning(text, build.building, str(error))
            raise

    def _tasks(self) -> Iterator[tuple[str, RowNumbers]]:
        """What is read next: what readers want, in turns, and then all others in their order."""
        for name, each in self._builds.items():
            yield from ((name, rows) for rows in each.ahead)
        begin = monotonic()
        while not self._is_stopped:
            found = [(*w, name) for name, each in self._builds.items() for w in each.wants()]
            # Short at first: a reader does not wait long for what was begun before it came.
            task_s = min(_TASK_S, max(_FIRST_TASK_S, (monotonic() - begin) / 10))
            if not found:
                self._finish()
                others = ((0, each.others(), name) for name, each in self._builds.items())
                found = next(([each] for each in others if len(each[1])), [])
            if not found:
                return
            _, rows, name = min(found, key=itemgetter(0))
            yield name, self._builds[name].take(rows, task_s)

    def _finish(self) -> None:
        """Make stores of the builds that have all rows. Nobody waits for others meanwhile."""
        for name, build in self._builds.items():
            if build.serving.share == 1.0 and not build.building.is_committed:
                # Training goes on meanwhile.
                build.building.finish(num_threads=1)
                self._locks[name].close()


class _Each:
    """What is made of each of several datasets, in a worker process."""

    def __init__(self, makes: Mapping[str, Any], datasets: Mapping[str, Any]) -> None:
        self._makes, self._datasets = makes, datasets
        self._made: dict[str, Callable[[Any], Any]] = {}

    def __call__(self, named: tuple[str, Any]) -> Any:
        name, task = named
        with naming(name):
            if name not in self._made:
                self._made[name] = self._makes[name](self._datasets[name])
            return self._made[name](task)


class GrowingStore(Store):
    """A store that is being built: whoever reads rows waits until they are there.

    Args:
        path: The directory.
        manifest: Its draft.
        serving: Which rows are there.
    """

    def __init__(self, path: Path, manifest: Manifest, serving: Serving) -> None:
        super().__init__(path, manifest, [])
        self.serving = serving
        self.columns = [
            Supplied(
                _GrowingItems.of_column(each, self.files, partial(self.whole_items, index))
                if isinstance(each, RaggedColumn)
                else each.open(self.files),
                serving.get,
            )
            for index, each in enumerate(manifest.columns)
        ]
        #: Of another reader than those who look at single rows meanwhile.
        self.supply = Serving(serving.generation, self.num_rows)

    def __reduce__(self) -> tuple[Any, ...]:
        return open_again, (self.path, self.manifest.generation)

    @cached_property
    @override
    def whole(self) -> Store:
        if self.serving.share < 1.0:
            _log.warning(
                "the store at %s is built first: a field is looked up in all of its rows", self.path
            )
        self.serving.wait_for_commit()
        found = open_directory(self.path, self.manifest.generation)
        for index, column in enumerate(super().provide(None, ())):
            if isinstance(column, MappedRows):  # Its pages are in this process already.
                found.columns[index] = column
        return found


def open_growing(path: Path) -> GrowingStore | None:
    """Open a store that is being built; None where none is, or a whole one is there."""
    for generation in [] if is_store(path) else StoreDirectory(path).unfinished(KEY):
        if not (generation / SERVING).is_dir():
            continue  # Nobody reads from it.
        try:
            draft = read_draft(generation, KEY)
            return GrowingStore(path, draft, Serving(generation, draft.num_rows))
        except FileNotFoundError:  # It was committed meanwhile.
            continue
        except StoreError as error:
            raise StoreError(
                f"the store at {path} is not whole yet, and its rows cannot be read before that:"
                f" {error}: wait until its build has ended, or choose another directory"
            ) from error
    return None


def open_again(path: Path, generation: str) -> Store:
    """Open a store that was being built, and may be whole by now."""
    found = open_growing(path)
    return open_directory(path, generation) if found is None else found


@dataclass(frozen=True)
class _GrowingItems(ComingItems):
    """The rows of a ragged column that is being written: pieces of files."""

    column: RaggedColumn
    files: Path
    #: By place the row's piece, the first byte in it, and its sizes.
    entries: Integers

    @classmethod
    def of_column(cls, column: RaggedColumn, files: Path, whole: Callable[[], ItemRows]) -> Self:
        """The rows of a column of the files of a build."""
        shape = column.shards.num_rows, 2 + column.field.num_variable
        entries = np.memmap(files / column.places_name, np.int64, "r", shape=shape)
        return cls.of(column.field, column.shards, whole, column, files, entries)

    @override
    def among(self, locations: Integers) -> tuple[Tensor, Located]:
        entries = self.entries[locations]
        try:
            data = np.concatenate([*self.column.joined(self.files, entries), _NO_BYTES])
        except FileNotFoundError:  # The pieces were joined, and removed.
            return self.whole().among(locations)
        # Without items, numpy's stride may be 0.
        items = torch.from_numpy(data).as_strided((len(data),), (1,)).view(self.field.dtype)
        sizes = np.ascontiguousarray(entries[:, 2:])
        located = Located(starts_of(sizes.prod(axis=1)), sizes)
        return items.view(-1, *self.field.item_shape), located
