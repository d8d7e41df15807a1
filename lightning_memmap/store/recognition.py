"""Whether a dataset is the one that a store was built from."""

import logging
import os
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from lightning_memmap.errors import DatasetError, SchemaError
from lightning_memmap.schema.fields import Values
from lightning_memmap.schema.shared_memory import copy_sample
from lightning_memmap.store.build_spec import BuildSpec
from lightning_memmap.store.identity import Identity
from lightning_memmap.store.samples import NUM_PROBES, choose_block_rows, hash_row, stack_rows
from lightning_memmap.store.sources.iterable import is_iterable_only, is_read_once, iterate_samples
from lightning_memmap.store.sources.source import make_source
from lightning_memmap.store.store import Store
from lightning_memmap.store.workers import Workers, make_task_runner

_log = logging.getLogger(__name__)


def check_dataset(
    store: Store, dataset: Any, fingerprint: str | None = None, *, num_workers: int = 0
) -> None:
    """Check that a store may be of a dataset: compare fingerprints, or else probe rows."""
    if not is_iterable_only(dataset):
        _check_num_rows(store, len(dataset))
    stored = store.manifest.identity
    if fingerprint is not None and stored is not None and stored.by_user is not None:
        if fingerprint != stored.by_user:
            difference = f"fingerprint={fingerprint!r}, and the store has {stored.by_user!r}"
            raise _make_other_dataset_error(store, difference)
    elif is_iterable_only(dataset):
        _check_first_rows(store, dataset)
    else:
        probes = store.manifest.probes
        with Workers(dataset, min(num_workers, len(probes))) as workers:
            workers.run(make_task_runner(_check_probe, store), probes, lambda *_: None)


def recognise(store: Store, spec: BuildSpec) -> Identity | None:
    """Check that a store is the one that would be built, and compare as few rows as that takes.

    Returns:
        The identity of the dataset if the store should record it; None if it has it already.
    """
    fingerprint = spec.fingerprint
    stored = store.manifest.identity
    is_decided = fingerprint is not None and stored is not None and stored.by_user is not None
    # Before a row is read: a dataset may cache rows, which would change its identity.
    identity = None if is_decided else spec.identity
    check_dataset(store, spec.dataset, fingerprint, num_workers=spec.num_workers)
    if identity is None:
        return None
    if stored is not None:
        changed = stored.difference(identity)
        # It is recorded only if all rows are equal: those that the user's fingerprint stood for.
        identity = replace(identity, by_user=fingerprint or stored.by_user)
    else:
        changed = None if fingerprint is None else "the store has no fingerprint yet"
    if changed is None:
        return None
    _log.warning(
        "the store at %s may be of another dataset: %s. All %s rows are compared with it, %s",
        store.path,
        changed,
        f"{store.num_rows:,}",
        _comparison_advice(store.path, fingerprint),
    )
    _compare_all(store, spec)
    return None if identity == stored else identity


def _comparison_advice(path: Path, fingerprint: str | None) -> str:
    """Say how often all rows are compared, and how to avoid it."""
    if not os.access(path, os.W_OK):
        return (
            "each time, since this process may not write there and record that they are equal:"
            " train without the dataset, which uses the store as it is, or let the owner of the"
            " store train with this dataset once"
        )
    if fingerprint is None:
        return "once; set your own fingerprint (fingerprint=, --fingerprint) to avoid that"
    recorded = f"fingerprint={fingerprint!r} is recorded, and decides from then on"
    return f"once; if they are equal, {recorded}"


def _check_num_rows(store: Store, num_rows: int) -> None:
    if num_rows != (old := store.num_rows):
        difference = f"the dataset has {num_rows} rows, the store {old}"
        if num_rows > old:
            difference += (
                f" (if it has grown at its end, append_store(Subset(dataset, range({old},"
                f" {num_rows})), {str(store.path)!r}) adds the new rows)"
            )
        raise _make_other_dataset_error(store, difference)


def _check_first_rows(store: Store, dataset: Any) -> None:
    if is_read_once(dataset):
        raise DatasetError(
            f"a {type(dataset).__name__} yields its rows once, and can't be compared with the store"
            f" at {store.path}. Set a fingerprint here and when you build it, pass no dataset to"
            " use the store as it is, or set overwrite=True"
        )
    _compare_samples(store, islice(iterate_samples(dataset), NUM_PROBES))


def _compare_all(store: Store, spec: BuildSpec) -> None:
    """Compare all rows of a dataset with the stored rows."""
    if spec.is_iterable_only:
        _check_num_rows(store, _compare_samples(store, iterate_samples(spec.dataset)))
        return
    rows = range(store.num_rows)
    row_bytes = store.manifest.row_bytes
    step = choose_block_rows(row_bytes)
    blocks = (rows[start : start + step] for start in range(0, len(rows), step))
    with (
        spec.show("comparing", len(rows), row_bytes) as advance,
        Workers(spec.dataset, spec.num_workers) as workers,
    ):
        workers.run(
            make_task_runner(_compare_rows, store), blocks, lambda rows, _: advance(len(rows))
        )


def _compare_rows(store: Store, dataset: Any, rows: range) -> None:
    """Compare rows of a dataset with the stored rows."""
    _compare(store, rows, partial(make_source(dataset, store.schema).read, rows))


def _compare_samples(store: Store, samples: Iterable[Any]) -> int:
    """Compare samples, from the first one on, with the rows of a store. Returns their number."""
    num_rows = 0
    samples = map(copy_sample, samples)
    while block := list(islice(samples, choose_block_rows(store.manifest.row_bytes))):
        rows = range(num_rows, num_rows + len(block))
        if rows.stop > store.num_rows:
            difference = f"the dataset has more rows than the store ({store.num_rows})"
            raise _make_other_dataset_error(store, difference)
        _compare(store, rows, partial(stack_rows, block, rows, store.schema))
        num_rows = rows.stop
    return num_rows


def _compare(store: Store, rows: range, read: Callable[[], list[Values]]) -> None:
    """Read rows and compare them with the stored rows."""
    fields = store.schema.fields
    all_stored = store.read(np.asarray(rows, np.int64))
    for field, stored, values in zip(fields, all_stored, _read_as_stored(store, read), strict=True):
        for row, one, other in zip(rows, values.rows(), stored.rows(), strict=True):
            if hash_row([one]) != hash_row([other]):
                raise _make_other_row_error(store, row, f", in field {field.name!r}")


def _check_probe(store: Store, dataset: Any, probe: tuple[int, str]) -> None:
    """Compare the hash of a row with the hash in the manifest. No stored row is read."""
    row, expected = probe
    read = partial(make_source(dataset, store.schema).read, range(row, row + 1))
    if hash_row([next(values.rows()) for values in _read_as_stored(store, read)]) != expected:
        raise _make_other_row_error(store, row)


def _read_as_stored(store: Store, read: Callable[[], list[Values]]) -> list[Values]:
    try:
        return read()
    except SchemaError as error:
        raise _make_other_dataset_error(store, str(error)) from error


def _make_other_row_error(store: Store, row: int, where: str = "") -> DatasetError:
    difference = f"row {row} of the dataset differs from the stored row{where}"
    return _make_other_dataset_error(store, difference)


def _make_other_dataset_error(store: Store, difference: str) -> DatasetError:
    return DatasetError(
        f"{difference}: the store at {store.path} was built from another dataset. Build it again"
        " (`overwrite=True`, or `lightning-memmap store build --overwrite`), choose another"
        " directory, or pass no dataset to use the store as it is"
    )
