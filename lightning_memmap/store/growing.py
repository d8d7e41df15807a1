"""A store that is trained from while it is built: a thread has rows read in the order in which they
are needed, ahead of their readers, and those that nobody needs when there is nothing else to do.
"""

import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from threading import Event, Lock, Thread
from time import monotonic, sleep
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from lightning_memmap.errors import StoreError
from lightning_memmap.sampling import Integers
from lightning_memmap.schema import Values
from lightning_memmap.store.build import Asked
from lightning_memmap.store.building import ORDER, Building, explained, read_draft
from lightning_memmap.store.columns import RaggedColumn
from lightning_memmap.store.directory import KEY, StoreDirectory, check_free, is_store
from lightning_memmap.store.files import open_plain, read_exactly
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.open_columns import ItemRows, Located, MappedRows, OpenColumn
from lightning_memmap.store.range_writer import RowNumbers, write_dataset
from lightning_memmap.store.samples import Probes
from lightning_memmap.store.serving import Serving, Wanted
from lightning_memmap.store.store import Store, open_directory
from lightning_memmap.store.workers import Workers

#: Work of the first tasks, of one while a reader waits, and of others; the most bytes of its rows.
_FIRST_TASK_S, _SHORT_TASK_S, _TASK_S, _TASK_BYTES = 0.005, 0.02, 0.1, 32 * 2**20
#: Rows among which those that nobody asks for are looked up at once.
_LOOKUP_ROWS = 2**18
#: How long a pause lasts, and how long `stop` waits for rows that are being read.
_PAUSE_S, _PATIENCE_S = 0.02, 60.0
_log = logging.getLogger(__name__)


class BuildStoppedError(StoreError):
    """A build in the background was stopped. The next one goes on with its rows."""


class _Queue:
    """Which rows are read next: what readers want, in turns, and then all others in their order."""

    def __init__(
        self, build: "BackgroundBuild", serving: Serving, manifest: Manifest, probes: Probes
    ):
        self._build, self._serving, self._shards = build, serving, manifest.shards
        self._row_s = probes.row_s
        self._max_rows = max(1, _TASK_BYTES // max(1, probes.row_bytes))
        self._taken = np.zeros(manifest.num_rows, np.bool_)
        self._taken[self._shards.rows_at(np.flatnonzero(serving.present))] = True
        self._wants: dict[Path, Integers] = {}
        self._begin = monotonic()
        self._turn = self._num_others = self._num_begun = self._num_read = 0

    def __iter__(self) -> Iterator[Integers]:
        while not self._build.is_stopped:
            if self._build.must_pause(self._serving):
                # While this sleeps, what was read is not received.
                if self._num_begun == self._num_read:
                    sleep(_PAUSE_S)
                else:
                    yield np.empty(0, np.int64)
                continue
            if not len(rows := self._next()):
                return
            self._num_begun += len(rows)
            yield rows

    def note(self, rows: RowNumbers, duration_s: float) -> None:
        """Tell the readers that rows are there, and take into account how long they took."""
        self._serving.present[self._shards.locate(np.asarray(rows))] = 1
        self._row_s = (self._row_s + duration_s / len(rows)) / 2
        self._num_read += len(rows)

    def _next(self) -> Integers:
        """The rows that are read next; none where all are taken."""
        self._look()
        # Short at first: the first reader does not wait long for what was begun before it came.
        task_s = min(_TASK_S, max(_FIRST_TASK_S, (monotonic() - self._begin) / 10))
        if self._serving.is_waited_for:
            task_s = min(task_s, _SHORT_TASK_S)
        wants = [rows for rows in self._wants.values() if len(rows)]
        self._turn += 1
        found = wants[self._turn % len(wants)] if wants else self._others()
        found = found[: max(1, min(self._max_rows, int(task_s / max(self._row_s, 1e-9))))]
        self._taken[found] = True
        return found

    def _others(self) -> Integers:
        """Some of the rows that nobody has asked for."""
        while self._num_others < len(self._taken):
            found = np.flatnonzero(~self._taken[self._num_others :][:_LOOKUP_ROWS])
            if len(found):
                return found + self._num_others
            self._num_others += _LOOKUP_ROWS
        return np.empty(0, np.int64)

    def _look(self) -> None:
        """Read what readers have said since the last time, and leave out what is taken."""
        known, self._wants = self._wants, {}
        for path in self._serving.wanted():
            with suppress(FileNotFoundError):  # Its reader has just said something else.
                rows = known[path] if path in known else self._read(path)
                self._wants[path] = rows[~self._taken[rows]]

    def _read(self, path: Path) -> Integers:
        rows = self._shards.rows_at(np.fromfile(path, np.int64))
        return rows[np.sort(np.unique(rows, return_index=True)[1])]


class SharedWorkers(Workers):
    """Processes that read the datasets of several builds, and end with the last of these."""

    def __init__(self, datasets: Mapping[str, Any], num_workers: int) -> None:
        super().__init__(datasets, num_workers)
        self._lock, self._num_builds = Lock(), 0

    def joined(self, name: str) -> "_OneOfSeveral":
        """The workers of one build, which calls `leave` at its end.

        The processes begin here: they would end with the thread of a build.
        """
        with self._lock:
            self._num_builds += 1
            for _ in range(self.num_workers):
                self.started().submit(os.getpid)
        return _OneOfSeveral(self, name)

    def leave(self) -> None:
        """End the processes if this build is the last one."""
        with self._lock:
            self._num_builds -= 1
            if not self._num_builds:
                self.close(at_once=True)


class _OneOfSeveral(Workers):
    """The workers of several datasets, as those of one."""

    def __init__(self, workers: SharedWorkers, name: str) -> None:
        super().__init__(workers.dataset[name], workers.num_workers)
        self._workers, self._name, self._has_left = workers, name, False

    @override
    def run(self, make: Any, tasks: Any, receive: Any) -> None:
        self._workers.run(partial(_made_of, self._name, make), tasks, receive)

    @override
    def close(self, *, at_once: bool = False) -> None:
        if not self._has_left:
            self._has_left = True
            self._workers.leave()


def _made_of(name: str, make: Callable[[Any], Any], datasets: Mapping[str, Any]) -> Any:
    return make(datasets[name])


class BackgroundBuild:
    """Builds a store in a thread, or goes on with an interrupted build.

    It returns once rows can be read, or once the store is there. Before the build that is
    ``after``, rows are read only while a reader waits for them.
    """

    def __init__(
        self, asked: Asked, workers: Workers, after: "BackgroundBuild | None" = None
    ) -> None:
        self._asked, self._workers, self._after = asked, workers, after
        #: Why the build has failed.
        self.error: BaseException | None = None
        #: Whether the dataset is read piece by piece, and so never row by row.
        self.is_unfit = False
        self.serving: Serving | None = None
        self._has_begun = Event()
        #: Whether no more rows are read.
        self.is_stopped = False
        # It does not keep a program from ending: the next build goes on with its rows.
        self._thread = Thread(target=self._run, name="lightning_memmap build", daemon=True)
        self._thread.start()
        try:
            self._has_begun.wait()
        except BaseException:
            self.is_stopped = True
            raise
        if self.error is not None:
            raise self.error

    @property
    def is_alive(self) -> bool:
        """Whether rows are still read, or the store is being finished."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the build: wait for it if all rows are there, and otherwise interrupt it."""
        serving = self.serving
        if serving is None or not (serving.has_all or serving.is_whole):
            self.is_stopped = True
            self._thread.join(_PATIENCE_S)
        else:
            self._thread.join()

    def _run(self) -> None:
        """What the thread does."""
        directory = self._asked.directory
        try:
            with self._workers:
                check_free(directory.path, "`store_dir`")
                with directory.locked():
                    # Another process may have built it meanwhile.
                    if not (is_store(directory.path) or self.is_stopped):
                        self._build()
        except BaseException as error:  # Whoever waits for rows must get it.
            self.error = error
            if self.serving is not None:
                self.serving.end(error)
        finally:
            self._has_begun.set()

    def _build(self) -> None:
        asked, path = self._asked, self._asked.directory.path
        identity, probes = asked.identity(), asked.probes(self._workers)
        draft = asked.draft(asked.dataset, probes, identity)
        if ORDER in draft.source:
            self.is_unfit = True
            return
        building = Building.begin(path, draft, resume=True, row_bytes=probes.typical_bytes)
        with closing(building), explained(path, "the next run then goes on"):
            serving = self.serving = Serving.make(building.path, draft.num_rows)
            try:
                self._write(building, serving, probes)
                building.finish(num_threads=asked.num_workers, show=asked.show)
            except BaseException:
                _log.warning(
                    "the store at %s: %s of %s rows are kept; the next run goes on with them",
                    path,
                    f"{building.num_done:,}",
                    f"{draft.num_rows:,}",
                )
                raise
        serving.end()

    def _write(self, building: Building, serving: Serving, probes: Probes) -> None:
        """Write all rows that are missing."""
        draft = building.draft
        is_there = np.ones(draft.num_rows, np.bool_)
        for missing in building.missing(range(draft.num_rows)):
            is_there[missing.start : missing.stop] = False
        serving.present[draft.shards.locate(np.flatnonzero(is_there))] = 1
        self._has_begun.set()
        write_dataset(
            building,
            self._workers,
            lambda _: _Queue(self, serving, draft, probes),
            row_bytes=probes.row_bytes,
        )
        if self.is_stopped and not serving.has_all:
            building.sync()
            raise BuildStoppedError(f"the build of the store at {building.store} was stopped")

    def must_pause(self, serving: Serving) -> bool:
        """Whether rows are read only while a reader waits, and none does."""
        is_first = self._after is None or not self._after.is_alive
        return not is_first and not serving.is_waited_for


class GrowingStore(Store):
    """A store that is being built: whoever reads rows waits until they are there.

    Args:
        path: The directory.
        manifest: Its draft.
        serving: Which rows are there.
    """

    def __init__(self, path: Path, manifest: Manifest, serving: Serving) -> None:
        columns = list[OpenColumn]()
        for column in manifest.columns:
            if isinstance(column, RaggedColumn):
                columns.append(GrowingItems.of(column, serving, path))
            else:
                opened = column.open(serving.generation)
                columns.append(GrowingRows(manifest.shards, opened.tensor, serving))
        super().__init__(path, manifest, columns)
        self.serving = serving

    def ask(self, rows: Integers) -> None:
        """Ask for rows that are soon needed, before their reader does."""
        Wanted(self.serving).say(self.manifest.shards.locate(rows))

    def finished(self) -> Store | None:
        """The finished store; None where rows are missing. Where none is, this waits."""
        if not (self.serving.has_all or self.serving.is_whole):
            return None
        self.serving.wait_for_commit()
        return self.whole

    @property
    def whole(self) -> Store:
        """The finished store, for which this waits."""
        if not self.serving.is_whole:
            _log.warning(
                "the store at %s is built first: a field is looked up in all of its rows", self.path
            )
            self.serving.wait_for_commit()
        return open_directory(self.path, self.manifest.generation)

    @override
    def values(self, field: str, rows: Integers | None = None) -> NDArray[Any]:
        return self.whole.values(field, rows)

    @override
    def given(self, field: str) -> NDArray[np.bool_]:
        return self.whole.given(field)

    @override
    def lengths(self, field: str) -> Integers:
        return self.whole.lengths(field)


def open_growing(path: Path) -> GrowingStore | None:
    """Open a store that is being built; None where none is."""
    for generation in StoreDirectory(path).unfinished(KEY):
        with suppress(FileNotFoundError):  # Nobody reads from it; or it was committed meanwhile.
            draft = read_draft(generation, KEY)
            return GrowingStore(path, draft, Serving(generation, draft.num_rows))
    return None


@dataclass(frozen=True)
class GrowingRows(MappedRows):
    """The rows of a fixed column that is being written."""

    serving: Serving

    @override
    def row(self, row: int) -> Tensor:
        self.serving.want_rows(self.shards, np.array([row]))
        return super().row(row)

    @override
    def fetch(self, rows: Integers) -> Tensor:
        self.serving.want_rows(self.shards, rows)
        return super().fetch(rows)


@dataclass(frozen=True)
class GrowingItems(ItemRows):
    """The rows of a ragged column that is being written: pieces of files."""

    serving: Serving
    path: Path
    column: RaggedColumn
    #: By row its piece, the first byte in it, and its sizes.
    entries: Integers
    pieces: dict[int, int]

    @classmethod
    def of(cls, column: RaggedColumn, serving: Serving, path: Path) -> "GrowingItems":
        """The rows of a column."""
        field, shards = column.field, column.shards
        shape = shards.num_rows, 2 + field.num_variable
        entries = np.memmap(serving.generation / column.places_name, np.int64, "r", shape=shape)
        none = Values.none(field)
        index = np.empty((0, 1), np.int64)
        return cls(field, shards, none.data, index, serving, path, column, entries, {})

    @cached_property
    def whole(self) -> ItemRows:
        """The rows in the finished store, for which this waits."""
        self.serving.wait_for_commit()
        store = open_directory(self.path, self.serving.generation.name)
        names = [field.name for field in store.schema.fields]
        found = store.columns[names.index(self.field.name)]
        assert isinstance(found, ItemRows)
        return found

    @override
    def at(self, locations: Integers) -> Located:
        return self.whole.at(locations)

    @override
    def fetch(self, rows: Integers) -> list[Tensor]:
        self.serving.want_rows(self.shards, rows)
        return list(self.read(self.shards.locate(rows)).rows())

    def read(self, places: Integers) -> Values:
        """Copy rows that are there, one after the other."""
        entries = self.entries[places]
        sizes = np.ascontiguousarray(entries[:, 2:])
        lengths = sizes.prod(axis=1) * self.field.item_bytes
        ends = np.cumsum(lengths)
        data = torch.empty(int(ends[-1]) if len(ends) else 0, dtype=torch.uint8)
        memory = data.numpy()
        try:
            for (piece, first), end, length in zip(
                entries[:, :2].tolist(), ends.tolist(), lengths.tolist(), strict=True
            ):
                if length:
                    found = read_exactly(self._piece(piece), first, length)
                    memory[end - length : end] = found
        except FileNotFoundError:  # Its pieces were joined, and removed.
            return Values.of_rows(self.field, self.whole.fetch(self.shards.rows_at(places)))
        return Values(data.view(self.field.dtype).view(-1, *self.field.item_shape), sizes)

    def _piece(self, number: int) -> int:
        """The open file of a piece, which grows."""
        if number not in self.pieces:
            self.pieces[number] = open_plain(
                self.serving.generation / self.column.piece_name(number)
            )
            weakref.finalize(self, os.close, self.pieces[number])
        return self.pieces[number]
