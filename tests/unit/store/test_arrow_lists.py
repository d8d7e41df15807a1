"""Tables of Arrow with None anywhere give the store of the same rows as Python items."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memmap import ColumnDataset, build_store
from lightning_memmap.errors import SchemaError
from tests.datasets import Wrapped, column_files

import_module("polars")  # It sets an environment variable, which a test must not do.

INT, FLOAT, TEXT = "int64", "double", "string"


def arrow_type(kind: Any) -> Any:
    pa = import_module("pyarrow")
    if isinstance(kind, list):
        return pa.list_(arrow_type(kind[0]))
    if isinstance(kind, dict):
        return pa.struct([(name, arrow_type(part)) for name, part in kind.items()])
    return getattr(pa, {"double": "float64"}.get(kind, kind))()


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type, which may be None at any depth."""
    if isinstance(kind, list):
        return st.none() | st.lists(values(kind[0]), max_size=3)
    if isinstance(kind, dict):
        return st.none() | st.fixed_dictionaries({k: values(part) for k, part in kind.items()})
    of_kind = {INT: st.integers(-9, 9), FLOAT: st.floats(width=32), TEXT: st.text("ab", max_size=2)}
    return st.none() | of_kind[kind]


KINDS = st.recursive(
    st.sampled_from([INT, FLOAT, TEXT]),
    lambda parts: parts.map(lambda one: [one]) | parts.map(lambda one: {"a": one, "b": TEXT}),
    max_leaves=3,
)


def lists_of_numbers(kind: Any, rows: list[Any]) -> bool:
    """Whether there are lists of numbers without None, which a table gives as arrays."""
    rows = [row for row in rows if row is not None]
    if isinstance(kind, dict):
        return any(
            lists_of_numbers(part, [row[name] for row in rows]) for name, part in kind.items()
        )
    if not isinstance(kind, list):
        return False
    items = [item for row in rows for item in row]
    return lists_of_numbers(kind[0], items) or (kind[0] in (INT, FLOAT) and None not in items)


def outcome(dataset: Any, path: Path, variable: Any) -> Any:
    try:
        store = build_store(dataset, path, num_shards=3, progress=False, variable=variable)
    except SchemaError as error:
        return str(error)
    return store.schema, column_files(store)


def table(kind: Any, rows: list[Any]) -> Any:
    pa = import_module("pyarrow")
    return pa.table({"n": range(len(rows)), "s": pa.array(rows, arrow_type(kind))})


@given(st.data())
def test_any_table_gives_the_store_of_the_same_python_items(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    kind = [data.draw(KINDS)]
    rows = data.draw(st.lists(values(kind), min_size=1, max_size=6))
    path = tmp_path_factory.mktemp("lists")
    found = table(kind, rows)
    forms = {"s": "nullable"} if None in rows else None
    by_arrow = outcome(ColumnDataset(found), path / "arrow", forms)
    import_module("pyarrow.parquet").write_table(found, path / "rows.parquet", row_group_size=2)
    assert outcome(ColumnDataset(path / "rows.parquet"), path / "parquet", forms) == by_arrow
    assert outcome(Wrapped(ColumnDataset(found)), path / "items", forms) == by_arrow
    if not lists_of_numbers(kind, rows):
        python = Wrapped([{"n": n, "s": row} for n, row in enumerate(found["s"].to_pylist())])
        assert outcome(python, path / "python", forms) == by_arrow
