"""Builds in parts: each process writes a range of rows, and one process commits the store."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from lightning_memmap.errors import StoreError, check_integer
from lightning_memmap.schema.forms import read_declared
from lightning_memmap.store.build import build_missing
from lightning_memmap.store.building import (
    NUM_PARTS,
    Building,
    compute_part_rows,
    read_draft,
)
from lightning_memmap.store.directory import PARTS, StoreDirectory, check_free, is_store
from lightning_memmap.store.files import is_there
from lightning_memmap.store.journal import InUseError, Journal, journal_name
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.paths import store_directory
from lightning_memmap.store.progress import show_progress
from lightning_memmap.store.request import BuildRequest
from lightning_memmap.store.store import Store, open_directory

#: The most parts of a store.
_MAX_PARTS = 2**16
#: The most parts that an error message names.
_MAX_NAMED = 16
_log = logging.getLogger(__name__)


def build_part(
    dataset: Any,
    path: str | Path,
    part: tuple[int, int],
    *,
    num_shards: int | None = None,
    num_workers: int = 0,
    overwrite: bool = False,
    progress: bool = True,
    fingerprint: str | None = None,
    variable: Sequence[str] | Mapping[str, int] | None = None,
    nullable: Sequence[str] | None = None,
) -> None:
    """Write one part of a store. `finish_store` commits the store once all parts are written.

    Every process calls this with the same arguments except for ``part``, simultaneously or in any
    order, on machines that share the file system of ``path``. A call for an interrupted part
    resumes it, and a call for a complete part does nothing. Part ``i`` of ``n`` has the rows from
    ``i * num_rows // n`` up to ``(i + 1) * num_rows // n``.

    Args:
        dataset: The complete map-style dataset, the same for all parts: see
            `lightning_memmap.store.build_store`. Eight rows are read in addition to the part.
        path: Directory of the store.
        part: ``(i, n)``: part ``i``, from 0, of ``n``.
        num_shards: Number of shards, with the default of `build_store`.
        num_workers: Worker processes that read and write; with 0, this process does both.
        overwrite: Write the part even if there is a store. `finish_store` then replaces it.
        progress: Show a progress bar.
        fingerprint: Your own identity of the dataset. It alone then decides whether the parts are
            of one dataset.
        variable: Fields whose rows may differ in length; see `build_store`.
        nullable: Fields whose rows may be None.

    Raises:
        TypeError: The dataset has no length, or an argument has the wrong type.
        ValueError: The part doesn't exist, the dataset is empty or a stream, or an argument is out
            of range.
        SchemaError: A sample cannot be stored, or does not fit the first one.
        DatasetError: The dataset raised an error, is random, or isn't the dataset of an existing
            store; or a worker process died.
        StoreError: Another process writes this part, the other parts are of another dataset or have
            other options, or the path contains something else.
        OSError: The disk is full, or the files cannot be written.
    """
    index, num_parts = check_part(part)
    declared = read_declared(variable, nullable)
    request = BuildRequest(dataset, path, num_shards, num_workers, fingerprint, declared, progress)
    if request.is_stream:
        raise ValueError(
            f"part={index}/{num_parts} of a {type(dataset).__name__}: its rows are known only as"
            " they arrive. Build its store in one process, or pass a map-style dataset"
        )
    # A job may have been queued again after the store was finished.
    if (store := build_missing(request, overwrite=overwrite, part=(index, num_parts))) is not None:
        _log.warning("part %s of %s: the store at %s is complete", index, num_parts, store.path)


def finish_store(
    path: str | Path, *, num_threads: int = 2, overwrite: bool = False, progress: bool = True
) -> Store:
    """Commit a store, once `build_part` has written all of its parts.

    It needs no dataset. Repeat an interrupted call. A call for a finished store opens it.

    Args:
        path: Directory of the store.
        num_threads: Threads that compute the checksums. Every byte is read once.
        overwrite: Replace an existing store.
        progress: Show a progress bar.

    Returns:
        The open store.

    Raises:
        DatasetError: A probe row differs from the first time it was read: the dataset is random.
        StoreError: A part is missing, incomplete or still being written; there is a store already;
            or the path contains something else.
        OSError: The files cannot be read or written.
    """
    num_threads = check_integer("num_threads", num_threads, 0, "0 or more threads")
    directory = StoreDirectory(store_directory(path))
    check_free(directory.path, "path")

    # Before a lock file is created in an empty directory.
    if not directory.unfinished(PARTS) and not is_store(directory.path):
        raise StoreError(
            f"no part of a store at {directory.path} was written. Write each of n parts with"
            " build_part(dataset, path, (i, n)), or with"
            f" `lightning-memmap store build {directory.path} --dataset ... --part i/n`"
        )
    with directory.locked():
        if not (generations := directory.unfinished(PARTS)):
            return open_directory(directory.path)
        generation = generations[0]
        if is_store(directory.path) and not overwrite:
            raise StoreError(
                f"{directory.path} exists: replace it by the parts that were written with"
                f" overwrite=True (--overwrite), or remove {generation}"
            )
        try:
            draft = read_draft(generation, PARTS)
            num_parts = int(draft.source[NUM_PARTS])
        except (OSError, ValueError, KeyError, StoreError) as error:
            raise StoreError(
                f"{generation / PARTS} cannot be read: {error}: remove {generation}, and write all"
                " parts again"
            ) from error
        _check_parts(directory.path, draft, generation, num_parts)
        with Building(directory.path, draft, generation) as building:
            show = partial(show_progress, hidden=not progress)
            building.finish(num_threads=max(1, num_threads), show=show)
    return open_directory(directory.path)


def check_part(part: tuple[int, int]) -> tuple[int, int]:
    """Check the part argument of a user: the index of the part, and the number of parts."""
    if not isinstance(part, (tuple, list)) or len(part) != 2:
        raise TypeError(
            f"part={part!r}: must be the index of a part and the number of parts, like (0, 8)"
        )
    index, num_parts = (check_integer("part", number) for number in part)
    if not 1 <= num_parts <= _MAX_PARTS:
        raise ValueError(f"part={index}/{num_parts}: a store has 1 to {_MAX_PARTS} parts")
    if not 0 <= index < num_parts:
        raise ValueError(
            f"part={index}/{num_parts}: the parts are 0/{num_parts} to"
            f" {num_parts - 1}/{num_parts} (for a Slurm array, --array=0-{num_parts - 1})"
        )
    return index, num_parts


def _check_parts(path: Path, draft: Manifest, generation: Path, num_parts: int) -> None:
    """Check that all parts are written, and that no process is writing one."""
    problems = []
    for index in range(num_parts):
        rows = compute_part_rows(index, num_parts, draft.num_rows)
        if not is_there(generation / journal_name(index)):
            problems += [f"part {index} is missing"] * bool(rows)
            continue
        try:
            with closing(Journal(generation, rows, index)) as journal:
                if (num_done := journal.num_done) < len(rows):
                    written = f"{num_done:,} of {len(rows):,} rows"
                    problems.append(f"part {index} was interrupted after {written}")
        except InUseError:
            problems.append(f"part {index} is being written")
    if problems:
        more = len(problems) - _MAX_NAMED
        named = "; ".join(problems[:_MAX_NAMED]) + (f"; and {more} more" if more > 0 else "")
        raise StoreError(
            f"the store at {path} has {num_parts} parts, and not all are written: {named}."
            " Run these parts again, with the same dataset and options"
        )
