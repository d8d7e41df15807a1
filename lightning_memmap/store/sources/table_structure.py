"""Infer the structure of the samples of a table from all of its rows, not only from some samples.

Which values of a table are None or differ in length shows in its columns. For a ``Subset``, all
rows of its table count, so that training and validation rows of one table have one schema.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from lightning_memmap.errors import SchemaError
from lightning_memmap.schema.forms import Declared
from lightning_memmap.schema.infer import Inference, widen_fields
from lightning_memmap.schema.kinds import is_missing
from lightning_memmap.schema.structure import Node
from lightning_memmap.store.sources.column import TableColumn
from lightning_memmap.store.sources.column_dataset import ColumnDataset, is_hugging_face


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
        from lightning_memmap.store.sources.hugging_face import table_columns

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
        from lightning_memmap.store.sources.arrow_facts import merge_facts

        with suppress(SchemaError):  # Samples may show more, or raise an error with the row.
            return merge_facts(facts).to_node(path, declared, are_python=tables[0].are_python)
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
    present = [(row, value) for row, value in pairs if not is_missing(value)]
    yield from (row for row, _ in present[:1])
    if len(present) < len(pairs):
        yield next(row for row, value in pairs if is_missing(value))
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
