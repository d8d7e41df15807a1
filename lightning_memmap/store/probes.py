"""Find the schema of a dataset by reading probe rows, and the columns of a table.

Probe rows also identify a dataset, and show if it is random. Which values of a table are None or
differ in length shows in its columns. For a ``Subset``, all rows of its table count, so that
training and validation rows of one table have one schema.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from lightning_memmap.errors import SchemaError
from lightning_memmap.schema.forms import Declared
from lightning_memmap.schema.infer import Inference, widen_fields
from lightning_memmap.schema.kinds import is_null
from lightning_memmap.schema.schema import Schema
from lightning_memmap.schema.shared_memory import copy_sample
from lightning_memmap.schema.structure import Node
from lightning_memmap.store.files import leaf_bytes
from lightning_memmap.store.samples import (
    MAX_PROBES,
    choose_probe_rows,
    find_schema,
    flatten_row,
    hash_row,
    read_sample,
)
from lightning_memmap.store.sources.column import TableColumn
from lightning_memmap.store.sources.column_dataset import ColumnDataset, is_hugging_face


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


def find_columns(dataset: Any) -> Mapping[str, list[Any]] | None:
    """Return the columns of the tables in a dataset by name; None if it isn't made of tables.

    Raises:
        SchemaError: A Hugging Face dataset has a format that changes the dtype of None.
    """
    if type(dataset) is Subset:
        return find_columns(dataset.dataset)
    if type(dataset) is ConcatDataset:
        columns = dict[str, list[Any]]()
        for part in dataset.datasets:
            if (columns_of_part := find_columns(part)) is None:
                return None
            for name, same_name in columns_of_part.items():
                columns.setdefault(name, []).extend(same_name)
        return columns
    if is_hugging_face(dataset):
        from lightning_memmap.store.sources.arrow_columns import table_columns

        return table_columns(dataset)
    if type(dataset) is ColumnDataset:
        return {name: [column] for name, column in dataset.columns.items()}
    return None


def infer_structure(
    columns: Mapping[str, Sequence[Any]], samples: Sequence[Any], declared: Declared
) -> Node:
    """Infer the structure of the samples of tables.

    Args:
        columns: The columns of each name, one from each table.
        samples: At least one sample.
        declared: The user's declaration of variable and nullable fields.

    Raises:
        SchemaError: The rows cannot be stored.
    """
    children = [
        _infer_column(name, columns.get(name, []), [sample[name] for sample in samples], declared)
        for name in samples[0]
    ]
    return Node("dict", tuple(samples[0]), tuple(children))


def _infer_column(
    name: str, columns: Sequence[Any], values: Sequence[Any], declared: Declared
) -> Node:
    """Infer the structure of the values at one key of the samples.

    Args:
        name: The key.
        columns: The columns of this name, one from each table.
        values: The value of each sample.
        declared: The user's declaration.
    """
    path = (name,)
    tables = [column for column in columns if isinstance(column, TableColumn)]
    facts = [column.find_facts() for column in tables]
    is_direct = len(tables) == len(columns) > 0 and all(column.is_direct for column in tables)
    if is_direct and len({part.type for part in facts}) == 1:
        from lightning_memmap.store.sources.arrow_facts import ArrowInference, merge_facts

        with suppress(SchemaError):  # Samples may show more, or raise an error with the row.
            return ArrowInference(declared, tables[0].are_python).infer(merge_facts(facts), path)
    for column, part in zip(tables, facts, strict=True):
        declared = part.to_declared(path, has_nan=column.has_nan).union(declared)
    inference = Inference(declared)
    node = inference.infer(values, path)
    fitting = [*values]
    for column in columns:
        for row in sorted({*_representative_rows(column)}):
            with suppress(SchemaError):  # Reading the row later raises it, with the row.
                node = inference.infer([*fitting, column[row]], path)
                fitting.append(column[row])
    return widen_fields(node, declared.variable)


def _representative_rows(column: Any) -> Iterator[int]:
    """Yield rows of a numpy column with values that determine its field."""
    if isinstance(column, np.ndarray) and column.ndim == 1:
        if column.dtype == object and set(map(type, column)) != {str}:
            yield from _rows_of_values(list(enumerate(column)))
        elif column.dtype.kind in "mM" and (missing := np.isnat(column)).any():
            yield from (int(missing.argmax()), int(missing.argmin()))


def _rows_of_values(pairs: Sequence[tuple[int, Any]]) -> Iterator[int]:
    """Yield a row that is missing and one that isn't, and the shortest and longest list, in
    children too.

    Args:
        pairs: Row and value. A row may occur several times, with each item of its list.
    """
    present = [(row, value) for row, value in pairs if not is_null(value)]
    yield from (row for row, _ in present[:1])
    if len(present) < len(pairs):
        yield next(row for row, value in pairs if is_null(value))
    kinds = {type(value) for _, value in present}
    if kinds == {dict}:
        for key in present[0][1]:
            yield from _rows_of_values([(row, value.get(key)) for row, value in present])
    elif kinds and kinds <= {list, tuple, np.ndarray}:
        shapes = (getattr(value, "shape", None) or [len(value)] for _, value in present)
        for sizes in zip(*shapes, strict=False):
            yield from (present[sizes.index(bound)][0] for bound in (min(sizes), max(sizes)))
        lists = ((row, value) for row, value in present if not isinstance(value, np.ndarray))
        items = ((row, item) for row, value in lists for item in value)
        # Skip items that are numbers or texts: they have no length to compare, and may be many.
        if (first := next(items, None)) is not None and isinstance(first[1], (list, tuple)):
            yield from _rows_of_values([first, *items])
