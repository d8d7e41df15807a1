"""Stores that are trained from while they are built: rows that a reader waits for are built first.

The building process shares its journal, which has a byte for each row that is written, and a count
of these, with readers on the same machine. They request rows with files ``requested-*`` in the
directory ``serving`` of the generation.
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

from lightning_memmap.errors import StoreError, split_in_errors
from lightning_memmap.integers import Integers, starts_of
from lightning_memmap.schema.schema import Schema
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
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.open_columns import ItemRows, Located, MappedRows, RaggedRows
from lightning_memmap.store.probes import Probes, read_probes
from lightning_memmap.store.request import BuildRequest, check_length
from lightning_memmap.store.samples import RandomDatasetError
from lightning_memmap.store.sources.column import simplify_rows
from lightning_memmap.store.sources.source import make_source
from lightning_memmap.store.store import PendingRows, Store, open_directory
from lightning_memmap.store.workers import RowNumbers, Workers, give_way, make_task_runner
from lightning_memmap.store.writing import make_writer, run_writers

_REQUESTED = "requested-"
_COUNT = f"count{TEMPORARY}"
#: Duration of the first tasks, which readers may wait for, and of later ones.
_FIRST_TASK_S = 0.005
_TASK_S = 0.05
#: Most bytes of rows in a task.
_TASK_BYTES = 32 * 2**20
#: A waiting reader polls at growing intervals between these two.
_POLL_S = 0.0005
_LONGEST_POLL_S = 0.005
#: How often a waiting reader checks that the building process is alive.
_ALIVE_CHECK_S = 1.0
#: How long `BackgroundBuild.stop` waits for rows that are being read.
_PATIENCE_S = 60.0
#: Errors of builds of this process that failed, by generation.
_errors: dict[Path, BaseException] = {}
#: Set whenever rows are written, one for each waiting reader of this process.
_waiting = set[Event]()
_NO_BYTES = np.empty(0, np.uint8)
#: Schema of a draft before any row is read.
_ANY_SCHEMA = Schema.infer([torch.zeros(1)])
_log = logging.getLogger(__name__)


class Serving(PendingRows):
    """The rows of a store that is being built, for one reader or for the building process.

    Args:
        generation: The generation of the store.
        num_rows: Rows of the store.
        mode: Mode in which the count of rows is opened.
    """

    def __init__(self, generation: Path, num_rows: int, mode: Literal["r", "r+"] = "r") -> None:
        self.generation = generation.resolve()
        self.path = generation / SERVING
        #: By row, not 0 once it is written.
        self.present = np.memmap(generation / JOURNAL, np.uint8, "r", shape=num_rows)
        #: The number of rows that are written, int64 of shape (1,).
        self.count = np.memmap(generation / _COUNT, np.int64, mode, shape=1)
        self._request: Path | None = None

    @classmethod
    def make(cls, generation: Path, num_rows: int) -> "Serving":
        """Start to share the rows of a build. Removes what an interrupted one has left."""
        path = generation / SERVING
        shutil.rmtree(path, ignore_errors=True)
        # A new file, because a reader of the interrupted build may still map the old one.
        (generation / _COUNT).unlink(missing_ok=True)
        (generation / _COUNT).write_bytes(bytes(8))
        _errors.pop(generation.resolve(), None)
        serving = cls(generation, num_rows, "r+")
        serving.count[:] = np.count_nonzero(serving.present)
        path.mkdir()  # Readers look for this directory.
        return serving

    @property
    @override
    def is_complete(self) -> bool:
        # A build has its journal until it is committed or removed.
        self.check()
        return not is_there(self.generation / JOURNAL)

    @property
    @override
    def progress(self) -> float:
        return int(self.count[0]) / len(self.present)

    def requests(self) -> list[Path]:
        """List the files with the requests of all readers. A file never changes."""
        return list(self.path.glob(f"{_REQUESTED}*"))

    @override
    def request(self, rows: Integers, ranks: Integers | None = None) -> None:
        name = secrets.token_hex(8)
        ranks = np.arange(len(rows)) if ranks is None else ranks
        with suppress(FileNotFoundError):  # The store has just been committed.
            (self.path / name).write_bytes(np.stack([ranks, rows]).tobytes())
            previous = self._request
            self._request = self.path / f"{_REQUESTED}{name}"
            (self.path / name).rename(self._request)
            if previous is not None:
                previous.unlink(missing_ok=True)

    @override
    def wait(self, rows: Integers) -> None:
        self._wait(lambda: bool(self.present.take(rows).all()))

    @override
    def close(self) -> None:
        if self._request is not None:
            self._request.unlink(missing_ok=True)
            self._request = None

    def wait_for_commit(self) -> None:
        """Block until the store is committed."""
        self._wait(lambda: self.is_complete)

    def check(self) -> None:
        """Raise the error of the build if it has failed in this process."""
        if (error := _errors.get(self.generation)) is not None:
            raise error

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        has_written = Event()
        checked_s = monotonic()
        poll_s = _POLL_S
        _waiting.add(has_written)
        try:
            while not is_ready():
                self.check()
                if monotonic() - checked_s > _ALIVE_CHECK_S:
                    checked_s = monotonic()
                    self._check_alive()
                # Other processes cannot signal us, so poll.
                has_written.wait(poll_s)
                has_written.clear()
                poll_s = min(2 * poll_s, _LONGEST_POLL_S)
        finally:
            _waiting.remove(has_written)

    def _check_alive(self) -> None:
        """Check that a process builds the store: it holds the lock of the journal."""
        directory = self.generation.parent
        try:
            with open(self.generation / JOURNAL, "rb+") as journal:
                fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:  # It has just been committed or removed.
            if is_store(directory) and Manifest.read(directory).generation == self.generation.name:
                return
        except OSError:  # Another process holds the lock.
            return
        raise StoreError(
            f"the process that builds the store at {directory} has ended; the output of local rank"
            " 0 has its error. Start again: the build continues with the rows that are written."
        )


class _Build:
    """One of the stores that are built together: its rows, and the order in which to read them."""

    def __init__(self, building: Building, probes: Probes, group_of: Integers | None) -> None:
        self.building = building
        self.probes = probes
        num_rows = building.draft.num_rows
        self.serving = Serving.make(building.path, num_rows)
        self._is_taken = self.serving.present != 0
        self._row_s = probes.row_s
        self._first_untaken = 0
        self._max_rows = max(1, _TASK_BYTES // max(1, probes.row_bytes))
        #: By file, a reader's request: ranks and rows, int64 of shape (2, rows).
        self._requests: dict[Path, Integers] = {}
        #: By row, the group of rows of a file that it is read with, such as a Parquet row group.
        self._group_of = group_of
        #: The rows of each group.
        self._groups = dict[int, Integers]()
        if group_of is not None:
            order = np.argsort(group_of, kind="stable")
            groups = np.split(order, np.flatnonzero(np.diff(group_of[order])) + 1)
            self._groups = {int(group_of[rows[0]]): rows for rows in groups}

    def requests(self) -> list[tuple[int, Integers]]:
        """List the rows that each reader requests and no task has, with the rank of the first."""
        previous = self._requests
        self._requests = {}
        for path in self.serving.requests():
            with suppress(FileNotFoundError):  # Its reader has just replaced it.
                request = previous.get(path)
                if request is None:
                    request = np.fromfile(path, np.int64).reshape(2, -1)
                self._requests[path] = request.compress(~self._is_taken[request[1]], axis=1)
        return [(int(ranks[0]), rows) for ranks, rows in self._requests.values() if len(rows)]

    def unrequested(self) -> Integers:
        """Return the next rows that no task has, whether they are requested or not."""
        self._first_untaken += int(self._is_taken[self._first_untaken :].argmin())
        is_taken = self._is_taken[self._first_untaken :][: self._max_rows]
        return self._first_untaken + np.flatnonzero(~is_taken)

    def take(self, rows: Integers, task_s: float) -> RowNumbers:
        """Make a task of the first of some rows: as many as can be read in a time.

        If they are read in groups, the task has all rows of a group.
        """
        num_rows = max(1, min(self._max_rows, int(task_s / max(self._row_s, 1e-9))))
        task = _distinct(rows[:num_rows])
        if self._group_of is not None:
            groups = [self._groups[group] for group in _distinct(self._group_of[task]).tolist()]
            stops = np.cumsum([len(group) for group in groups])
            task = np.concatenate(groups[: 1 + int(np.searchsorted(stops, num_rows))])
            task = task[~self._is_taken[task]]
        self._is_taken[task] = True
        return simplify_rows(task)

    def note(self, rows: RowNumbers, duration_s: float) -> None:
        """Wake the readers, because rows are written, and update the time that a row takes."""
        if len(rows):
            self.building.wrote(rows)
            self.serving.count += len(rows)
            for reader in [*_waiting]:
                reader.set()
            self._row_s = (self._row_s + duration_s / len(rows)) / 2


def _distinct(integers: Integers) -> Integers:
    """Return the distinct integers, in the order in which they first occur."""
    return integers[np.sort(np.unique(integers, return_index=True)[1])]


#: Finds the rows that are needed first, from stores by name without rows: for each, their ranks
#: over all stores and the rows, int64 of shape (2, rows).
Plan: TypeAlias = Callable[[Mapping[str, Store]], Mapping[str, Integers]]


class BackgroundBuild:
    """Builds stores in a thread, or resumes interrupted builds.

    Once the constructor returns, rows of all of them can be read. They share worker processes.

    Args:
        requests: The stores to build, by name.
        num_workers: Processes that read and write.
        plan: Finds the rows that are needed first.
    """

    def __init__(self, requests: Mapping[str, BuildRequest], num_workers: int, plan: Plan) -> None:
        self._builds = dict[str, _Build]()
        self._locks = dict[str, ExitStack]()
        self._is_stopped = False
        with ExitStack() as stack:
            # In one order: else two trainings that name the same stores would deadlock.
            for name, request in sorted(requests.items(), key=lambda item: item[1].directory.path):
                check_free(request.directory.path, "`store_dir`")
                self._locks[name] = stack.enter_context(ExitStack())
                self._locks[name].enter_context(request.directory.locked())
            # Another process may have built them while we waited.
            self._requests = {
                name: request
                for name, request in requests.items()
                if not is_store(request.directory.path)
            }
            datasets = {name: request.dataset for name, request in self._requests.items()}
            self._workers = stack.enter_context(Workers(datasets, num_workers))
            self._begin(plan)
            self._resources = stack.pop_all()
        # A daemon doesn't keep a program from ending: the next build resumes.
        self._thread = Thread(target=self._run, name="lightning_memmap build", daemon=True)
        self._thread.start()

    def is_building(self, name: str) -> bool:
        """Return whether rows of a store are still read, or it is being committed."""
        return self._thread.is_alive() and name in self._builds

    def stop(self) -> None:
        """Commit the stores that have all rows, and leave the others to the next run."""
        has_all = [build.serving.progress == 1.0 for build in self._builds.values()]
        self._is_stopped = not all(has_all)
        self._thread.join(None if any(has_all) else _PATIENCE_S)
        # The frames of an error would keep files open. Remaining readers check the lock.
        for build in self._builds.values():
            _errors.pop(build.serving.generation, None)

    def _run(self) -> None:
        """Read all rows, and pass an error to the readers."""
        give_way()
        try:
            with self._resources:
                self._read()
        except BaseException as error:  # A reader that waits must get any error.
            for build in self._builds.values():
                if not build.building.is_committed:
                    _errors[build.serving.generation] = error

    def _begin(self, plan: Plan) -> None:
        """Read the probe rows, and begin or resume all builds."""
        requests = self._requests
        planned = dict[str, Store]()
        for name, request in requests.items():
            shards = request.shards(check_length(request.dataset))
            # Enough of a store to compute an order of its rows.
            draft = Manifest.draft(shards.num_rows, shards.num_shards, _ANY_SCHEMA)
            planned[name] = Store(request.directory.path, draft, ())
        probers = {
            name: make_task_runner(read_probes, request.declared)
            for name, request in requests.items()
        }
        if not requests:
            return
        self._workers.start()
        first = plan(planned)
        identities = {name: request.identity for name, request in requests.items()}
        probes = dict[str, Probes]()
        tasks = [(name, store.num_rows) for name, store in planned.items()]
        self._workers.run(
            partial(_ByName, probers), tasks, lambda task, read: probes.update({task[0]: read})
        )
        for name, request in requests.items():
            draft = request.draft(request.dataset, probes[name], identities[name])
            path = request.directory.path
            row_bytes = probes[name].typical_bytes
            building = Building.begin(path, draft, resume=True, row_bytes=row_bytes)
            self._locks[name].enter_context(building)
            group_of = make_source(request.dataset, draft.schema).row_groups()
            build = self._builds[name] = _Build(building, probes[name], group_of)
            if name in first:
                ranks, rows = first[name]
                build.serving.request(rows, ranks)

    def _read(self) -> None:
        """Read and write all rows that are missing, and commit each store."""
        writers = {
            name: make_writer(build.building, build.probes.row_bytes)
            for name, build in self._builds.items()
        }

        def note(task: tuple[str, RowNumbers], duration_s: float) -> None:
            name, rows = task
            self._builds[name].note(rows, duration_s)

        try:
            buildings = [build.building for build in self._builds.values()]
            make = partial(_ByName, writers)
            run_writers(buildings, self._workers, make, self._tasks(), note)
            self._commit()
            if not all(building.is_committed for building in buildings):
                raise StoreError(f"the build of {', '.join(self._builds)} was stopped")
        except BaseException as error:
            for build in self._builds.values():
                if not (build.building.is_committed or isinstance(error, RandomDatasetError)):
                    build.building.sync()
                    # The text only: the error would keep the frames of its traceback alive.
                    text = "%s (%s); the next run resumes it"
                    _log.warning(text, build.building, str(error))
            raise

    def _tasks(self) -> Iterator[tuple[str, RowNumbers]]:
        """Yield the rows to read next: requested ones by rank, and then all others in order."""
        begin_s = monotonic()
        while not self._is_stopped:
            requests = [
                (rank, rows, name)
                for name, build in self._builds.items()
                for rank, rows in build.requests()
            ]
            # Short at first, so that a new reader doesn't wait for a long task.
            task_s = min(_TASK_S, max(_FIRST_TASK_S, (monotonic() - begin_s) / 10))
            if not requests:
                self._commit()
                unrequested = (
                    (0, build.unrequested(), name) for name, build in self._builds.items()
                )
                requests = next(([task] for task in unrequested if len(task[1])), [])
            if not requests:
                return
            _, rows, name = min(requests, key=itemgetter(0))
            yield name, self._builds[name].take(rows, task_s)

    def _commit(self) -> None:
        """Commit every build that has all its rows. Called only while no reader is waiting."""
        for name, build in self._builds.items():
            if build.serving.progress == 1.0 and not build.building.is_committed:
                # One thread, because training runs at the same time.
                build.building.finish(num_threads=1)
                self._locks[name].close()


class _ByName:
    """Calls a function that is made once for each of several datasets, in a worker process."""

    def __init__(self, makers: Mapping[str, Any], datasets: Mapping[str, Any]) -> None:
        self._makers = makers
        self._datasets = datasets
        self._functions: dict[str, Callable[[Any], Any]] = {}

    def __call__(self, task: tuple[str, Any]) -> Any:
        name, argument = task
        with split_in_errors(name):
            if name not in self._functions:
                self._functions[name] = self._makers[name](self._datasets[name])
            return self._functions[name](argument)


class GrowingStore(Store):
    """A store that is being built.

    Args:
        path: The directory.
        manifest: Its draft.
        serving: The rows that are written.
    """

    _is_readable = False

    def __init__(self, path: Path, manifest: Manifest, serving: Serving) -> None:
        super().__init__(path, manifest, [])
        self.serving = serving
        for column in manifest.columns:
            self.mapped_columns.append(
                _GrowingItems.of(column, self)
                if isinstance(column, RaggedColumn)
                else column.open(self.files)
            )
        #: For loaders. Those who read single rows at the same time replace other requests.
        self.pending = Serving(serving.generation, self.num_rows)

    def __reduce__(self) -> tuple[Any, ...]:
        return open_again, (self.path, self.manifest.generation)

    @override
    def _make_readable(self, rows: Integers, field: str | None = None) -> None:
        self.serving.request(rows)
        self.serving.wait(rows)

    @override
    def completed(self) -> Store:
        return self._completed

    @cached_property
    def _completed(self) -> Store:
        if self.serving.progress < 1.0:
            _log.warning(
                "the store at %s is built first, because all rows of a field are needed", self.path
            )
        self.serving.wait_for_commit()
        store = open_directory(self.path, self.manifest.generation)
        for index, column in enumerate(self.mapped_columns):
            if isinstance(column, MappedRows):  # Its pages are in this process already.
                store.mapped_columns[index] = column
        return store


def open_growing(path: Path) -> GrowingStore | None:
    """Open a store that is being built. Return None if there is none, or a committed store."""
    for generation in [] if is_store(path) else StoreDirectory(path).unfinished(KEY):
        if not (generation / SERVING).is_dir():
            continue  # A build that shares no rows.
        try:
            draft = read_draft(generation, KEY)
            return GrowingStore(path, draft, Serving(generation, draft.num_rows))
        except FileNotFoundError:  # It has just been committed.
            continue
        except StoreError as error:
            raise StoreError(
                f"the store at {path} is still being built, and its rows cannot be read before"
                f" the end: {error}. Wait for its build, or choose another directory."
            ) from error
    return None


def open_again(path: Path, generation: str) -> Store:
    """Open a store that was being built and may be committed since."""
    growing = open_growing(path)
    return open_directory(path, generation) if growing is None else growing


@dataclass(frozen=True)
class _GrowingItems(RaggedRows):
    """A field whose rows differ in length, while its rows are written to one file per writer."""

    column: RaggedColumn
    store: GrowingStore
    #: By file row: the writer, the first byte in its file, and the sizes of the row.
    entries: Integers

    @classmethod
    def of(cls, column: RaggedColumn, store: GrowingStore) -> Self:
        """Open the column of a store that is being built."""
        shape = column.shards.num_rows, 2 + column.field.num_variable
        entries = np.memmap(store.files / column.entries_name, np.int64, "r", shape=shape)
        return cls(column.field, column.shards.file_rows, column, store, entries)

    @override
    def among(self, file_rows: Integers) -> tuple[Tensor, Located]:
        entries = self.entries[file_rows]
        try:
            data = np.concatenate([*self.column.joined(self.store.files, entries), _NO_BYTES])
        except FileNotFoundError:  # The build was committed, and these files were removed.
            column = self.store.completed().column(self.field.name)
            assert isinstance(column, ItemRows)
            return column.among(file_rows)
        # The stride of an empty numpy array may be 0.
        items = torch.from_numpy(data).as_strided((len(data),), (1,)).view(self.field.dtype)
        sizes = np.ascontiguousarray(entries[:, 2:])
        located = Located(starts_of(sizes.prod(axis=1)), sizes)
        return items.view(-1, *self.field.item_shape), located
