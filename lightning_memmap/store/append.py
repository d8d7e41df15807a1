"""Append the rows of a dataset to a store: a new version of it, beside the old one, then a rename.

Row ``i`` is in shard ``i % num_shards``, and the shards lie one after the other in each file. So
each new row but those of the last shard moves all that lies behind it: the rows of the old version
are copied, whatever the file system can share.
"""

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lightning_memmap.errors import with_article
from lightning_memmap.schema import Schema
from lightning_memmap.schema.values import Values
from lightning_memmap.sizes import format_bytes
from lightning_memmap.store.build import Build, class_name, explained
from lightning_memmap.store.columns.variable import pack_rows
from lightning_memmap.store.files import OpenFiles
from lightning_memmap.store.fingerprint import Fingerprint, check_given
from lightning_memmap.store.hashing import hash_row
from lightning_memmap.store.journal import Journal
from lightning_memmap.store.places import store_directory
from lightning_memmap.store.plan import StorePlan
from lightning_memmap.store.probes import probe_rows, random_dataset_error
from lightning_memmap.store.progress import Advance, show_progress
from lightning_memmap.store.reader import Store, open_directory
from lightning_memmap.store.recovery import locked, make_room, remove_tree
from lightning_memmap.store.samples import read_row
from lightning_memmap.store.sources.stream import is_stream
from lightning_memmap.store.workers import Workers, check_num_workers
from lightning_memmap.store.writer import check_dataset, check_length
from lightning_memmap.store.written import WrittenStore

_COPY_BYTES = 32 * 2**20
#: A first guess, until the first range was timed.
_ROW_S = 1e-3
_MAX_SOURCE = 4000
_log = logging.getLogger(__name__)


def append_store(
    dataset: Any,
    path: str | Path,
    *,
    num_workers: int = 0,
    fingerprint: str | None = None,
    progress: bool = True,
) -> Store:
    """Add the rows of a dataset to a store. They get the next row numbers.

    The new version is written beside the old one and then takes its place: a process that has the
    store open keeps the rows that it has, and a call that is interrupted leaves the store as it
    was. This reads all bytes of the old version and writes those of the new one, for which the disk
    must have room: append seldom, and much at once.

    Args:
        dataset: Map-style, with samples of the structure, dtypes and shapes of the store.
        path: Directory of the store.
        num_workers: Worker processes that read the dataset; with 0, this process does.
        fingerprint: The identity of all rows together, in your own words. Without one, eight rows
            decide whether a dataset is that of the store, such as a ``ConcatDataset`` of both.
        progress: Show a progress bar.

    Returns:
        The open store, in its new version.

    Raises:
        TypeError: The dataset has no length, or an argument has the wrong type.
        ValueError: The dataset is empty or a stream, or an argument is out of range.
        SchemaError: A sample does not fit those of the store; the message names row and field.
        DatasetError: The dataset raised an error or is random, or a worker process died.
        StoreNotFoundError: There is no store.
        StoreError: It is damaged, or may not be replaced by this process.
        OSError: The disk is full, or the files cannot be written.
    """
    check_dataset(dataset)
    num_workers = check_num_workers(num_workers)
    check_given(fingerprint)
    if is_stream(dataset):
        raise ValueError(
            f"{with_article(type(dataset).__name__)}: only a map-style dataset can be appended;"
            " build a store of its own of it, and append that"
        )
    check_length(dataset)
    directory = store_directory(path)
    show = partial(show_progress, hidden=not progress)
    open_directory(directory)  # Before a lock is made where there is nothing.
    with locked(directory):
        store = open_directory(directory)
        make_room(directory)
        num_rows = store.num_rows + len(dataset)
        classes = store.manifest.classes
        plan = StorePlan(directory, num_rows, store.num_shards, store.schema, classes)
        plan.check()
        _log.warning(
            "appending %s rows to %s: the %s of the old version are copied",
            f"{len(dataset):,}",
            directory,
            format_bytes(store.manifest.num_bytes),
        )
        name = f"{store.manifest.source.get('dataset', 'a table')} + {class_name(dataset)}"
        identity = Fingerprint({}, fingerprint)
        row_bytes, added = store.manifest.row_bytes, list[tuple[int, str]]()
        with Workers(dataset, num_workers) as workers:
            prober = partial(_Prober, schema=store.schema)
            workers.run(prober, probe_rows(len(dataset)), added.append)
            probes = (
                *store.manifest.probes,
                *((store.num_rows + row, digest) for row, digest in sorted(added)),
            )
            build = Build(
                workers,
                name[-_MAX_SOURCE:],
                plan,
                probes,
                identity,
                _ROW_S,
                row_bytes,
                store.num_rows,
            )
            _write(build, store, show)
    return open_directory(directory)


def _write(build: Build, store: Store, show: Any) -> None:
    plan = build.plan
    plan.make_files()
    journal = Journal.create(plan.building, build.key())
    try:
        then = "then append again: the store is as it was"
        copying = show("copying", store.num_rows, store.manifest.row_bytes)
        with explained(plan.path, then), copying as advance:
            _copy_rows(store, plan, advance)
        rows = range(store.num_rows, plan.num_rows)
        with build.write(journal, rows, show, then):
            written = WrittenStore.finish(plan, build.workers.num_workers, show)
    except BaseException:
        remove_tree(plan.building)
        raise
    finally:
        journal.close()
    written.check(build.probes)
    fingerprint = build.fingerprint if build.fingerprint.given is not None else None
    written.commit(written.probes(), {"dataset": build.dataset_name}, fingerprint)


def _copy_rows(store: Store, plan: StorePlan, advance: Advance) -> None:
    """Write the rows of a store into the files of its next version."""
    files = OpenFiles(plan.building, 64)
    step = max(1, _COPY_BYTES // max(1, store.manifest.row_bytes))
    try:
        for first in range(0, store.num_rows, step):
            rows = range(first, min(first + step, store.num_rows))
            for column, opened in zip(plan.columns, store.columns, strict=True):
                found = opened.fetch(np.arange(rows.start, rows.stop, dtype=np.int64))
                values = (
                    Values(found) if isinstance(found, Tensor) else pack_rows(column.field, found)
                )
                column.write(files, rows, values)
            advance(len(rows))
    finally:
        files.close()
    plan.sync()


@dataclass(frozen=True)
class _Prober:
    """Reads a row twice. Returns the row and its hash."""

    dataset: Any
    schema: Schema

    def __call__(self, row: int) -> tuple[int, str]:
        first, second = (hash_row(read_row(self.dataset, row, self.schema)) for _ in range(2))
        if first != second:
            names = ", ".join(field.name for field in self.schema.fields)
            raise random_dataset_error(row, names)
        return row, first
