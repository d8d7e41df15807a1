"""Samples of a dataset: read by row, and checked against the schema of a store."""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import Subset

from lightning_memmap.errors import DatasetError, MismatchError, SchemaError, describe_error
from lightning_memmap.integers import Integers
from lightning_memmap.schema.fields import Values, field_name
from lightning_memmap.schema.forms import Declared
from lightning_memmap.schema.schema import Schema
from lightning_memmap.schema.shared_memory import SharedMemoryCheck, copy_sample
from lightning_memmap.store.files import leaf_bytes
from lightning_memmap.store.workers import RowIndices, Workers, make_task_runner

NUM_PROBES = 8
#: Limits of the samples that are held as Python objects before they are stacked.
_HELD_BYTES = 2**20
_MAX_HELD_ROWS = 1024
#: The most rows that are read to find the dtype of a list that is empty in the first rows.
MAX_PROBES = 1024
_ONE_STRUCTURE = (
    "All rows of a store share one structure, and each field one dtype and number of dimensions:"
    " convert it in the dataset"
)


def read_sample(dataset: Any, row: int) -> Any:
    """Read one sample of a dataset."""
    try:
        return dataset[row]
    except SchemaError as error:  # Raised by a column of a table.
        raise SchemaError(f"row {row}, {error}") from error
    except Exception as error:
        raise DatasetError(f"the dataset raised at row {row}: {describe_error(error)}") from error


class SampleReader:
    """Reads samples of a dataset, and stacks their leaves.

    Samples are held until they are stacked. If some share memory, the dataset may have overwritten
    it, so they are read again, and copied one by one from then on.
    """

    def __init__(self, dataset: Any, schema: Schema) -> None:
        self._dataset = dataset
        self._schema = schema
        self._use_getitems = _has_matching_getitems(dataset)
        self._is_copying = False

    def read(self, rows: RowIndices) -> list[Values]:
        """Read rows, as one value per field."""
        indices = list(rows) if isinstance(rows, range) else rows.tolist()
        if self._use_getitems and (many := self._read_many(indices)) is not None:
            if (stacked := self._try_stacking(many, rows, is_exact=True)) is not None:
                return stacked
            self._use_getitems = False
        if not self._is_copying:
            samples = [read_sample(self._dataset, row) for row in indices]
            if (stacked := self._try_stacking(samples, rows, is_exact=False)) is not None:
                return stacked
            self._is_copying = True
        samples = [copy_sample(read_sample(self._dataset, row)) for row in indices]
        return stack_rows(samples, rows, self._schema, self._read_first)

    def _try_stacking(
        self, samples: Sequence[Any], rows: RowIndices, *, is_exact: bool
    ) -> list[Values] | None:
        """Stack samples; None if some share memory, or were read together and don't fit."""
        if len(samples) == 1 and not is_exact:
            return stack_rows(samples, rows, self._schema, self._read_first)
        sharing = SharedMemoryCheck(is_exact=is_exact)
        try:
            stacked = self._schema.stack(samples, sharing)
        except SchemaError:
            # Samples read together may differ from single ones, as in formats of Hugging Face.
            if not (is_exact or sharing.is_shared):
                stack_rows(samples, rows, self._schema, self._read_first)  # Raises, with the row.
            return None
        return None if sharing.is_shared else stacked

    def _read_first(self) -> Any:
        return read_sample(self._dataset, 0)

    def _read_many(self, rows: list[int]) -> Sequence[Any] | None:
        with suppress(Exception):  # Reading row by row raises it too, with the row.
            many = self._dataset.__getitems__(rows)
            if isinstance(many, (list, tuple)) and len(many) == len(rows):
                return many
        return None


def choose_block_rows(row_bytes: int) -> int:
    """Return the number of samples to hold before they are stacked."""
    return max(1, min(_MAX_HELD_ROWS, _HELD_BYTES // max(1, row_bytes)))


def read_first_sample(dataset: Any, num_workers: int) -> Any:
    """Read the first sample of a dataset, in a worker process if it has any."""
    if num_workers:
        with suppress(Exception):  # The class of the sample may not be picklable.
            with Workers(dataset, 1) as workers:
                pickled = workers.run_one(make_task_runner(_pickle_sample), 0)
            return pickle.loads(pickled)
    return read_sample(dataset, 0)


def _pickle_sample(dataset: Any, row: int) -> bytes:
    return pickle.dumps(read_sample(dataset, row))


def _has_matching_getitems(dataset: Any) -> bool:
    """Return whether ``__getitems__`` is as specific as ``__getitem__``.

    A subclass that overrides only ``__getitem__`` inherits a ``__getitems__`` with other samples.
    """
    python_type = type(dataset)
    if python_type is Subset:
        return _has_matching_getitems(dataset.dataset)
    names = ("__getitems__", "__getitem__")
    many_owner, one_owner = (
        next((base for base in python_type.__mro__ if name in vars(base)), object) for name in names
    )
    return many_owner is not object and issubclass(many_owner, one_owner)


def infer_schema(samples: Sequence[Any], rows: Sequence[int], declared: Declared) -> Schema:
    """Infer the schema of samples; see `Schema.infer`. Errors name the row."""
    with suppress(SchemaError):
        return Schema.infer(samples, declared)
    schema: Schema | None = None
    for count, (row, sample) in enumerate(zip(rows, samples, strict=True), 1):
        try:
            schema = Schema.infer(samples[:count], declared)
        except SchemaError as error:
            if schema is not None and isinstance(error, MismatchError):
                try:
                    flatten_row(sample, row, schema, lambda: samples[0])
                except SchemaError as row_error:
                    # It may be about another field, which only needs to be declared.
                    if str(error).partition(":")[0] in str(row_error):
                        raise
                raise SchemaError(f"row {row}, {error}. {_ONE_STRUCTURE}") from error
            has_names = isinstance(sample, (Mapping, tuple)) or is_dataclass(sample)
            raise _name_row(row, error, is_bare=not has_names) from error
    raise AssertionError("the samples have a schema")


def _name_row(row: int, error: SchemaError, *, is_bare: bool, remedy: str = "") -> SchemaError:
    """Make an error that names the row. A bare sample is one value, and has no field to name."""
    text = str(error)
    if is_bare and text.startswith(name := f"field {field_name(())!r}"):
        text = f"the sample{text.removeprefix(name)}"
    return SchemaError(f"row {row}, {text}{remedy}")


def stack_rows(
    samples: Sequence[Any],
    rows: range | Integers,
    schema: Schema,
    read_other: Callable[[], Any] | None = None,
) -> list[Values]:
    """Stack the leaves of samples; see `Schema.stack`. Errors name the row.

    For `read_other`, see `flatten_row`.
    """
    try:
        return schema.stack(samples)
    except SchemaError:
        for row, sample in zip(np.asarray(rows).tolist(), samples, strict=True):
            flatten_row(sample, row, schema, read_other)
        raise


def flatten_row(
    sample: Any, row: int, schema: Schema, read_other: Callable[[], Any] | None = None
) -> list[Tensor]:
    """Return the leaves of a sample; see `Schema.flatten`. Errors name the row.

    `read_other` reads a sample that fits, so that an error can say what to declare.
    """
    try:
        return schema.flatten(sample)
    except SchemaError as error:
        remedy = ""
        if isinstance(error, MismatchError):
            sample = copy_sample(sample)  # Reading another sample may overwrite it.
            advice = _ONE_STRUCTURE
            if read_other is not None:
                advice = _suggest_declaration(schema, [read_other(), sample])
            remedy = f". {advice}"
        is_bare = schema.structure.field is not None
        raise _name_row(row, error, is_bare=is_bare, remedy=remedy) from error


def _suggest_declaration(schema: Schema, samples: Sequence[Any]) -> str:
    """Return what to declare so that all samples fit, where the last one doesn't fit a schema."""
    try:
        wider = Schema.infer(samples, schema.declared)
    except MismatchError:
        return _ONE_STRUCTURE
    except SchemaError as error:
        return str(error)
    new = wider.declared.beyond(schema.declared)
    if not new.names:
        return (
            "The records of a list must be alike within a row: convert them in the dataset; a value"
            " that may be None is declared by its name, as in nullable=['boxes.label']"
        )
    difference = "are None" if new.nullable else "differ in length"
    return f"Where rows {difference}, that must be declared: {new}"


def find_schema(
    samples: list[Any], rows: list[int], declared: Declared, more: Iterator[tuple[int, Any]]
) -> Schema:
    """Infer the schema of samples, and read more of them while a declared dtype is unknown.

    Args:
        samples: The first samples. More are appended.
        rows: The row of each sample. More are appended.
        declared: The declarations of the user about fields.
        more: Further rows and samples.
    """
    schema = infer_schema(samples, rows, declared)
    # Double the samples each time, because all of them are checked again.
    while schema.unknown.keys() & declared.names and (new := list(islice(more, len(samples)))):
        rows += [row for row, _ in new]
        samples += [sample for _, sample in new]
        schema = infer_schema(samples, rows, declared)
    for name, what in schema.unknown.items():
        if what == "an empty tuple" and name not in declared.names:
            continue  # A tuple has one length.
        is_none = what == "None"
        argument = "nullable" if is_none else "variable"
        remedy = "return arrays, such as numpy.array(values, numpy.int64)"
        if is_none:
            remedy = "fill it as its type allows, such as with NaN, 0, '' or a date"
        if name not in declared.names:
            remedy += f", let more rows be read with {argument}={[name]!r}"
        raise SchemaError(
            f"field {name!r} is {what} in each of the {len(rows)} rows that were read first, so"
            f" that its dtype is not known: {remedy}, or leave it out of the samples"
        )
    return schema


def choose_probe_rows(num_rows: int) -> list[int]:
    """Return the probe rows of a dataset: evenly spaced, from the first row to the last."""
    return sorted(set(np.linspace(0, num_rows - 1, NUM_PROBES).astype(np.int64).tolist()))


def hash_row(leaves: Sequence[Tensor | np.ndarray]) -> str:
    """Hash the leaves of a row, on the CPU: XXH3 of all shapes and bytes."""
    digest = xxhash.xxh3_64()
    for leaf in leaves:
        # Without shapes, ("ab", "c") and ("a", "bc") would have one hash.
        digest.update(np.array([leaf.ndim, *leaf.shape], np.int64).data)
        # Images of one bit store True as any byte but 0. A copy stores 1.
        is_bool = leaf.dtype in (torch.bool, np.bool_)
        digest.update(leaf_bytes(leaf & True if is_bool else leaf).data)
    return digest.hexdigest()


class RandomDatasetError(DatasetError):
    """Two reads of one row differ, so the build keeps no rows."""


def make_random_dataset_error(row: int, fields: Sequence[str]) -> RandomDatasetError:
    """Make the error for a dataset of which two reads of one row differ."""
    names = ", ".join(map(repr, fields))
    return RandomDatasetError(
        f"row {row}, field {names}: two reads of the same row differ, so the dataset is random, and"
        " a store would freeze its augmentation. Take the random part out of the dataset and pass"
        " it as `transform=`, where it runs on every batch"
        " (`lightning_memmap.transforms.PerSample` adapts a per-sample callable)"
    )
