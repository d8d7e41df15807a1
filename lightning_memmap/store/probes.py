"""Probe rows: a few rows that identify a dataset, and show whether it is random."""

import pickle
import warnings
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from lightning_memmap.errors import DatasetError, SchemaError
from lightning_memmap.schema import Schema
from lightning_memmap.schema.field_options import FieldOptions
from lightning_memmap.schema.fields import dtype_name
from lightning_memmap.store.hashing import hash_row, leaf_bytes
from lightning_memmap.store.samples import flatten_row, merged_schema, read_row, read_sample
from lightning_memmap.store.workers import Workers, run_tasks

NUM_PROBES = 8
#: The most rows that are read to find out what a list consists of that is empty in the first ones.
MAX_PROBES = 1024
_MOMENT_S = 0.1


def probe_rows(num_rows: int) -> list[int]:
    """Choose the probe rows of a dataset: spread over it, the first and the last row among them.

    Args:
        num_rows: Rows of the dataset, at least 1.

    Returns:
        At most `NUM_PROBES` rows in ascending order.
    """
    return sorted(set(np.linspace(0, num_rows - 1, NUM_PROBES).astype(np.int64).tolist()))


@dataclass(frozen=True)
class Probe:
    """A row that was the same in two reads.

    Args:
        row: The row.
        schema: The schema of its sample.
        digest: Its hash; see `hash_row`.
        duration_s: Seconds that the first of the two reads took.
        num_bytes: Bytes of the row over all fields.
    """

    row: int
    schema: Schema
    digest: str
    duration_s: float
    num_bytes: int


def first_sample(dataset: Any, num_workers: int) -> Any:
    """Read the first sample of a dataset, in the process in which `take_probes` would read it.

    A sample of a class that cannot be sent from there is read in this process.

    Args:
        dataset: The dataset.
        num_workers: With 0, this process reads; otherwise a worker process does.

    Returns:
        The sample of row 0, as a value of this process.

    Raises:
        DatasetError: The dataset raised an error, or the worker process died.
    """
    if num_workers == 0:
        return read_sample(dataset, 0)
    pickled: list[bytes | None] = []
    run_tasks(_PickledSample(dataset), [0], 1, pickled.append)
    return read_sample(dataset, 0) if pickled[0] is None else pickle.loads(pickled[0])


@dataclass(frozen=True)
class _PickledSample:
    dataset: Any

    def __call__(self, row: int) -> bytes | None:
        sample = read_sample(self.dataset, row)
        try:
            return pickle.dumps(sample)
        except Exception:  # Its class may raise anything.
            return None


def take_probes(workers: Workers, num_rows: int, options: FieldOptions) -> list[Probe]:
    """Read each probe row twice and hash it.

    Args:
        workers: Read the dataset. Where there are processes, this one reads no row: a file that the
            dataset opens at the first read would be shared with all processes that are forked
            later, and with it the position of the next read.
        num_rows: The length of the dataset.
        options: What the user says of fields.

    Returns:
        The probes in ascending order of rows. All have the schema that has all their samples.

    Raises:
        SchemaError: A sample cannot be stored, or differs from row 0 in more than the lengths of
            fields; or ``options`` do not fit the samples.
        DatasetError: A row differs between the two reads, so the dataset is random; or the dataset
            raised an error.
    """
    rows, probes, found = probe_rows(num_rows), list[Probe](), list[tuple[Schema, int]]()
    prober = partial(_Prober, options=options)
    workers.run(prober, [rows], probes.extend)
    # Where rows are slow, the others are read by several processes.
    others = [[row] for row in rows[len(probes) :]]
    workers.run(partial(prober, schema=probes[-1].schema), others, probes.extend)
    schema = probes[0].schema
    for probe in probes:
        try:
            merged = schema.merged(probe.schema)
        except SchemaError as error:
            raise SchemaError(f"row {probe.row}: {error}") from error
        # Each was merged with the first one, so that any two of them differ in no more than that.
        assert merged is not None
        schema = merged.stored_as(options.dtypes)
    num_read = len(probes)
    if wanted := schema.unknown.keys() & options.names:
        more = np.linspace(0, num_rows - 1, MAX_PROBES).astype(np.int64)
        search = partial(_Search, schema=schema, names=wanted)
        workers.run(search, [np.unique(more).tolist()], found.append)
        schema, num_read = found[0][0].stored_as(options.dtypes), found[0][1]
    check_known(schema, options.names, num_read)
    schema = schema.declaring(options.forms)
    warn_of_mixed_numbers(schema)
    # What a row consists of, and so its hash, may depend on what other rows have shown.
    stale = {
        probe.row
        for probe in probes
        if probe.schema.structure != schema.structure
        or (schema.optional and probe.schema.fields != schema.fields)
    }
    probes = [replace(probe, schema=schema) for probe in probes if probe.row not in stale]
    tasks = [[row] for row in sorted(stale)]
    workers.run(partial(prober, schema=schema), tasks, probes.extend)
    return sorted(probes, key=lambda probe: probe.row)


def check_known(schema: Schema, named: Collection[str], num_read: int) -> None:
    """Check that the rows that were read first show what to store of the others.

    Args:
        schema: The schema that has all of them.
        named: Names in the arguments ``variable`` and ``store_dtypes``.
        num_read: How many rows were read.

    Raises:
        SchemaError: They do not. The message says what to do.
    """
    if not schema.fields:
        raise SchemaError(
            f"the {num_read} rows that were read first hold no tensor, array or number: empty lists"
            " and None have no dtype; give arrays, or add a field that has values"
        )
    for name, what in schema.unknown.items():
        if name in named or what == "None":
            way_out = (
                "give arrays in place of lists, such as numpy.array(values, numpy.int64)"
                if what != "None"
                else f"let more rows be read with variable={{{name!r}: 'nullable'}}"
                if name not in named
                else "leave it out of the samples"
            )
            raise SchemaError(
                f"field {name!r} is {what} in each of the {num_read} rows that were read first, so"
                f" that its dtype is not known: {way_out}"
            )


def warn_of_mixed_numbers(schema: Schema) -> None:
    """Warn where a list of numbers in a record is no field, since these differ in dtype.

    Args:
        schema: The schema of all samples.
    """
    dtypes = {field.name: dtype_name(field.sample_dtype) for field in schema.fields}
    for name, names in schema.mixed_numbers.items():
        found = " and ".join(sorted({dtypes[each] for each in names}))
        warnings.warn(
            f"field {name!r}: a record has a list of {found} there, so that each number is a field"
            f" of its own, {names[0]!r} and so on. To make the list one field, give all of its"
            " numbers one dtype, such as [1.0, 2.0]; for fields of their own, give a tuple",
            stacklevel=2,
        )


@dataclass(frozen=True)
class _Search:
    """Reads rows until these show what has some names: lists that were empty, and None.

    It returns the schema, and how many rows were read.
    """

    dataset: Any
    schema: Schema
    names: Collection[str]

    def __call__(self, rows: list[int]) -> tuple[Schema, int]:
        schema = self.schema
        for count, row in enumerate(rows, 1):
            schema = merged_schema(schema, read_sample(self.dataset, row)) or schema
            if not schema.unknown.keys() & set(self.names):
                return schema, count
        return schema, len(rows)


@dataclass(frozen=True)
class _Prober:
    """Probes as many rows as fit into `_MOMENT_S`.

    The first row sets the schema where none is given; later ones may differ in length.
    """

    dataset: Any
    options: FieldOptions
    schema: Schema | None = None

    def __call__(self, rows: list[int]) -> list[Probe]:
        end = perf_counter() + _MOMENT_S
        probes = [self._probe(rows[0], self.schema)]
        for row in rows[1:]:
            if perf_counter() > end:
                break
            probes.append(self._probe(row, probes[-1].schema))
        return probes

    def _probe(self, row: int, schema: Schema | None) -> Probe:
        start = perf_counter()
        sample = read_sample(self.dataset, row)
        duration_s = perf_counter() - start
        try:
            if schema is None:
                schema = self.options.schema_of(sample)
        except SchemaError as error:
            raise SchemaError(f"row {row}, {error}") from error
        if (merged := merged_schema(schema, sample)) is not None:
            schema = merged.stored_as(self.options.dtypes)
        leaves = flatten_row(sample, row, schema)
        again = read_row(self.dataset, row, schema)
        for field, one, other in zip(schema.fields, leaves, again, strict=True):
            if leaf_bytes(one).tobytes() != leaf_bytes(other).tobytes():
                raise random_dataset_error(row, field.name)
        num_bytes = sum(leaf_bytes(leaf).nbytes for leaf in leaves)
        return Probe(row, schema, hash_row(leaves), duration_s, num_bytes)


def random_dataset_error(row: int, field: str) -> DatasetError:
    """Make the error for a dataset whose rows change from read to read.

    Args:
        row: The first row that was seen to differ.
        field: The field that differs.

    Returns:
        The error, to be raised by the caller.
    """
    return DatasetError(
        f"row {row}, field {field!r}: two reads of the same row differ, so the dataset is"
        " random, and a store would freeze its augmentation; or it gives arrays that it later"
        " overwrites. Take the random part out of the dataset and pass it as `transform=`, where"
        " it runs on every batch (`lightning_memmap.transforms.PerSample` adapts a per-sample"
        " callable); give copies of arrays that are used again"
    )
