"""Probe rows: rows that show the schema of a dataset, identify it, and show if it is random."""

from contextlib import suppress
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from lightning_memmap.errors import SchemaError
from lightning_memmap.schema.forms import Declared
from lightning_memmap.schema.held import copy_sample
from lightning_memmap.schema.schema import Schema
from lightning_memmap.store.files import leaf_bytes
from lightning_memmap.store.samples import (
    MAX_PROBES,
    choose_probe_rows,
    find_schema,
    flatten_row,
    hash_row,
    read_sample,
)
from lightning_memmap.store.sources.table_structure import find_columns, infer_structure
from lightning_memmap.store.workers import Workers, make_task_runner


class Probes(NamedTuple):
    """The schema, hashes and costs found by reading the probe rows."""

    schema: Schema
    digests: tuple[tuple[int, str], ...]
    """Row and hash of each probe row; see `hash_row`."""
    row_s: float
    """Median seconds to read a row."""
    row_bytes: int
    """Bytes of the largest probe row, over all fields."""
    typical_bytes: float
    """Median bytes of a probe row."""


def read_probes_in_worker(workers: Workers, num_rows: int, declared: Declared | Schema) -> Probes:
    """Read the probe rows of a dataset in one of its workers; see `read_probes`."""
    results = list[Probes]()
    workers.run(
        make_task_runner(read_probes, declared), [num_rows], lambda _, read: results.append(read)
    )
    return results[0]


def read_probes(declared: Declared | Schema, dataset: Any, num_rows: int) -> Probes:
    """Read and hash the probe rows of a dataset, and infer its schema unless one is passed.

    Args:
        declared: The schema, or the declarations of the user about fields.
        dataset: The dataset.
        num_rows: Its number of rows.
    """
    rows = choose_probe_rows(num_rows)
    durations = list[float]()
    samples = list[Any]()
    for row in rows:
        start = perf_counter()
        samples.append(copy_sample(read_sample(dataset, row)))
        durations.append(perf_counter() - start)
    schema = declared
    if isinstance(schema, Declared):
        schema = _infer_schema(dataset, samples, rows, schema)
    digests = []
    sizes = list[int]()
    for row, sample in zip(rows, samples, strict=True):
        leaves = flatten_row(sample, row, schema)
        digests.append((row, hash_row(leaves)))
        sizes.append(sum(leaf_bytes(leaf).nbytes for leaf in leaves))
    return Probes(schema, tuple(digests), median(durations), max(sizes), median(sizes))


def _infer_schema(dataset: Any, samples: list[Any], rows: list[int], declared: Declared) -> Schema:
    """Infer the schema of a table from its columns. Infer it from probe samples for other datasets,
    and from more rows if those leave a dtype unknown."""
    if (columns := find_columns(dataset)) is not None:
        with suppress(SchemaError):  # Reading the row later raises it, with the row.
            schema = Schema.of(infer_structure(columns, samples, declared), declared)
            if not schema.unknown:
                return schema
    spread = np.linspace(0, len(dataset) - 1, MAX_PROBES).astype(np.int64).tolist()
    more_rows = sorted({*spread} - {*rows})[: MAX_PROBES - len(rows)]
    more = ((row, copy_sample(read_sample(dataset, row))) for row in more_rows)
    return find_schema([*samples], [*rows], declared, more)
