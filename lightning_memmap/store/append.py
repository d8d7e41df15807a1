"""Append the rows of a dataset to a store, as a build of both with the schema of the store."""

import logging
from pathlib import Path
from reprlib import repr as short_repr
from typing import Any

from lightning_memmap.errors import DatasetError, with_article
from lightning_memmap.schema.forms import Declared
from lightning_memmap.sizes import format_bytes
from lightning_memmap.store.build import write_and_finish
from lightning_memmap.store.building import Building
from lightning_memmap.store.identity import Fingerprint
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.probes import read_probes_in_worker
from lightning_memmap.store.request import BuildRequest, find_class_names, get_class_name
from lightning_memmap.store.store import Store, open_directory
from lightning_memmap.store.workers import Workers
from lightning_memmap.store.writing import Appended

#: The most characters of the names of the datasets.
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
    """Append the rows of a dataset to a store. They get the next row numbers.

    A new version is written and then replaces the old one. A process that has the store open keeps
    its rows. An interrupted call leaves the store as it was, and the same call resumes it. All
    bytes of the old version are verified and copied, so the disk must have room for both versions:
    append seldom, and many rows at once.

    Args:
        dataset: A map-style dataset whose samples have the structure, dtypes and shapes of the
            store.
        path: Directory of the store.
        num_workers: Worker processes that read the dataset; with 0, this process does.
        fingerprint: Your own identity of all rows together. Without one, eight rows decide whether
            the store is of a dataset, such as a ``ConcatDataset`` of both.
        progress: Show a progress bar.

    Returns:
        The new version of the store, open.

    Raises:
        TypeError: The dataset has no length, or an argument has the wrong type.
        ValueError: The dataset is empty or a stream, or an argument is out of range.
        SchemaError: A sample doesn't fit the store; the message names row and field.
        DatasetError: The dataset raised an error or is random, or a worker process died.
        StoreNotFoundError: There isn't a store at this path.
        StoreError: The store is damaged, or this process may not replace it.
        OSError: The disk is full, or the files cannot be written.
    """
    request = BuildRequest(dataset, path, None, num_workers, fingerprint, Declared(), progress)
    if request.is_stream:
        raise ValueError(
            f"{with_article(type(dataset).__name__)}: only a map-style dataset can be appended;"
            " build a store from it, and append that store"
        )
    directory = request.directory
    identity = request.identity
    open_directory(directory.path)  # Before a lock file is created in an empty directory.
    with directory.locked():
        store = open_directory(directory.path)
        store.check_bytes(request.show, num_threads=max(2, num_workers))
        classes = _merge_classes(store, dataset)
        both = Appended(store, dataset)
        _log.warning(
            "appending %s rows to %s: copying %s of the old version",
            f"{len(dataset):,}",
            directory.path,
            format_bytes(store.manifest.num_bytes),
        )
        with Workers(dataset, num_workers) as readers:
            probes = read_probes_in_worker(readers, len(dataset), store.schema)
        added = ((store.num_rows + row, digest) for row, digest in probes.digests)
        name = f"{store.manifest.source.get('dataset', 'a table')} + {get_class_name(dataset)}"
        draft = Manifest.draft(
            both.num_rows,
            store.num_shards,
            store.schema,
            probes=(*store.manifest.probes, *added),
            fingerprint=identity,
            classes=classes,
            source={"dataset": name[-_MAX_SOURCE:], ".old rows": store.manifest.content},
        )
        new_identity = Fingerprint({}, fingerprint) if fingerprint is not None else None
        with Workers(both, num_workers) as workers:
            building = Building.begin(
                directory.path, draft, resume=True, row_bytes=store.manifest.row_bytes
            )
            write_and_finish(request, building, workers, probes, fingerprint=new_identity)
    return open_directory(directory.path)


def _merge_classes(store: Store, dataset: Any) -> tuple[str, ...]:
    """Merge the class names of a store and of a dataset that is appended to it, by label."""
    old = store.classes
    new = find_class_names(dataset)
    if not (old and new):
        return old
    for label, (one, other) in enumerate(zip(old, new, strict=False)):
        if one != other:
            raise DatasetError(
                f"dataset: label {label} is the class {other!r}, and {one!r} in the store at"
                f" {store.path}. Use the labels of the store, whose"
                f" classes are {short_repr(list(old))}"
            )
    return max(old, new, key=len)
