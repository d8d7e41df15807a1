"""Build a store: all of it or nothing, unless it was built before from the same dataset."""

import os
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightning_memmap.errors import StoreError, with_article
from lightning_memmap.schema.fields import dtype_name
from lightning_memmap.schema.forms import FieldOptions
from lightning_memmap.store.build import Build
from lightning_memmap.store.fingerprint import Fingerprint
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.options import BuildOptions
from lightning_memmap.store.places import make_parent, store_directory
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
)
from lightning_memmap.store.sources.column_dataset import way_out
from lightning_memmap.store.sources.stream import Spool, is_stream
from lightning_memmap.store.workers import Workers


def build_store(
    dataset: Any,
    path: str | Path,
    *,
    num_shards: int | None = None,
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
        num_shards: Shards that the rows are divided into, at most 65,536. A number with many
            divisors serves many device counts. By default 24 for fewer than 20,000 rows, which
            serve 1, 2, 3, 4, 6, 8, 12 and 24 devices, and 192 from there on, which serve 16, 32,
            48, 64 and 96 too.
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
    check_dataset(dataset)
    fields = FieldOptions.of(variable, store_dtypes)
    options = BuildOptions(num_shards, num_workers, fingerprint, fields, progress)
    if num_workers and is_stream(dataset):
        raise ValueError(
            f"num_workers={num_workers} with a {type(dataset).__name__}: its rows are stored in the"
            " order in which they arrive, and this process reads them; give num_workers=0"
        )
    directory = store_directory(path)
    if not overwrite and can_use_unlocked(directory):
        store, found = reopen(dataset, directory, options, check)
        if found is not None and can_write_manifest(directory):
            with suppress(StoreError, OSError), locked(directory):
                _record(store, found)
        return store
    make_parent(directory)
    with locked(directory):
        if os.path.lexists(directory) and not (overwrite and is_store(directory)):
            store, found = reopen(dataset, directory, options, check)
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
            with options.show("reading", None, 0) as advance:
                spool = Spool(dataset, directory.parent, advance, options.fields)
            with closing(spool):
                build = Build.of_stream(dataset, spool, directory, options, identity)
                build.run(options.show, resume=False)
        else:
            with Workers(dataset, options.num_workers) as workers:
                build = Build.prepare(workers, directory, options, identity)
                build.run(options.show, resume=not (overwrite or fresh))
    return open_directory(directory)


def check_dataset(dataset: Any) -> None:
    """Check that an object that a user gives may be a dataset.

    Args:
        dataset: The object.

    Raises:
        TypeError: It is not. The message says what to give.
    """
    if (instead := way_out(dataset)) is not None:
        raise TypeError(f"the dataset: {instead}")


def check_length(dataset: Any) -> None:
    """Check that a dataset has rows, and says how many.

    Raises:
        TypeError: It has no length.
        ValueError: It is empty.
    """
    try:
        num_rows = len(dataset)
    except TypeError as error:
        raise TypeError(
            f"the dataset, {with_article(type(dataset).__name__)}, has no length ({error}): a"
            " store needs a map-style dataset with __len__ and __getitem__, or one that can be"
            " iterated over"
        ) from error
    if num_rows < 1:
        raise ValueError("the dataset is empty: there is nothing to store")


def reopen(
    dataset: Any, directory: Path, options: BuildOptions, check: str = "probes"
) -> tuple[Store, Fingerprint | None]:
    """Open the store that is where one was to be built, if it is the one that would be built.

    Args:
        dataset: The dataset.
        directory: Directory of the store.
        options: How it was to be built.
        check: How the dataset is compared with the store.

    Returns:
        The store, and the identity of the dataset that is to be recorded in it; see `recognise`.

    Raises:
        StoreError: It is not one, is damaged, or has other shards or dtypes.
        SchemaError: The options name a field that there is not.
        DatasetError: It was built from another dataset.
    """
    if not is_store(directory):
        raise no_store_error(directory, "`store_dir`")
    store = open_directory(directory)
    if options.num_shards not in (None, store.num_shards):
        raise StoreError(
            f"num_shards={options.num_shards}: the store at {directory} has {store.num_shards}"
            f" shards; build it anew with overwrite=True, or give num_shards={store.num_shards}"
        )
    dtypes = options.fields.dtypes
    store.schema.stored_as(dtypes)  # Names of no field are refused.
    for field in store.schema.fields:
        if field.dtype != dtypes.get(field.name, field.sample_dtype):
            raise StoreError(
                f"store_dtypes: the store at {directory} keeps {field.name!r} as"
                f" {dtype_name(field.dtype)}; build it anew with overwrite=True, or give"
                f" store_dtypes={{{field.name!r}: {dtype_name(field.dtype)!r}}}"
            )
    found = recognise(
        store,
        dataset,
        options.fingerprint,
        check=check,
        num_workers=options.num_workers,
        progress=options.show,
    )
    return store, found


def _record(store: Store, fingerprint: Fingerprint) -> None:
    """Record the identity of a dataset whose rows were all equal. The lock must be held."""
    # Another process may have replaced the store since this one opened it.
    with suppress(OSError):
        if Manifest.read(store.path) == store.manifest:
            replace(store.manifest, fingerprint=fingerprint).write(store.path)
