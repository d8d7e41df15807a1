"""Stores that are trained from while they are built: rows that a reader waits for are built first.

The building process shares its journal, which has a byte for each row that is written, and a count
of these, with readers on the same machine. They request rows with files ``requested-*`` in the
directory ``requests`` of the generation.
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
from lightning_memmap.integers import Integers, items_per_row, starts_of
from lightning_memmap.schema.schema import Schema
from lightning_memmap.store.build_spec import BuildSpec, check_length
from lightning_memmap.store.building import Building, read_draft
from lightning_memmap.store.columns import VariableColumn
from lightning_memmap.store.directory import (
    DRAFT,
    JOURNAL,
    REQUESTS,
    StoreDirectory,
    check_store_path,
    is_store,
)
from lightning_memmap.store.files import TEMPORARY, is_there
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.open_columns import IndexedItems, Located, MappedRows, VariableItems
from lightning_memmap.store.probes import Probes, read_probes
from lightning_memmap.store.samples import RandomDatasetError
from lightning_memmap.store.sources.column import simplify_rows
from lightning_memmap.store.sources.source import make_source
from lightning_memmap.store.store import PendingRows, Store, open_directory
from lightning_memmap.store.workers import RowIndices, Workers, lower_priority, make_task_runner
from lightning_memmap.store.writing import make_writer, run_writers

_REQUEST = "requested-"
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
_wakeups = set[Event]()
_NO_BYTES = np.empty(0, np.uint8)
#: Schema of a draft before any row is read.
_ANY_SCHEMA = Schema.infer([torch.zeros(1)])
_log = logging.getLogger(__name__)


class SharedBuild(PendingRows):
    """The rows of a store that is being built, for one reader or for the building process.

    Args:
        generation: The generation of the store.
        num_rows: Rows of the store.
        mode: Mode in which the count of rows is opened.
    """

    def __init__(self, generation: Path, num_rows: int, mode: Literal["r", "r+"] = "r") -> None:
        self.generation = generation.resolve()
        self._directory = generation / REQUESTS
        #: By row, not 0 once it is written.
        self.is_written = np.memmap(generation / JOURNAL, np.uint8, "r", shape=num_rows)
        #: The number of rows that are written, int64 of shape (1,).
        self.num_written = np.memmap(generation / _COUNT, np.int64, mode, shape=1)
        self._request_file: Path | None = None

    @classmethod
    def make(cls, generation: Path, num_rows: int) -> "SharedBuild":
        """Start to share the rows of a build. Removes what an interrupted one has left."""
        shutil.rmtree(generation / REQUESTS, ignore_errors=True)
        # A new file, because a reader of the interrupted build may still map the old one.
        (generation / _COUNT).unlink(missing_ok=True)
        (generation / _COUNT).write_bytes(bytes(8))
        _errors.pop(generation.resolve(), None)
        shared = cls(generation, num_rows, "r+")
        shared.num_written[:] = np.count_nonzero(shared.is_written)
        (generation / REQUESTS).mkdir()  # Readers look for this directory.
        return shared

    @property
    @override
    def is_complete(self) -> bool:
        # A build has its journal until it is committed or removed.
        self.raise_if_failed()
        return not is_there(self.generation / JOURNAL)

    @property
    @override
    def progress(self) -> float:
        return int(self.num_written[0]) / len(self.is_written)

    def request_files(self) -> list[Path]:
        """List the files with the requests of all readers. A file never changes."""
        return list(self._directory.glob(f"{_REQUEST}*"))

    @override
    def request(self, rows: Integers, priorities: Integers | None = None) -> None:
        name = secrets.token_hex(8)
        priorities = np.arange(len(rows)) if priorities is None else priorities
        with suppress(FileNotFoundError):  # The store has just been committed.
            (self._directory / name).write_bytes(np.stack([priorities, rows]).tobytes())
            previous = self._request_file
            self._request_file = self._directory / f"{_REQUEST}{name}"
            (self._directory / name).rename(self._request_file)
            if previous is not None:
                previous.unlink(missing_ok=True)

    @override
    def wait(self, rows: Integers) -> None:
        self._wait(lambda: bool(self.is_written.take(rows).all()))

    @override
    def close(self) -> None:
        if self._request_file is not None:
            self._request_file.unlink(missing_ok=True)
            self._request_file = None

    def wait_for_commit(self) -> None:
        """Block until the store is committed."""
        self._wait(lambda: self.is_complete)

    def raise_if_failed(self) -> None:
        """Raise the error of the build if it has failed in this process."""
        if (error := _errors.get(self.generation)) is not None:
            raise error

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        has_written = Event()
        checked_s = monotonic()
        poll_s = _POLL_S
        _wakeups.add(has_written)
        try:
            while not is_ready():
                self.raise_if_failed()
                if monotonic() - checked_s > _ALIVE_CHECK_S:
                    checked_s = monotonic()
                    self._check_alive()
                # Other processes cannot signal us, so poll.
                has_written.wait(poll_s)
                has_written.clear()
                poll_s = min(2 * poll_s, _LONGEST_POLL_S)
        finally:
            _wakeups.remove(has_written)

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

    def __init__(self, building: Building, probes: Probes, row_group_of: Integers | None) -> None:
        self.building = building
        self.make_writer = make_writer(building, probes.row_bytes)
        num_rows = building.draft.num_rows
        self.shared = SharedBuild.make(building.path, num_rows)
        self._is_assigned = self.shared.is_written != 0
        self._first_unassigned = 0
        self._row_s = probes.row_s
        self._max_rows = max(1, _TASK_BYTES // max(1, probes.row_bytes))
        #: By file, a reader's request: priorities and rows, int64 of shape (2, rows).
        self._requests: dict[Path, Integers] = {}
        #: By row, its row group, if files are read one row group at a time.
        self._row_group_of = row_group_of
        #: The rows of each row group.
        self._row_groups = dict[int, Integers]()
        if row_group_of is not None:
            order = np.argsort(row_group_of, kind="stable")
            groups = np.split(order, np.flatnonzero(np.diff(row_group_of[order])) + 1)
            self._row_groups = {int(row_group_of[rows[0]]): rows for rows in groups}

    def requested_rows(self) -> list[tuple[int, Integers]]:
        """List the rows that each reader requests and no task has, with the first priority."""
        previous = self._requests
        self._requests = {}
        for path in self.shared.request_files():
            with suppress(FileNotFoundError):  # Its reader has just replaced it.
                request = previous.get(path)
                if request is None:
                    request = np.fromfile(path, np.int64).reshape(2, -1)
                self._requests[path] = request.compress(~self._is_assigned[request[1]], axis=1)
        requests = self._requests.values()
        return [(int(priorities[0]), rows) for priorities, rows in requests if len(rows)]

    def next_rows(self) -> Integers:
        """Return the next rows that no task has, whether they are requested or not."""
        self._first_unassigned += int(self._is_assigned[self._first_unassigned :].argmin())
        is_assigned = self._is_assigned[self._first_unassigned :][: self._max_rows]
        return self._first_unassigned + np.flatnonzero(~is_assigned)

    def assign_task(self, rows: Integers, task_s: float) -> RowIndices:
        """Make a task of the first of some rows: as many as can be read in a time.

        If files are read one row group at a time, the task has all rows of a row group.
        """
        num_rows = max(1, min(self._max_rows, int(task_s / max(self._row_s, 1e-9))))
        task = _distinct(rows[:num_rows])
        if self._row_group_of is not None:
            groups = [self._row_groups[g] for g in _distinct(self._row_group_of[task]).tolist()]
            stops = np.cumsum([len(group) for group in groups])
            task = np.concatenate(groups[: 1 + int(np.searchsorted(stops, num_rows))])
            task = task[~self._is_assigned[task]]
        self._is_assigned[task] = True
        return simplify_rows(task)

    def record_written(self, rows: RowIndices, duration_s: float) -> None:
        """Wake the readers, because rows are written, and update the time that a row takes."""
        if len(rows):
            self.building.mark_written(rows)
            self.shared.num_written += len(rows)
            for wakeup in [*_wakeups]:
                wakeup.set()
            self._row_s = (self._row_s + duration_s / len(rows)) / 2


def _distinct(integers: Integers) -> Integers:
    """Return the distinct integers, in the order in which they first occur."""
    return integers[np.sort(np.unique(integers, return_index=True)[1])]


#: Finds the rows that are needed first, from stores by name without rows: for each, their
#: priorities over all stores and the rows, int64 of shape (2, rows).
FindUrgentRows: TypeAlias = Callable[[Mapping[str, Store]], Mapping[str, Integers]]


class BackgroundBuild:
    """Builds stores in a thread, or resumes interrupted builds.

    Once the constructor returns, rows of all of them can be read. They share worker processes.

    Args:
        specs: The stores to build, by name.
        num_workers: Processes that read and write.
        find_urgent_rows: Finds the rows that are needed first.
    """

    def __init__(
        self, specs: Mapping[str, BuildSpec], num_workers: int, find_urgent_rows: FindUrgentRows
    ) -> None:
        self._builds = dict[str, _Build]()
        self._locks = dict[str, ExitStack]()
        self._is_stopped = False
        with ExitStack() as stack:
            # In one order: else two trainings that name the same stores would deadlock.
            for name, spec in sorted(specs.items(), key=lambda item: item[1].directory.path):
                check_store_path(spec.directory.path, "`store_dir`")
                self._locks[name] = stack.enter_context(ExitStack())
                self._locks[name].enter_context(spec.directory.locked())
            # Another process may have built them while we waited.
            specs = {name: spec for name, spec in specs.items() if not spec.is_built}
            datasets = {name: spec.dataset for name, spec in specs.items()}
            self._workers = stack.enter_context(Workers(datasets, num_workers))
            if specs:
                self._begin(specs, find_urgent_rows)
            self._resources = stack.pop_all()
        # A daemon doesn't keep a program from ending: the next build resumes.
        self._thread = Thread(target=self._run, name="lightning_memmap build", daemon=True)
        self._thread.start()

    def is_building(self, name: str) -> bool:
        """Return whether the thread still runs, and a store is one of those that it builds."""
        return self._thread.is_alive() and name in self._builds

    def stop(self) -> None:
        """Commit the stores that have all rows, and leave the others to the next run."""
        are_complete = [build.shared.has_all_rows for build in self._builds.values()]
        self._is_stopped = not all(are_complete)
        self._thread.join(None if any(are_complete) else _PATIENCE_S)
        # The frames of an error would keep files open. Remaining readers check the lock.
        for build in self._builds.values():
            _errors.pop(build.shared.generation, None)

    def _begin(self, specs: Mapping[str, BuildSpec], find_urgent_rows: FindUrgentRows) -> None:
        """Read the probe rows, and begin or resume all builds."""
        draft_stores = {name: _make_draft_store(spec) for name, spec in specs.items()}
        self._workers.start()
        urgent_rows = find_urgent_rows(draft_stores)
        for spec in specs.values():
            spec.fix_identity()
        all_probes = self._read_probes(specs, draft_stores)
        for name, spec in specs.items():
            probes = all_probes[name]
            draft = spec.draft(draft_stores[name].num_rows, probes)
            path = spec.directory.path
            building = Building.begin(path, draft, resume=True, row_bytes=probes.typical_bytes)
            self._locks[name].enter_context(building)
            row_group_of = make_source(spec.dataset, draft.schema).row_groups()
            self._builds[name] = _Build(building, probes, row_group_of)
            if name in urgent_rows:
                priorities, rows = urgent_rows[name]
                self._builds[name].shared.request(rows, priorities)

    def _read_probes(
        self, specs: Mapping[str, BuildSpec], stores: Mapping[str, Store]
    ) -> dict[str, Probes]:
        probes = dict[str, Probes]()

        def receive(task: tuple[str, int], read: Probes) -> None:
            probes[task[0]] = read

        makers = {
            name: make_task_runner(read_probes, spec.declared) for name, spec in specs.items()
        }
        tasks = [(name, store.num_rows) for name, store in stores.items()]
        self._workers.run(partial(_PerDatasetTasks, makers), tasks, receive)
        return probes

    def _run(self) -> None:
        """Write all rows, and pass an error to the readers."""
        lower_priority()
        try:
            with self._resources:
                self._write_and_commit()
        except BaseException as error:  # A reader that waits must get any error.
            for build in self._builds.values():
                if not build.building.is_committed:
                    _errors[build.shared.generation] = error

    def _write_and_commit(self) -> None:
        """Read and write all rows that are missing, and commit each store."""
        makers = {name: build.make_writer for name, build in self._builds.items()}

        def receive(task: tuple[str, RowIndices], duration_s: float) -> None:
            name, rows = task
            self._builds[name].record_written(rows, duration_s)

        try:
            buildings = [build.building for build in self._builds.values()]
            make = partial(_PerDatasetTasks, makers)
            run_writers(buildings, self._workers, make, self._tasks(), receive)
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

    def _tasks(self) -> Iterator[tuple[str, RowIndices]]:
        """Yield the rows to read next: requested ones by priority, then all others in order."""
        start_s = monotonic()
        while not self._is_stopped:
            requests = [
                (priority, rows, name)
                for name, build in self._builds.items()
                for priority, rows in build.requested_rows()
            ]
            # Short at first, so that a new reader doesn't wait for a long task.
            task_s = min(_TASK_S, max(_FIRST_TASK_S, (monotonic() - start_s) / 10))
            if not requests:
                self._commit()
                unrequested = ((0, build.next_rows(), name) for name, build in self._builds.items())
                requests = next(([task] for task in unrequested if len(task[1])), [])
            if not requests:
                return
            _, rows, name = min(requests, key=itemgetter(0))
            yield name, self._builds[name].assign_task(rows, task_s)

    def _commit(self) -> None:
        """Commit every build that has all its rows. Called only while no reader is waiting."""
        for name, build in self._builds.items():
            if build.shared.has_all_rows and not build.building.is_committed:
                # One thread, because training runs at the same time.
                build.building.finish(num_threads=1)
                self._locks[name].close()


def _make_draft_store(spec: BuildSpec) -> Store:
    """Make a store without rows, which is enough to compute an order of its rows."""
    shards = spec.shards(check_length(spec.dataset))
    draft = Manifest.draft(shards.num_rows, shards.num_shards, _ANY_SCHEMA)
    return Store(spec.directory.path, draft, ())


class _PerDatasetTasks:
    """Runs tasks of several datasets in a worker process, each with a function of its dataset."""

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
        shared_build: The rows that are written.
    """

    _is_readable = False

    def __init__(self, path: Path, manifest: Manifest, shared_build: SharedBuild) -> None:
        super().__init__(path, manifest, [])
        self.shared_build = shared_build
        for column in manifest.columns:
            self.mapped_columns.append(
                _GrowingItems.of(column, self)
                if isinstance(column, VariableColumn)
                else column.open(self.files)
            )
        #: For loaders. Those who read single rows at the same time replace other requests.
        self.pending = SharedBuild(shared_build.generation, self.num_rows)

    def __reduce__(self) -> tuple[Any, ...]:
        return open_again, (self.path, self.manifest.generation)

    @override
    def _make_readable(self, rows: Integers, field: str | None = None) -> None:
        self.shared_build.request(rows)
        self.shared_build.wait(rows)

    @override
    def completed(self) -> Store:
        return self._completed

    @cached_property
    def _completed(self) -> Store:
        if not self.shared_build.has_all_rows:
            _log.warning(
                "the store at %s is built first, because all rows of a field are needed", self.path
            )
        self.shared_build.wait_for_commit()
        store = open_directory(self.path, self.manifest.generation)
        for index, column in enumerate(self.mapped_columns):
            if isinstance(column, MappedRows):  # Its pages are in this process already.
                store.mapped_columns[index] = column
        return store


def open_growing(path: Path) -> GrowingStore | None:
    """Open a store that is being built. Return None if there is none, or a committed store."""
    for generation in [] if is_store(path) else StoreDirectory(path).unfinished(DRAFT):
        if not (generation / REQUESTS).is_dir():
            continue  # A build that shares no rows.
        try:
            draft = read_draft(generation, DRAFT)
            return GrowingStore(path, draft, SharedBuild(generation, draft.num_rows))
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
class _GrowingItems(VariableItems):
    """A field whose rows differ in length, while its rows are written to one file per writer."""

    column: VariableColumn
    store: GrowingStore
    #: By file row: the writer, the first byte in its file, and the sizes of the row.
    locations: Integers

    @classmethod
    def of(cls, column: VariableColumn, store: GrowingStore) -> Self:
        """Open the column of a store that is being built."""
        shape = column.shards.num_rows, 2 + column.field.num_variable
        locations = np.memmap(store.files / column.locations_name, np.int64, "r", shape=shape)
        return cls(column.field, column.shards.file_rows, column, store, locations)

    @override
    def items_and_ranges(self, file_rows: Integers) -> tuple[Tensor, Located]:
        locations = self.locations[file_rows]
        try:
            gathered = self.column.gather_rows(self.store.files, locations)
            data = np.concatenate([*gathered, _NO_BYTES])
        except FileNotFoundError:  # The build was committed, and these files were removed.
            column = self.store.completed().column(self.field.name)
            assert isinstance(column, IndexedItems)
            return column.items_and_ranges(file_rows)
        # The stride of an empty numpy array may be 0.
        items = torch.from_numpy(data).as_strided((len(data),), (1,)).view(self.field.dtype)
        sizes = np.ascontiguousarray(locations[:, 2:])
        located = Located(starts_of(items_per_row(sizes)), sizes)
        return items.view(-1, *self.field.item_shape), located
