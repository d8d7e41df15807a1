"""Tables of any library: the dtypes and names of their columns, whatever is missing, and files that
are read piece by piece."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from lightning_memmap import ColumnDataset, build_store, open_store
from lightning_memmap.errors import DatasetError, SchemaError
from lightning_memmap.store import Store, build_part, finish_store, writing
from lightning_memmap.store.columns import FixedColumn
from lightning_memmap.store.identity import Identity
from lightning_memmap.store.sources.arrow_columns import RowGroups
from tests.support.datasets import Wrapped, column_files
from tests.support.store.layout import fail_to_list

polars = import_module("polars")  # It sets an environment variable, which a test must not do.
arrow = import_module("pyarrow")

NUM_ROWS = 60


def build(path: Path, dataset: Any, **options: Any) -> Store:
    return build_store(dataset, path, num_shards=7, progress=False, **options)


def with_none(values: list[Any], rows: set[int]) -> list[Any]:
    return [None if row in rows else value for row, value in enumerate(values)]


def frame(missing: set[int]) -> Any:
    """Structs, lists and arrays of several dtypes, of which some rows are missing."""
    rows = range(NUM_ROWS)
    return polars.DataFrame(
        {
            "point": polars.Series(
                with_none([{"id": 2**53 + row, "x": row / 2} for row in rows], missing),
                dtype=polars.Struct({"id": polars.Int64, "x": polars.Float32}),
            ),
            "box": polars.Series(
                with_none([[row, 1, 2] for row in rows], missing),
                dtype=polars.Array(polars.Int16, 3),
            ),
            "bytes": polars.Series(
                with_none([[row % 9] * (row % 4) for row in rows], missing),
                dtype=polars.List(polars.UInt8),
            ),
            "objects": polars.Series(
                with_none(
                    [[{"a": k, "b": "x" * k} for k in range(row % 3)] for row in rows], missing
                ),
                dtype=polars.List(polars.Struct({"a": polars.Int8, "b": polars.String})),
            ),
            "kind": polars.Series(
                with_none([f"k{row % 3}" for row in rows], missing), dtype=polars.Categorical
            ),
            "big": polars.Series(with_none(list(rows), missing), dtype=polars.UInt64),
        }
    )


@pytest.mark.parametrize(
    "missing", [set(), {0}, {59}, {13, 14}, {31}, set(range(0, 60, 2))], ids=str
)
def test_columns_keep_names_and_dtypes_whatever_is_missing(
    tmp_path: Path, missing: set[int]
) -> None:
    table = frame(missing)
    store = build(tmp_path / "s", ColumnDataset(table))
    masks = {*store.schema.optional.values()}
    dtypes = {field.name: field.dtype for field in store.schema.fields if field.name not in masks}
    assert dtypes == {
        **{"point.id": torch.int64, "point.x": torch.float32, "box": torch.int16},
        **{"bytes": torch.uint8, "objects.a": torch.int8, "objects.b": torch.uint8},
        **{"kind": torch.uint8, "big": torch.uint64},
    }
    for row in range(NUM_ROWS):
        found = store[row]
        if row in missing:
            assert set(found.values()) == {None}
            continue
        assert found["point"] == {"id": 2**53 + row, "x": row / 2}
        assert (found["box"].tolist(), found["big"].item()) == ([row, 1, 2], row)
        assert found["bytes"].tolist() == [row % 9] * (row % 4)
        assert found["objects"] == [{"a": k, "b": "x" * k} for k in range(row % 3)]
        assert found["kind"] == f"k{row % 3}"
    nullable = [*table.columns] if missing else None
    for name, dataset in (
        ("items", Wrapped(ColumnDataset(table))),
        ("arrow", ColumnDataset(table.to_arrow())),
    ):
        other = build(tmp_path / name, dataset, variable=["objects"], nullable=nullable)
        assert other.schema == store.schema
        assert column_files(other) == column_files(store)


SCALARS = st.sampled_from(["int8", "uint8", "int64", "uint64", "float32", "float64", "bool"])
LEAVES = SCALARS.map(lambda name: arrow.from_numpy_dtype(name)) | st.sampled_from(
    [arrow.string(), arrow.large_binary(), arrow.timestamp("us"), arrow.duration("ms")]
)
#: Those whose values are the same from a table and as Python items.
PLAIN = [arrow.int64(), arrow.float64(), arrow.string()]


def arrow_types(children: Any) -> Any:
    return (
        st.builds(arrow.list_, children)
        | st.builds(arrow.large_list, children)
        | st.builds(arrow.list_view, children)
        | st.builds(arrow.large_list_view, children)
        | st.builds(lambda kind: arrow.list_(kind, 2), children)
        | st.builds(lambda a, b: arrow.struct([("a", a), ("b", b)]), children, children)
    )


def are_numbers(kind: Any) -> bool:
    """Whether values of a type are numbers, or arrays of them: lists of such have no None."""
    if arrow.types.is_fixed_size_list(kind):
        return are_numbers(kind.value_type)
    return arrow.types.is_primitive(kind)


def values_of(kind: Any, in_list: bool = False) -> Any:
    """Values of a type, which may be None at any depth but in lists of numbers."""
    types = arrow.types
    if types.is_struct(kind):
        found = st.fixed_dictionaries({field.name: values_of(field.type) for field in kind})
    elif types.is_fixed_size_list(kind):
        found = st.lists(values_of(kind.value_type, True), min_size=2, max_size=2)
    elif types.is_nested(kind):
        found = st.lists(values_of(kind.value_type, True), max_size=3)
    elif types.is_floating(kind):
        found = st.integers(-9, 9).map(float)
    elif types.is_boolean(kind):
        found = st.booleans()
    elif types.is_string(kind):
        found = st.text("abé", max_size=3)
    else:
        found = st.binary(max_size=3) if types.is_large_binary(kind) else st.integers(0, 9)
    if in_list and are_numbers(kind):
        return found
    return st.sampled_from([found, st.none() | found]).flatmap(lambda one: one)


def are_alike(kind: Any, values: list[Any]) -> bool:
    """Whether a table gives values as they are: lists of numbers without None come as arrays."""
    values = [value for value in values if value is not None]
    if arrow.types.is_struct(kind):
        return all(are_alike(f.type, [value[f.name] for value in values]) for f in kind)
    if not arrow.types.is_nested(kind):
        return kind in PLAIN
    items = [item for value in values for item in value]
    return kind.value_type not in PLAIN[:2] and are_alike(kind.value_type, items)


def outcome(dataset: Any, path: Path, nullable: Any) -> Any:
    try:
        store = build(path, dataset, nullable=nullable)
    except SchemaError as error:
        # Whoever knows the lengths of all rows finds at an earlier row that some do not fit.
        return re.sub(r"^row \d+, ", "", str(error))
    return store.schema, store.manifest.probes, column_files(store)


@pytest.mark.slow
@given(kind=st.recursive(LEAVES, arrow_types, max_leaves=3), data=st.data())
def test_any_table_gives_the_store_of_its_items(
    tmp_path_factory: pytest.TempPathFactory, kind: Any, data: st.DataObject
) -> None:
    rows = data.draw(st.lists(values_of(kind), min_size=1, max_size=8))
    table = arrow.table({"x": arrow.array(rows, kind), "row": range(len(rows))})
    if data.draw(st.booleans()):
        table = arrow.concat_tables([table.slice(1), table.slice(0, 1)])
    path, nullable = tmp_path_factory.mktemp("store"), ["x"] if None in rows else None
    expected = outcome(Wrapped(ColumnDataset(table)), path / "items", nullable)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "_MAX_PACKED_ROWS", 5)
        found = outcome(ColumnDataset(table), path / "slices", nullable)
    # Only a table has the types of what is in no list.
    is_untold = "is an empty list" in expected
    assert is_untold or found == expected
    import_module("pyarrow.parquet").write_table(table, path / "a.parquet", row_group_size=3)
    assert outcome(ColumnDataset(path / "a.parquet"), path / "parquet", nullable) == found
    if are_alike(kind, rows) and not is_untold:
        assert outcome(Wrapped(table.to_pylist()), path / "python", nullable) == expected


@pytest.mark.parametrize(
    "kind", [arrow.list_(arrow.int16()), arrow.list_(arrow.list_(arrow.float32(), 1))]
)
def test_none_in_a_list_of_numbers_is_refused_at_its_row(tmp_path: Path, kind: Any) -> None:
    items = [[1], None] if arrow.types.is_nested(kind.value_type) else [1, None]
    table = arrow.table({"s": arrow.array([items[:1]] * 12 + [items] + [items[:1]] * 27, kind)})
    with pytest.raises(SchemaError, match="row 12, field 's': the table has None within a list"):
        build(tmp_path / "s", ColumnDataset(table))


@pytest.mark.parametrize("kind", ["ListView", "LargeListView"])
def test_views_of_lists_are_lists_of_their_dtype(tmp_path: Path, kind: str) -> None:
    # They overlap, go backwards, and what is behind a null is no value.
    offsets, sizes = [4, 0, 2, 5, 0, 1], [2, 3, 0, 1, 6, 4]
    mask = arrow.array([False, False, False, False, True, False])
    make = getattr(arrow, f"{kind}Array").from_arrays
    values = arrow.array(np.arange(6, dtype=np.float32))
    views = make(offsets, sizes, values, mask=mask)
    column = arrow.chunked_array([views[:2], views, views[3:]])
    parts = [arrow.StructArray.from_arrays([each], ["x"]) for each in column.chunks]
    for name, table in {
        "column": arrow.table({"x": column}),
        "part": arrow.table({"s": arrow.chunked_array(parts)}),
    }.items():
        nullable = ["s.x"] if name == "part" else None
        store = build(tmp_path / name, ColumnDataset(table), nullable=nullable)
        assert store.schema.fields[0].dtype == torch.float32
        for row, expected in enumerate(column.to_pylist()):
            found = store[row]["x"] if name == "column" else store[row]["s"]["x"]
            assert (None if found is None else found.tolist()) == expected


@pytest.mark.parametrize("kind", [arrow.int32(), arrow.float64(), arrow.timestamp("us")], ids=str)
@pytest.mark.parametrize("row", [0, 3, NUM_ROWS - 1])
def test_none_that_a_format_gives_another_dtype_is_refused_at_its_row(
    tmp_path: Path, kind: Any, row: int
) -> None:
    column = arrow.array(with_none([1] * NUM_ROWS, {row}), kind)
    rows = import_module("datasets").Dataset(arrow.table({"x": column})).with_format("numpy")
    with pytest.raises(SchemaError, match=rf"row {row}, field 'x': it is None.*with_format\(None"):
        build(tmp_path / "s", rows)
    assert build(tmp_path / "s", rows.with_format(None))[row]["x"] is None
    if kind != arrow.timestamp("us"):
        others = [other for other in range(NUM_ROWS) if other != row]
        assert build(tmp_path / "t", rows.select(others))[0]["x"] == 1


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_unsigned_numbers_are_read_in_any_order(tmp_path: Path, dtype: str) -> None:
    values = np.arange(NUM_ROWS, dtype=dtype) * 3
    rows = np.random.default_rng(0).permutation(NUM_ROWS)
    given: dict[str, Any] = {
        "tensor": TensorDataset(torch.from_numpy(values)),
        "array": values,
        "table": ColumnDataset(arrow.table({"x": arrow.array(with_none(list(values), {3}))})),
        "polars": ColumnDataset(polars.DataFrame({"x": values})),
    }
    for name, dataset in given.items():
        joined = Subset(ConcatDataset([dataset, dataset]), [*rows, *(rows + NUM_ROWS)])
        store = build(tmp_path / name, joined)
        for index, row in enumerate([*rows, *rows]):
            found: Any = store[index]
            found = next(iter(found.values())) if isinstance(found, dict) else found
            found = found[0] if isinstance(found, list) else found
            if name == "table" and row == 3:
                assert found is None
            else:
                assert found.item() == values[row]


@pytest.mark.parametrize("dtype", ["int64", "uint8", "float16"])
def test_probe_rows_without_items_are_stored(tmp_path: Path, dtype: str) -> None:
    lengths = [0, *range(1, NUM_ROWS - 1), 0]
    rows = [{"x": np.arange(n).astype(dtype), "none": np.empty((2, 0), dtype)} for n in lengths]
    store = build(tmp_path / "s", rows)
    assert [len(store[row]["x"]) for row in range(NUM_ROWS)] == lengths
    assert store[3]["none"].shape == (2, 0)


def test_lists_that_differ_in_rows_that_are_not_read_first_are_stored(tmp_path: Path) -> None:
    first = {*np.linspace(0, NUM_ROWS - 1, 8).astype(int).tolist()}
    rows: list[dict[str, Any]] = [
        {
            "empty": [] if row in first else [1, 2],
            "same": [1, 2, 3],
            "nested": [[1.0, 2.0]] * 2 if row in first else [[1.0, 2.0, 3.0]],
            "texts": ["a", "b"] if row in first else ["c"],
            "answers": {"at": [1]} if row in first else {"at": [1, 2]},
            "records": [{"a": 1}] if row in first else [],
            "maybe": [1, 2] if row in first else None if row % 3 else [1],
        }
        for row in range(NUM_ROWS)
    ]
    table = arrow.Table.from_pylist(rows)
    import_module("pyarrow.parquet").write_table(table, tmp_path / "a.parquet", row_group_size=8)
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    for name, dataset in {
        "arrow": ColumnDataset(table),
        "pandas": ColumnDataset(import_module("pandas").DataFrame(columns)),
        "lists": ColumnDataset(columns),
        "parquet": Subset(ColumnDataset(tmp_path / "a.parquet"), range(NUM_ROWS)),
        "joined": ConcatDataset([ColumnDataset(table.slice(0, 1)), ColumnDataset(table.slice(1))]),
        "library": import_module("datasets").Dataset(table),
    }.items():
        store = build(tmp_path / name, dataset)
        shapes = {field.name: field.shape for field in store.schema.fields}
        assert shapes["nested"] == (None, None)
        # One length in all rows, though the type would allow for more.
        assert shapes.get("same", (3,)) == (3,)
        assert [plain(store[row]) for row in range(NUM_ROWS)] == rows
    library = import_module("datasets").Dataset(table)
    for name in ("torch", "numpy"):
        store = build(tmp_path / name, library.with_format(name, columns=["empty", "same"]))
        assert [store[row]["empty"].tolist() for row in range(9)] == [r["empty"] for r in rows[:9]]


def plain(value: Any) -> Any:
    """A value with lists in place of tensors."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return list(map(plain, value))
    return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("kind", ["arrow", "parquet", "library"])
def test_lists_that_are_all_empty_have_the_type_of_their_items(tmp_path: Path, kind: str) -> None:
    texts, records = arrow.string(), arrow.struct([("a", arrow.int64()), ("b", arrow.binary())])
    columns = {
        name: arrow.array([[]] * NUM_ROWS, arrow.list_(each))
        for name, each in (("texts", texts), ("records", records))
    }
    table = arrow.table({**columns, "i": range(NUM_ROWS)})
    import_module("pyarrow.parquet").write_table(table, tmp_path / "a.parquet", row_group_size=8)
    dataset = {
        "arrow": ColumnDataset(table),
        "parquet": ColumnDataset(tmp_path / "a.parquet"),
        "library": import_module("datasets").Dataset(table),
    }[kind]
    store = build(tmp_path / "s", dataset)
    assert plain([store[row] for row in range(NUM_ROWS)]) == table.to_pylist()
    kinds = {field.name: str(field.kind) for field in store.schema.fields}
    assert (kinds["texts"], kinds["records.b"]) == ("list of text", "list of bytes")


def test_values_and_none_that_are_rare_are_found_before_the_build(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {
            "rare": 1.5 if row == 33 else None,
            "part": {"a": None if row == 34 else row, "b": ["x"]},
            "texts": ["a", None] if row == 35 else ["b"],
        }
        for row in range(NUM_ROWS)
    ]
    table = arrow.Table.from_pylist(rows)
    import_module("pyarrow.parquet").write_table(table, tmp_path / "a.parquet", row_group_size=8)
    for name, dataset in {
        "arrow": ColumnDataset(table),
        "parquet": Subset(ColumnDataset(tmp_path / "a.parquet"), range(NUM_ROWS)),
        "library": import_module("datasets").Dataset(table),
    }.items():
        store = build(tmp_path / name, dataset)
        assert [plain(store[row]) for row in range(NUM_ROWS)] == rows


@pytest.mark.parametrize("none", [[], [1]])
def test_runs_of_equal_values_are_stored_as_values(tmp_path: Path, none: list[int]) -> None:
    # Rows of such a column cannot be filtered by pyarrow, and some have none.
    values = [None if run in none else f"text {run}" for run in range(3)]
    runs = arrow.RunEndEncodedArray.from_arrays([20, 45, NUM_ROWS], arrow.array(values))
    store = build(tmp_path / "s", ColumnDataset({"x": runs}))
    expected = [values[0]] * 20 + [values[1]] * 25 + [values[2]] * 15
    assert [store[row]["x"] for row in range(NUM_ROWS)] == expected


@pytest.mark.slow
def test_library_that_speaks_arrow_needs_no_code_of_its_own(tmp_path: Path) -> None:
    # In a process of its own: the threads of DuckDB do not survive the forks of other tests.
    program = """
import duckdb
import tests.support.without_lightning
from lightning_memmap.store import ColumnDataset, build_store
rows = duckdb.sql("select 'r' || i as name, i::smallint as age from range(60) t(i)")
build_store(ColumnDataset(rows), "s", num_shards=7, progress=False)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    store = open_store(tmp_path / "s")
    assert store.schema.fields[1].dtype == torch.int16
    assert [store[row]["name"] for row in range(NUM_ROWS)] == [f"r{i}" for i in range(NUM_ROWS)]
    assert [store[row]["age"].item() for row in range(NUM_ROWS)] == list(range(NUM_ROWS))


class Speaker:
    """A table of a library that nobody knows, which speaks the protocol of Arrow."""

    columns = ("x",)

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return arrow.table({"x": [1.5, None, 2.5]}).__arrow_c_stream__(requested_schema)


def test_table_of_an_unknown_library_is_read_by_the_protocol(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a Speaker has columns"):
        build(tmp_path / "s", Speaker())
    store = build(tmp_path / "s", ColumnDataset(Speaker()))
    assert [store[row]["x"] for row in range(3)] == [1.5, None, 2.5]


# Parquet


def write_files(path: Path, num_files: int, num_columns: int) -> Path:
    write, path = import_module("pyarrow.parquet").write_table, path / "files"
    path.mkdir()
    for number in range(num_files):
        rows = np.arange(40) + 40 * number
        table = arrow.table({f"c{k}": rows + k for k in range(num_columns)})
        write(table, path / f"{number:03}.parquet", row_group_size=10)
    return path


VIEWS = {
    "texts": (["a", "bb", None, "ccc"], "string_view"),
    "bytes": ([b"a", b"bb", b"", b"ccc"], "binary_view"),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_parquet_columns_of_views_are_stored_as_their_values(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("pyarrow", "21", reason="pyarrow writes views to Parquet from 21 on")
    values, name = VIEWS[kind]
    table = arrow.table({"x": arrow.array(values, getattr(arrow, name)())})
    import_module("pyarrow.parquet").write_table(table, tmp_path / "a.parquet", row_group_size=2)
    store = build(tmp_path / "s", ColumnDataset(tmp_path / "a.parquet"))
    assert [store[row]["x"] for row in range(4)] == values


def columns_of_several_files() -> dict[str, tuple[list[Any], list[Any]]]:
    """By name, a column in two files, of two types that have the same values, and its values."""
    point = {"a": 1, "b": "x"}
    small, large = arrow.list_(arrow.int64()), arrow.large_list(arrow.int64())
    encoded = arrow.array(["a", None, "a"]).dictionary_encode()
    return {
        "large": ([arrow.array(["a"]), arrow.array(["b"], arrow.large_string())], ["a", "b"]),
        "encoded": ([encoded, arrow.array(["b"])], ["a", None, "a", "b"]),
        "order": (
            [arrow.array([point]), arrow.array([{"b": "y", "a": 2}])],
            [point, {"a": 2, "b": "y"}],
        ),
        "lists": ([arrow.array([[1, 2]], small), arrow.array([[3]], large)], [[1, 2], [3]]),
        "records": (
            [arrow.array([[point], []]), arrow.array([[{"b": "y", "a": 2}]])],
            [[point], [], [{"a": 2, "b": "y"}]],
        ),
        "none": ([arrow.nulls(1), arrow.array([5, 6])], [None, 5, 6]),
        "none at the end": ([arrow.array(["a"]), arrow.nulls(2)], ["a", None, None]),
    }


@pytest.mark.parametrize("name", columns_of_several_files())
def test_parquet_files_whose_types_have_the_same_values_are_one_table(
    tmp_path: Path, name: str
) -> None:
    arrays, expected = columns_of_several_files()[name]
    for number, array in enumerate(arrays):
        table = arrow.table({"x": array})
        import_module("pyarrow.parquet").write_table(table, tmp_path / f"{number}.parquet")
    store = build(tmp_path / "s", ColumnDataset(tmp_path))
    assert [plain(store[row]["x"]) for row in range(len(store))] == expected
    rows = [*reversed(range(len(expected)))]
    shuffled_store = build(tmp_path / "t", Subset(ColumnDataset(tmp_path), rows))
    found = [plain(shuffled_store[row]["x"]) for row in range(len(rows))]
    assert found == [expected[row] for row in rows]


@pytest.mark.parametrize(
    "other", [[[1.5]], ["a"], [{"a": 1}]], ids=["other numbers", "no list", "a struct"]
)
def test_parquet_file_of_another_type_is_named_before_a_row_is_read(
    tmp_path: Path, other: list[Any]
) -> None:
    write = import_module("pyarrow.parquet").write_table
    write(arrow.table({"x": [[1, 2]]}), tmp_path / "a.parquet")
    write(arrow.table({"x": other}), tmp_path / "b.parquet")
    with pytest.raises(DatasetError, match=r"b\.parquet.*'x'"):
        ColumnDataset(tmp_path)


def test_column_that_only_a_later_parquet_file_has_is_named(tmp_path: Path) -> None:
    write = import_module("pyarrow.parquet").write_table
    write(arrow.table({"x": [1, 2]}), tmp_path / "a.parquet")
    write(arrow.table({"x": [3], "weight": [0.5]}), tmp_path / "b.parquet")
    with pytest.raises(DatasetError, match=r"b\.parquet.*'weight'"):
        ColumnDataset(tmp_path)
    store = build(tmp_path / "s", ColumnDataset(tmp_path, names=["x"]))
    assert [int(store[row]["x"]) for row in range(3)] == [1, 2, 3]


def test_folder_of_parquet_files_that_cannot_be_listed_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        table = arrow.table({"x": [1, 2]})
        import_module("pyarrow.parquet").write_table(table, tmp_path / folder / "0.parquet")
    assert len(ColumnDataset(tmp_path)) == 4
    fail_to_list(monkeypatch, tmp_path / "b")
    with pytest.raises(OSError, match=str(tmp_path / "b")):
        ColumnDataset(tmp_path)


def test_texts_of_numpy_of_any_length_are_stored(tmp_path: Path) -> None:
    if not hasattr(np.dtypes, "StringDType"):
        pytest.skip("this numpy has no StringDType")
    texts = np.array(["a", "bb", "", "ccc"], np.dtypes.StringDType())
    store = build(tmp_path / "s", ColumnDataset({"x": texts}))
    assert [store[row]["x"] for row in range(4)] == texts.tolist()
    with pytest.raises(SchemaError, match=r"'x'.*StringDType"):
        build(tmp_path / "t", [{"x": texts}])


@pytest.mark.parametrize("form", [None, "torch"])
def test_rows_that_were_filtered_out_do_not_decide_the_schema(
    tmp_path: Path, form: str | None
) -> None:
    rows = {
        "label": [1, None, 2, 3, None, 4],
        "x": [[1] * 17, [1] * 16, [2] * 16, [3] * 16, [1], [4] * 16],
        "point": [{"a": 1}, {"a": None}, {"a": 2}, {"a": 3}, None, {"a": 4}],
    }
    dataset = import_module("datasets").Dataset.from_dict(rows).with_format(form)
    kept = dataset.select([3, 2, 5, 2])
    store = build(tmp_path / "s", kept)
    expected = build(tmp_path / "list", [kept[row] for row in range(4)])
    assert store.schema == expected.schema
    assert not store.schema.optional
    assert column_files(store) == column_files(expected)
    if form is None:
        assert {*build(tmp_path / "all", dataset.select([0, 1, 4])).schema.optional} >= {"label"}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, str]]]:
    """The row group and column of each read."""
    found, read = list[tuple[int, str]](), RowGroups.read

    def note(self: Any, group: int, name: str) -> Any:
        found.append((group, name))
        return read(self, group, name)

    monkeypatch.setattr(RowGroups, "read", note)
    return found


def shuffled(path: Path) -> Any:
    dataset = ColumnDataset(path)
    rows = np.random.default_rng(0).permutation(len(dataset))[: len(dataset) - 7]
    return Subset(dataset, rows.tolist())


def assert_is_shuffled(store: Store, dataset: Any) -> None:
    assert [store[row]["c1"].item() for row in range(len(store))] == [
        row + 1 for row in dataset.indices
    ]


def test_shuffled_rows_of_parquet_files_are_read_group_by_group(
    tmp_path: Path, reads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = shuffled(write_files(tmp_path, 5, 2))
    monkeypatch.setattr(writing, "_SLICE_BYTES", 16 * 7)
    store = build(tmp_path / "s", dataset, fingerprint="one")
    assert_is_shuffled(store, dataset)
    # Beside the probe rows, of which each is read twice, each group is read once.
    assert len(reads) <= 2 * (20 + 2 * 8)
    items = build(tmp_path / "items", Wrapped(dataset), fingerprint="one")
    assert column_files(items) == column_files(store)


@pytest.mark.parametrize("same_files", [True, False])
def test_shuffled_rows_of_parquet_files_go_on_where_they_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_files: bool
) -> None:
    dataset = shuffled(write_files(tmp_path, 5, 2))
    monkeypatch.setattr(writing, "_SLICE_BYTES", 16 * 20)
    written, write = list[int](), FixedColumn.write

    def interrupt(self: FixedColumn, files: Any, rows: Any, values: Any) -> None:
        if len(written) == 6:
            raise KeyboardInterrupt
        written.append(len(rows))
        write(self, files, rows, values)

    with monkeypatch.context() as patch:
        patch.setattr(FixedColumn, "write", interrupt)
        with suppress(KeyboardInterrupt):
            build(tmp_path / "s", dataset, fingerprint="one")
    # The same rows from elsewhere are read in another order.
    again: Any = dataset if same_files else Wrapped(dataset)
    store = build(tmp_path / "s", again, fingerprint="one")
    assert_is_shuffled(store, dataset)


def test_shuffled_rows_of_parquet_files_are_written_in_parts(tmp_path: Path) -> None:
    dataset = shuffled(write_files(tmp_path, 5, 2))
    for part in (1, 0, 2):
        build_part(dataset, tmp_path / "s", (part, 3), num_shards=7, progress=False)
    assert_is_shuffled(finish_store(tmp_path / "s", progress=False), dataset)


def test_folders_of_parquet_files(tmp_path: Path) -> None:
    for number, name in enumerate(["b", "a/c", "_temporary/d", ".hidden/e", "a/.f"]):
        path = tmp_path / f"{name}.parquet"
        path.parent.mkdir(exist_ok=True)
        columns = {"x": [number], "__index_level_0__": [7]}
        import_module("pyarrow.parquet").write_table(arrow.table(columns), path)
    dataset = ColumnDataset(tmp_path)
    assert [dataset[row] for row in range(len(dataset))] == [{"x": 1}, {"x": 0}]
    assert [*ColumnDataset(tmp_path, ["__index_level_0__"]).columns] == ["__index_level_0__"]
    (tmp_path / "a").rename(tmp_path / "y=1")
    with pytest.raises(ValueError, match=r"y=1.*partitioning='hive'"):
        ColumnDataset(tmp_path)
    assert len(ColumnDataset(tmp_path / "y=1")) == 1


@pytest.mark.slow
def test_directory_of_many_parquet_files_keeps_few_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_files(tmp_path, 60, 10)
    most, read = 0, RowGroups.read

    def count(self: Any, group: int, name: str) -> Any:
        nonlocal most
        most = max(most, len(os.listdir("/proc/self/fd")))
        return read(self, group, name)

    monkeypatch.setattr(RowGroups, "read", count)
    before = len(os.listdir("/proc/self/fd"))
    store = build(tmp_path / "s", ColumnDataset(path))
    assert [store[row]["c9"].item() for row in range(0, 2400, 99)] == list(range(9, 2409, 99))
    assert most - before < 50


def fragmented(path: Path, kind: str) -> Any:
    """A dataset of pyarrow or Lance over several files, with a column that is a folder's name."""
    table = arrow.table(
        {
            "x": range(NUM_ROWS),
            "rare": with_none([*range(NUM_ROWS)], {41}),
            "lists": [[row] * (1 + (row == 42)) for row in range(NUM_ROWS)],
        }
    )
    if kind == "lance":
        lance = pytest.importorskip("lance")
        return lance.write_dataset(table, path / "a.lance", max_rows_per_file=25)
    library = import_module("pyarrow.dataset")
    options = {"max_rows_per_group": 8, "max_rows_per_file": 24, "min_rows_per_group": 1}
    library.write_dataset(
        table.append_column("half", arrow.array([row // 30 for row in range(NUM_ROWS)])),
        path / "files",
        format=kind,
        partitioning=["half"],
        partitioning_flavor="hive",
        **options,
    )
    return library.dataset(path / "files", format=kind, partitioning="hive")


@pytest.mark.parametrize("kind", ["parquet", "ipc", "lance"])
def test_dataset_of_fragments_is_read_by_fragment(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = fragmented(tmp_path, kind)
    in_memory = build(tmp_path / "memory", ColumnDataset(dataset.to_table()))
    lengths = list[int]()
    read = RowGroups.read

    def note(self: RowGroups, group: int, name: str) -> Any:
        column = read(self, group, name)
        lengths.append(len(column))
        return column

    monkeypatch.setattr(RowGroups, "read", note)
    columns = ColumnDataset(dataset)
    assert not lengths
    store = build(tmp_path / "s", columns)
    assert max(lengths) <= (8 if kind == "parquet" else 25)
    assert store.schema == in_memory.schema
    assert column_files(store) == column_files(in_memory)
    assert store.schema.optional.keys() == {"rare"}
    rows = [50, 3, 41, 7, 42]
    part = build(tmp_path / "part", Subset(columns, rows), num_workers=int(kind != "lance"))
    assert [part[index]["x"].item() for index in range(5)] == rows


def test_filtered_dataset_of_fragments_is_read_whole(tmp_path: Path) -> None:
    field = import_module("pyarrow.dataset").field
    dataset = fragmented(tmp_path, "parquet").filter(field("x") > 55)
    assert [row["x"] for row in ColumnDataset(dataset)] == [56, 57, 58, 59]


def test_changed_file_of_a_dataset_of_fragments_is_another_dataset(tmp_path: Path) -> None:
    before = ColumnDataset(fragmented(tmp_path, "parquet"))
    os.utime(before.columns["x"].files[0][0], (1, 1))
    files = import_module("pyarrow.dataset").dataset(tmp_path / "files", partitioning="hive")
    after = ColumnDataset(files)
    assert Identity.of(before).difference(Identity.of(after)) is not None
    assert Identity.of(after).difference(Identity.of(ColumnDataset(files))) is None
