"""Build a store: all of it or nothing, unless it was built before from the same dataset."""

import os
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_memmap.errors import StoreError, with_article
from lightning_memmap.schema import read_forms
from lightning_memmap.schema.fields import dtype_name
from lightning_memmap.schema.narrowing import check_store_dtypes
from lightning_memmap.store.build import Build
from lightning_memmap.store.fingerprint import Fingerprint, check_given
from lightning_memmap.store.manifest import Manifest, check_num_shards
from lightning_memmap.store.places import make_parent, store_directory
from lightning_memmap.store.progress import show_progress
from lightning_memmap.store.reader import Store, open_directory
from lightning_memmap.store.recognition import check_choice, recognise
from lightning_memmap.store.recovery import (
    can_use_unlocked,
    can_write_manifest,
    discard_build,
    is_store,
    locked,
    make_room,
    no_store_error,
    recover,
)
from lightning_memmap.store.sources.refusals import way_out
from lightning_memmap.store.sources.stream import Spool, is_stream
from lightning_memmap.store.workers import Workers, check_num_workers


def build_store(
    dataset: Any,
    path: str | Path,
    *,
    num_shards: int = 24,
    num_workers: int = 0,
    overwrite: bool = False,
    progress: bool = True,
    fingerprint: str | None = None,
    check: str = "probes",
    fresh: bool = False,
    store_dtypes: Mapping[str, str | torch.dtype] | None = None,
    variable: Mapping[str, Any] | None = None,
) -> Store:
    """Store a dataset, or open the store where it was built before from the same dataset.

    Several processes may call this at once with one path: one builds, the others wait and use the
    result. A build that was interrupted is resumed by the next one of the same dataset.

    A dataset is recognised by its identity: its class, length, attributes and the source text of
    its class, and by some rows. For changes that none of these shows, such as another file in the
    directory that it reads, choose a ``fingerprint`` of your own.

    Args:
        dataset: Map-style: ``dataset[i]`` for ``i`` in ``range(len(dataset))``. Or one that is
            iterated over, such as an ``IterableDataset`` or a generator: its rows are stored in the
            order in which they arrive, and its build cannot be resumed.
        path: Directory of the store. Its parent is made where it is missing.
        num_shards: Shards that the rows are divided into. A number with many divisors serves many
            device counts; 24 serves 1, 2, 3, 4, 6, 8, 12 and 24. At most 65,536.
        num_workers: Worker processes that read the dataset and write its rows straight into the
            files. With 0, this process does both; otherwise it reads no row.
        overwrite: Replace a store of another dataset. The old store stays until the new one is
            whole. An interrupted build is not resumed.
        progress: Show a progress bar.
        fingerprint: The identity of the dataset in your own words, such as a version or a hash: a
            string that changes whenever the rows do. It alone then decides whether a store, or an
            interrupted build, is of this dataset, and no row is read to find out.
        check: How a dataset without a ``fingerprint`` is compared with the store that is there.
            ``"probes"``: eight rows, and all rows once where its identity has changed. ``"full"``:
            all rows, each time. ``"off"``: length and schema alone.
        fresh: Do not resume an interrupted build.
        store_dtypes: Other dtypes than those of the samples in which fields are kept, by name of
            the field, such as ``{"image": "uint8"}``. Every value must stay what it is.
        variable: The fields and lists whose rows may differ in length, or be None, each with a
            form, such as ``{"audio": "pad", "objects": "list", "age": "nullable"}``. Those that do
            among the first rows that are read need not be named. Of the form only ``dims`` and
            ``nullable`` matter here; see `lightning_memmap.schema.forms`.

    Returns:
        The open store.

    Raises:
        TypeError: The dataset has no length, or an argument has the wrong type.
        ValueError: The dataset is empty, or an argument is out of range.
        SchemaError: A sample cannot be stored, or does not fit the first one; the message names row
            and field.
        DatasetError: The dataset raised an error, is random, is not the one that was stored here,
            or a worker process died.
        StoreError: The store that is there is damaged, the path contains something else, this
            process may not write there, or something that other users have put beside the store is
            in the way; or the store would have more fields or shards than can be opened.
        OSError: The disk is full, or the files cannot be written.
    """
    check_choice(check)
    check_build(dataset, num_shards, num_workers, fingerprint)
    num_shards = int(num_shards)
    dtypes = check_store_dtypes(store_dtypes)
    forms = read_forms(variable)
    if num_workers and is_stream(dataset):
        raise ValueError(
            f"num_workers={num_workers} with a {type(dataset).__name__}: its rows are stored in the"
            " order in which they arrive, and this process reads them; give num_workers=0"
        )
    show = partial(show_progress, hidden=not progress)
    directory = store_directory(path)

    def use_what_is_there() -> tuple[Store, Fingerprint | None]:
        store = reopen(directory, num_shards, dtypes)
        return store, recognise(
            store, dataset, fingerprint, check=check, num_workers=num_workers, progress=show
        )

    if not overwrite and can_use_unlocked(directory):
        store, found = use_what_is_there()
        if found is not None and can_write_manifest(directory):
            with suppress(StoreError), locked(directory):
                _record(store, found)
        return store
    make_parent(directory)
    with locked(directory):
        recover(directory)
        if os.path.lexists(directory) and not (overwrite and is_store(directory)):
            store, found = use_what_is_there()
            if found is not None:
                _record(store, found)
            discard_build(directory)
            return store
        make_room(directory)
        if not is_stream(dataset):
            check_length(dataset)
        # Before a row is read: a dataset may cache rows, which would change its identity.
        identity = Fingerprint.of(dataset, fingerprint)
        if is_stream(dataset):
            with show("reading", None, 0) as advance:
                spool = Spool(dataset, directory.parent, advance, forms, dtypes)
            with closing(spool):
                build = Build.of_stream(dataset, spool, directory, num_shards, identity)
                build.run(show, resume=False)
        else:
            with Workers(dataset, num_workers) as workers:
                build = Build.prepare(workers, directory, num_shards, identity, forms, dtypes)
                build.run(show, resume=not (overwrite or fresh))
    return open_directory(directory)


def check_build(dataset: Any, num_shards: int, num_workers: int, fingerprint: str | None) -> None:
    """Check what a user gives for a build.

    Args:
        dataset: The dataset.
        num_shards: Shards that its rows are to be divided into.
        num_workers: Processes that are to read it.
        fingerprint: Its identity in the user's own words.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: It is out of range.
    """
    if (instead := way_out(dataset)) is not None:
        raise TypeError(f"the dataset: {instead}")
    check_num_shards(num_shards)
    check_num_workers(num_workers)
    check_given(fingerprint)


def check_length(dataset: Any) -> None:
    """Check that a dataset has rows, and says how many.

    Args:
        dataset: The dataset.

    Raises:
        TypeError: It has no length.
        ValueError: It is empty.
    """
    try:
        num_rows = len(dataset)
    except TypeError as error:
        raise TypeError(
            f"the dataset, {with_article(type(dataset).__name__)}, has no length: a store needs a"
            " map-style dataset with __len__ and __getitem__, or one that can be iterated over"
        ) from error
    if num_rows < 1:
        raise ValueError("the dataset is empty: there is nothing to store")


def reopen(directory: Path, num_shards: int, dtypes: Mapping[str, torch.dtype]) -> Store:
    """Open the store that is where another one was to be built.

    Args:
        directory: Its directory.
        num_shards: Shards that were asked for.
        dtypes: Other dtypes in which fields were to be kept, by name.

    Returns:
        The store.

    Raises:
        StoreError: It is not one, is damaged, or has other shards or dtypes.
        SchemaError: There is no field of a name in ``dtypes``.
    """
    if not is_store(directory):
        raise no_store_error(directory, "`store_dir`")
    store = open_directory(directory)
    if store.num_shards != num_shards:
        raise StoreError(
            f"num_shards={num_shards}: the store at {directory} has {store.num_shards} shards;"
            f" build it anew with overwrite=True, or give num_shards={store.num_shards}"
        )
    store.schema.stored_as(dtypes)  # Names of no field are refused.
    for field in store.schema.fields:
        if field.dtype != dtypes.get(field.name, field.sample_dtype):
            raise StoreError(
                f"store_dtypes: the store at {directory} keeps {field.name!r} as"
                f" {dtype_name(field.dtype)}; build it anew with overwrite=True, or give"
                f" store_dtypes={{{field.name!r}: {dtype_name(field.dtype)!r}}}"
            )
    return store


def _record(store: Store, fingerprint: Fingerprint) -> None:
    """Record the identity of a dataset whose rows were all equal. The lock must be held."""
    # Another process may have replaced the store since this one opened it.
    with suppress(OSError):
        if Manifest.read(store.path) == store.manifest:
            replace(store.manifest, fingerprint=fingerprint).write(store.path)
