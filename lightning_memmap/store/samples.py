"""Samples of a dataset: read by row, and checked against the schema of a store."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Subset

from lightning_memmap.errors import DatasetError, MismatchError, SchemaError, describe_error
from lightning_memmap.sampling import Integers
from lightning_memmap.schema import Schema


def read_sample(dataset: Any, row: int) -> Any:
    """Read one sample of a dataset.

    Raises:
        DatasetError: The dataset raised an error at this row.
    """
    try:
        return dataset[row]
    except Exception as error:
        raise _raised(row, error) from error


def read_samples(dataset: Any, rows: range | Integers) -> Sequence[Any]:
    """Read samples of a dataset, many at once where it has ``__getitems__``.

    Raises:
        DatasetError: The dataset raised an error; the message names the row.
    """
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
    """Whether ``__getitems__`` gives what ``__getitem__`` does.

    It need not in a class that inherits it and has a ``__getitem__`` of its own.
    """
    kind = type(dataset)
    if kind is Subset:
        return _gives_many(dataset.dataset)
    names = ("__getitems__", "__getitem__")
    owners = (next((base for base in kind.__mro__ if name in vars(base)), object) for name in names)
    many, one = owners
    return many is not object and issubclass(many, one)


def _raised(row: int, error: Exception) -> DatasetError:
    return DatasetError(f"the dataset raised at row {row}: {describe_error(error)}")


def flatten_row(sample: Any, row: int, schema: Schema) -> list[Tensor | np.ndarray]:
    """Return the leaves of the sample at one row, checked by `Schema.flatten`.

    Args:
        sample: The sample.
        row: The row that it was read from, for messages.
        schema: The schema of the store.

    Raises:
        SchemaError: The sample does not fit. The message names the row.
    """
    try:
        return schema.flatten(sample)
    except MismatchError as error:
        raise SchemaError(f"row {row}, {error}. {_way_out(schema, sample)}") from error
    except SchemaError as error:
        raise SchemaError(f"row {row}, {error}") from error


def _way_out(schema: Schema, sample: Any) -> str:
    """What to do about a sample that does not fit."""
    try:
        merged = schema.merged(Schema.from_sample(sample))
    except SchemaError as error:
        return str(error)
    if merged is None:
        return (
            "All rows of a store share one structure, and each field one dtype and number of"
            " dimensions: convert it in the dataset"
        )
    known, found = schema.arguments(), merged.arguments()
    argument = {name: each for name, each in found.items() if known.get(name) != each}
    if not argument:
        return "The records of a list must be alike within a row: convert them in the dataset"
    what = "are None" if merged.optional.keys() - schema.optional.keys() else "differ in length"
    return f"Where rows {what}, that must be declared: variable={argument}"


def merged_schema(schema: Schema, sample: Any) -> Schema | None:
    """Find the schema that has one more sample.

    Args:
        schema: The schema of some samples.
        sample: Another sample.

    Returns:
        The schema; None where the sample differs in more than the lengths of fields.
    """
    try:
        return schema.merged(Schema.from_sample(sample))
    except SchemaError:
        return None


def read_row(dataset: Any, row: int, schema: Schema) -> list[Tensor | np.ndarray]:
    """Read the leaves of one row: `read_sample`, then `flatten_row`.

    Raises:
        DatasetError: The dataset raised an error at this row.
        SchemaError: The sample does not fit. The message names the row.
    """
    return flatten_row(read_sample(dataset, row), row, schema)
