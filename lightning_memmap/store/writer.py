"""Build a store: all of it or nothing, in parallel, and resumed where it was interrupted.

The rows are written into a sibling directory. The manifest is written last, after everything
else is on the disk, and then one rename puts the store in place. Whatever ends the process
before that leaves no store, or the old one. What a killed build has finished is kept in a
journal and not read again by the next one.
"""

import json
import os
import shutil
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.reduction import DupFd
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_memmap.errors import DatasetError, MemmapError, SchemaError, StoreError
from lightning_memmap.order import shard_starts
from lightning_memmap.schema import Field, Schema
from lightning_memmap.store.checksums import compute_checksums
from lightning_memmap.store.files import (
    commit,
    describe_source,
    hash_written_row,
    make_files,
    sync_files,
    write_all,
)
from lightning_memmap.store.manifest import (
    Manifest,
    check_layout,
    check_num_shards,
    check_regular,
    field_path,
)
from lightning_memmap.store.probes import (
    random_dataset_error,
    read_row,
    take_probes,
)
from lightning_memmap.store.progress import Advance, no_progress, show_progress
from lightning_memmap.store.reader import Store, open_store
from lightning_memmap.store.recovery import (
    building_path,
    can_use_unlocked,
    discard_build,
    is_store,
    locked,
    make_room,
    recover,
    remove_tree,
)

_PLAN = "plan.json"
_JOURNAL = "journal"
_BLOCK_BYTES = 32 * 2**20
_MAX_BLOCK_ROWS = 1024
_JOURNAL_INTERVAL_S = 5.0


def build_store(
    dataset: Any,
    path: str | Path,
    *,
    num_shards: int = 24,
    num_workers: int = 0,
    overwrite: bool = False,
    progress: bool = True,
) -> Store:
    """Store a dataset, or open the store where it was built before from the same dataset.

    Several processes may call this at once with one path: one builds, the others wait and use
    the result.

    Args:
        dataset: Map-style: ``dataset[i]`` for ``i`` in ``range(len(dataset))``.
        path: Directory of the store. Its parent is made where it is missing.
        num_shards: Shards that the rows are dealt to. A number with many divisors serves many
            device counts; 24 serves 1, 2, 3, 4, 6, 8, 12 and 24. At most 65,536.
        num_workers: Processes that read the dataset and write their rows straight into the
            files; with 0, this process does it.
        overwrite: Replace a store of another dataset. The old store stays until the new one is
            whole.
        progress: Show a progress bar.

    Returns:
        The open store.

    Raises:
        TypeError: The dataset has no length or no ``__getitem__``.
        ValueError: The dataset is empty, or an argument is out of range.
        SchemaError: A sample cannot be stored, or does not fit the first one; the message names
            row and field.
        DatasetError: The dataset raised, is random, or is not the one that was stored here.
        StoreError: A store is there already and damaged, the path holds something else, a store
            has to be built and this process may not write there, or what others have put beside it
            is in the way; or the store would have more fields or shards than can be opened.
        OSError: The disk is full, or the files cannot be written.
    """
    check_num_shards(num_shards)
    if num_workers < 0:
        raise ValueError(f"num_workers={num_workers}: 0 or more processes")
    directory = Path(os.path.realpath(path))
    if not overwrite and can_use_unlocked(directory):
        return _reopen(directory, dataset, num_shards)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with locked(directory):
        recover(directory)
        if os.path.lexists(directory) and not (overwrite and is_store(directory)):
            store = _reopen(directory, dataset, num_shards)
            discard_build(directory)
            return store
        make_room(directory)
        build = _Build.plan(dataset, directory, num_shards)
        build.run(num_workers, show_progress if progress else no_progress)
    return open_store(directory)


def _reopen(directory: Path, dataset: Any, num_shards: int) -> Store:
    if not is_store(directory):
        raise StoreError(
            f"{directory} exists and is no store: choose another `store_dir`, or remove it"
        )
    store = open_store(directory)
    store.check_dataset(dataset)
    if store.num_shards != num_shards:
        raise StoreError(
            f"num_shards={num_shards}: the store at {directory} has {store.num_shards} shards;"
            f" build it anew with overwrite=True, or give num_shards={store.num_shards}"
        )
    return store


@dataclass(frozen=True)
class _Build:
    """One build of one dataset: what is known of it before the first row is written."""

    dataset: Any
    directory: Path
    num_rows: int
    num_shards: int
    schema: Schema
    probes: tuple[tuple[int, str], ...]

    @classmethod
    def plan(cls, dataset: Any, directory: Path, num_shards: int) -> "_Build":
        try:
            num_rows = len(dataset)
        except TypeError as error:
            raise TypeError(
                f"the dataset, a {type(dataset).__name__}, has no length: a store needs a"
                " map-style dataset with __len__ and __getitem__"
            ) from error
        if num_rows < 1:
            raise ValueError("the dataset is empty: there is nothing to store")
        try:
            sample = dataset[0]
        except Exception as error:
            raise DatasetError(
                f"the dataset raised at row 0: {type(error).__name__}: {error}"
            ) from error
        try:
            schema = Schema.from_sample(sample)
        except SchemaError as error:
            raise SchemaError(f"row 0, {error}") from error
        check_layout(num_rows, num_shards, schema)
        probes = take_probes(dataset, num_rows, schema)
        return cls(dataset, directory, num_rows, num_shards, schema, probes)

    @property
    def block_rows(self) -> int:
        """Rows that a worker reads, checks and writes at once."""
        by_size = _BLOCK_BYTES // max(1, self.schema.row_bytes)
        return max(1, min(_MAX_BLOCK_ROWS, by_size))

    @property
    def building(self) -> Path:
        """Where the files grow until they are a store."""
        return building_path(self.directory)

    def run(self, num_workers: int, progress: Callable[..., Any]) -> None:
        """Write all rows that are not yet written, then commit."""
        done = self._open_journal()
        blocks = range(-(-self.num_rows // self.block_rows))
        todo = [block for block in blocks if block not in done]
        rows_left = sum(self._block_length(block) for block in todo)
        row_bytes = self.schema.row_bytes
        with progress("storing", self.num_rows, row_bytes, self.num_rows - rows_left) as advance:
            self._write_blocks(todo, num_workers, advance)
        with progress("checksums", self.num_rows * row_bytes, 1) as advance:
            checksums = compute_checksums(
                self.building,
                self.schema,
                self.num_rows,
                self.num_shards,
                num_threads=max(2, num_workers),
                advance=advance,
            )
        self._check_written_probes()
        self._commit(checksums)

    def _block_length(self, block: int) -> int:
        return min(self.block_rows, self.num_rows - block * self.block_rows)

    def _open_journal(self) -> set[int]:
        """Make the files, or find those of an interrupted build of the same dataset.

        Returns:
            The blocks that are written already.
        """
        plan = {
            "num_rows": self.num_rows,
            "num_shards": self.num_shards,
            "block_rows": self.block_rows,
            "probes": [list(probe) for probe in self.probes],
            **self.schema.to_json(),
        }
        done = _read_journal(self.building, plan, self._files_are_whole)
        if done is not None:
            return done
        if os.path.lexists(self.building):
            remove_tree(self.building)
        make_files(self.directory, self.schema, self.num_rows)
        with open(self.building / _PLAN, "w", encoding="utf-8") as file:
            json.dump(plan, file)
        return set()

    def _files_are_whole(self) -> bool:
        return all(
            check_regular(field_path(self.building, field)) == self.num_rows * field.row_bytes
            for field in self.schema.fields
            if field.row_bytes
        )

    def _write_blocks(self, todo: list[int], num_workers: int, advance: Advance) -> None:
        writer = _BlockWriter(self)
        # torch's own seed of workers would come from the global generator: the run that builds a
        # store would have other random numbers than those that find it built.
        generator = torch.Generator()
        generator.seed()
        loader: DataLoader[Any] = DataLoader(
            writer,
            batch_size=None,
            sampler=todo,
            num_workers=num_workers,
            collate_fn=_as_it_is,
            generator=generator,
        )
        written: list[int] = []
        last_sync = monotonic()
        try:
            for outcome in loader:
                if isinstance(outcome, _Failure):
                    outcome.reraise()
                written.append(outcome)
                advance(self._block_length(outcome))
                if monotonic() - last_sync > _JOURNAL_INTERVAL_S:
                    self._journal(written)
                    last_sync = monotonic()
        finally:
            writer.close()
            self._journal(written)

    def _journal(self, written: list[int]) -> None:
        # A block is noted only once it is on the disk.
        sync_files(self.building, self.schema)
        with open(self.building / _JOURNAL, "a", encoding="ascii") as file:
            file.writelines(f"{block}\n" for block in written)
            file.flush()
            os.fsync(file.fileno())
        written.clear()

    def _check_written_probes(self) -> None:
        for row, expected in self.probes:
            found = hash_written_row(
                self.building, row, self.schema, self.num_rows, self.num_shards
            )
            if found != expected:
                names = ", ".join(field.name for field in self.schema.fields)
                shutil.rmtree(self.building)
                raise random_dataset_error(row, names)

    def _commit(self, checksums: dict[str, tuple[str, ...]]) -> None:
        kind = type(self.dataset)
        source = describe_source(dataset=f"{kind.__module__}.{kind.__qualname__}")
        manifest = Manifest(
            self.num_rows, self.num_shards, self.schema, self.probes, checksums, source
        )
        commit(self.directory, manifest)
        for name in (_PLAN, _JOURNAL):
            (self.directory / name).unlink()


def _read_journal(
    building: Path, plan: dict[str, Any], files_are_whole: Callable[[], bool]
) -> set[int] | None:
    """The blocks that an interrupted build has written; None where there is none to resume."""
    try:
        if json.loads((building / _PLAN).read_text(encoding="utf-8")) != plan:
            return None
        if not files_are_whole():
            return None
        text = (building / _JOURNAL).read_text(encoding="ascii")
    except (OSError, ValueError, StoreError):
        # Whatever cannot be read there is no build to resume: a new one starts.
        return None
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        # A kill cut the last line off; what is noted next must not be joined to it.
        os.truncate(building / _JOURNAL, len(whole))
    return {int(line) for line in whole.split() if line.isdecimal()}


def _as_it_is(outcome: Any) -> Any:
    return outcome


class _WorkerTracebackError(Exception):
    """The traceback of a worker process as text, shown as the cause of the error."""


@dataclass(frozen=True)
class _Failure:
    """What went wrong in a worker, in a form that crosses processes whatever was raised."""

    error: MemmapError | OSError
    traceback: str

    def reraise(self) -> None:
        raise self.error from _WorkerTracebackError(f"\n{self.traceback}")


class _BlockWriter(Dataset[Any]):
    """Item ``k`` is the work on block ``k``: read its rows, check them, write them. Its value is
    the block's number, or the failure.

    It holds the directory itself, not its name: a worker that outlives a killed build must not
    write into the directory that the next build makes in the same place.
    """

    def __init__(self, build: _Build) -> None:
        self._build = build
        self._directory = os.open(build.building, os.O_RDONLY | os.O_DIRECTORY)
        self._starts = shard_starts(build.num_rows, build.num_shards).tolist()

    def __getitem__(self, block: int) -> int | _Failure:
        try:
            self._write(block)
        except (MemmapError, OSError) as error:
            return _Failure(error.with_traceback(None), traceback.format_exc())
        return block

    def _write(self, block: int) -> None:
        build = self._build
        first = block * build.block_rows
        num_rows = build._block_length(block)
        for index in range(num_rows):
            leaves = read_row(build.dataset, first + index, build.schema)
            for buffer, leaf in zip(self._buffers, leaves, strict=True):
                buffer.set(index, leaf)
        for buffer in self._buffers:
            if not buffer.row_bytes:
                continue
            for shard, rows in _deal(first, num_rows, build.num_shards):
                place = self._starts[shard] + (first + rows.start) // build.num_shards
                write_all(buffer.descriptor, buffer.rows(rows), place * buffer.row_bytes)

    def close(self) -> None:
        """Let go of the directory."""
        os.close(self._directory)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.pop("_buffers", None)
        state["_directory"] = DupFd(self._directory)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _directory=state["_directory"].detach())

    @cached_property
    def _buffers(self) -> "list[_Buffer]":
        return [
            _Buffer(self._directory, field, self._build.block_rows)
            for field in self._build.schema.fields
        ]


class _Buffer:
    """The rows of one field in one block, and the file that they go to."""

    def __init__(self, directory: int, field: Field, num_rows: int) -> None:
        self.row_bytes = field.row_bytes
        self._bytes = np.empty((num_rows, field.row_bytes), np.uint8)
        flat = torch.from_numpy(self._bytes.reshape(-1))
        self._tensor = flat.view(field.dtype).view(num_rows, *field.shape)
        if self.row_bytes:
            name = field_path(Path(), field)
            self.descriptor = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
            self._close = os.close

    def set(self, index: int, leaf: Tensor | np.ndarray) -> None:
        if isinstance(leaf, Tensor):
            self._tensor[index].copy_(leaf)
        else:
            self._tensor.numpy()[index] = leaf

    def rows(self, rows: range) -> memoryview:
        return np.ascontiguousarray(self._bytes[rows.start : rows.stop : rows.step]).data.cast("B")

    def __del__(self) -> None:
        if self.row_bytes:
            self._close(self.descriptor)


def _deal(first: int, num_rows: int, num_shards: int) -> Iterator[tuple[int, range]]:
    """The rows of a block that go to each shard, as positions within the block."""
    for start in range(min(num_shards, num_rows)):
        yield (first + start) % num_shards, range(start, num_rows, num_shards)
