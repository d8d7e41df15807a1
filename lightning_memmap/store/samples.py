"""Samples of a dataset: read by row, and checked against the schema of a store."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Subset

from lightning_memmap.errors import DatasetError, MismatchError, SchemaError, describe_error
from lightning_memmap.sampling import Integers
from lightning_memmap.schema import Form, Schema, Values, read_forms
from lightning_memmap.schema.fields import field_name

_ONE_STRUCTURE = (
    "All rows of a store share one structure, and each field one dtype and number of dimensions:"
    " convert it in the dataset"
)


def read_sample(dataset: Any, row: int) -> Any:
    """Read one sample of a dataset."""
    try:
        return dataset[row]
    except Exception as error:
        raise _raised(row, error) from error


def read_samples(dataset: Any, rows: range | Integers) -> Sequence[Any]:
    """Read samples of a dataset, many at once where it has ``__getitems__``."""
    numbers = np.asarray(rows).tolist()
    if _gives_many(dataset):
        with suppress(Exception):  # Row by row, the error has its row.
            many = dataset.__getitems__(numbers)
            if isinstance(many, (list, tuple)) and len(many) == len(numbers):
                return many
    samples: list[Any] = []
    try:
        for row in numbers:
            sample = dataset[row]
            samples.append(sample)
    except Exception as error:
        raise _raised(numbers[len(samples)], error) from error
    return samples


def _gives_many(dataset: Any) -> bool:
    """Whether ``__getitems__`` gives what ``__getitem__`` does."""
    kind = type(dataset)
    if kind is Subset:
        return _gives_many(dataset.dataset)
    names = ("__getitems__", "__getitem__")
    owners = (next((base for base in kind.__mro__ if name in vars(base)), object) for name in names)
    many, one = owners
    return many is not object and issubclass(many, one)


def _raised(row: int, error: Exception) -> Exception:
    if isinstance(error, SchemaError):  # Of a table.
        return SchemaError(f"row {row}, {error}")
    return DatasetError(f"the dataset raised at row {row}: {describe_error(error)}")


def infer_schema(samples: Sequence[Any], rows: Sequence[int], forms: Mapping[str, Form]) -> Schema:
    """Find the schema of samples; see `Schema.infer`. An error names the row."""
    with suppress(SchemaError):
        return Schema.infer(samples, forms)
    schema: Schema | None = None
    for count, (row, sample) in enumerate(zip(rows, samples, strict=True), 1):
        try:
            schema = Schema.infer(samples[:count], forms)
        except SchemaError as error:
            if schema is not None and isinstance(error, MismatchError):
                flatten_row(sample, row, schema, lambda: samples[0])
                raise
            raise _at_row(row, error, is_bare=not _has_names(sample)) from error
    raise AssertionError("the samples have a schema")


def _has_names(sample: Any) -> bool:
    return isinstance(sample, (Mapping, tuple)) or is_dataclass(sample)


def _at_row(row: int, error: SchemaError, *, is_bare: bool, remedy: str = "") -> SchemaError:
    """An error that names the row. A sample that is one value has no field to name."""
    text = str(error)
    if is_bare and text.startswith(name := f"field {field_name(())!r}"):
        text = f"the sample{text.removeprefix(name)}"
    return SchemaError(f"row {row}, {text}{remedy}")


def stack_rows(
    samples: Sequence[Any],
    rows: range | Integers,
    schema: Schema,
    another: Callable[[], Any] | None = None,
    room: Mapping[str, Tensor] | None = None,
) -> list[Values]:
    """Stack the leaves of samples; see `Schema.stack`."""
    try:
        return schema.stack(samples, room)
    except SchemaError:
        for row, sample in zip(np.asarray(rows).tolist(), samples, strict=True):
            flatten_row(sample, row, schema, another)
        raise


def flatten_row(
    sample: Any, row: int, schema: Schema, another: Callable[[], Any] | None = None
) -> list[Tensor]:
    """The leaves of the sample at one row, by `Schema.flatten`; see `stack_rows`."""
    try:
        return schema.flatten(sample)
    except SchemaError as error:
        remedy = ""
        if isinstance(error, MismatchError):
            remedy = f". {_way_out(schema, [another(), sample]) if another else _ONE_STRUCTURE}"
        is_bare = schema.structure.is_field
        raise _at_row(row, error, is_bare=is_bare, remedy=remedy) from error


def _way_out(schema: Schema, samples: Sequence[Any]) -> str:
    """What to do about samples of which the last one does not fit."""
    known = schema.arguments()
    try:
        found = Schema.infer(samples, read_forms(known))
    except MismatchError:
        return _ONE_STRUCTURE
    except SchemaError as error:
        return str(error)
    argument = {name: each for name, each in found.arguments().items() if known.get(name) != each}
    if not argument:
        return "The records of a list must be alike within a row: convert them in the dataset"
    what = "are None" if found.optional.keys() - schema.optional.keys() else "differ in length"
    return f"Where rows {what}, that must be declared: variable={argument}"


def read_row(dataset: Any, row: int, schema: Schema) -> list[Tensor]:
    """Read the leaves of one row: `read_sample`, then `flatten_row`."""
    return flatten_row(read_sample(dataset, row), row, schema)
