"""Lists of records, None and times: found, stored, resumed, verified, refused."""

import datetime
import os
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_memmap import ColumnDataset
from lightning_memmap.errors import SchemaError, StoreError
from lightning_memmap.schema import kinds
from lightning_memmap.schema.kinds import join_texts, split_texts
from lightning_memmap.store import (
    Store,
    build_store,
    open_store,
    verify_store,
)
from tests.support.datasets import Scenes, Wrapped
from tests.support.store.schemas import read_schema, to_json
from tests.support.store.signing import sign_manifest

import_module("polars")  # It sets an environment variable, which a test must not do.
NUM_ROWS = 200


def build(path: Path, dataset: Any, **options: Any) -> Store:
    return build_store(dataset, path, **{"num_shards": 7, "progress": False, **options})


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("built") / "s", Scenes(60)).path


@pytest.fixture
def scenes(built: Path, tmp_path: Path) -> Path:
    """A store that a test may damage."""
    return Path(shutil.copytree(built, tmp_path / "s"))


def assert_equal(found: Any, expected: Any) -> None:
    """A row of a store is the sample: numbers as tensors, and everything else as it was."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_equal(found[key], expected[key])
    elif isinstance(expected, list) and expected and not isinstance(expected[0], int | float):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif expected is None or isinstance(expected, str | bytes):
        assert found == expected
    elif isinstance(expected, datetime.datetime):
        assert found == int(np.datetime64(expected, "us").astype(np.int64))
    elif isinstance(expected, list) and not expected:
        assert len(found) == 0
    else:
        assert torch.equal(found, torch.as_tensor(expected, dtype=found.dtype))


def assert_holds(store: Store, dataset: Any) -> None:
    assert len(store) == len(dataset)
    for row in range(len(dataset)):
        assert_equal(store[row], dataset[row])


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_texts_come_back(texts: list[bytes]) -> None:
    assert split_texts(join_texts(texts)) == texts


@given(st.binary(max_size=40))
def test_bytes_that_are_no_texts_are_refused_or_divided(data: bytes) -> None:
    try:
        texts = split_texts(data)
    except ValueError:
        return
    assert set(map(type, texts)) <= {bytes}
    assert sum(map(len, texts)) <= len(data)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_records_are_found_built_verified_and_read(tmp_path: Path, num_workers: int) -> None:
    store = build(tmp_path / "s", Scenes(NUM_ROWS), num_workers=num_workers)
    assert_holds(store, Scenes(NUM_ROWS))
    assert verify_store(store.path) == []
    again = build(tmp_path / "s", Wrapped(Scenes(NUM_ROWS)), num_workers=num_workers)
    assert again.manifest.content == store.manifest.content
    assert store.schema.lists["objects"] == (
        "objects.box", "objects.label", "objects.name", "objects.score", "objects.score.mask",
        "objects.mask",
    )  # fmt: skip


counts = st.lists(st.integers(0, 5), min_size=1, max_size=30)


@given(counts, st.integers(1, 9), st.booleans())
def test_lists_of_any_lengths_come_back(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], shards: int, is_text: bool
) -> None:
    part: Any = "żółw" if is_text else torch.arange(6).view(2, 3)
    rows = [{"x": 1, "parts": [part] * size} for size in sizes]
    if not any(sizes):
        rows.append({"x": 1, "parts": [part]})
    path = tmp_path_factory.mktemp("lists") / "s"
    store = build(path, rows, num_shards=shards, variable=["parts"])
    assert_holds(store, rows)
    assert verify_store(path) == []


class Sparse:
    """Lists that are empty, and values that are None, in all rows but one."""

    def __init__(self, row: int) -> None:
        self.row = row

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, row: int) -> Any:
        if not 0 <= row < NUM_ROWS:
            raise IndexError(row)
        is_it = row == self.row
        return {"i": row, "boxes": [{"b": [1.0, 2.0]}] if is_it else [], "n": 3 if is_it else None}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_rows_are_read_until_one_shows_what_others_have(tmp_path: Path, num_workers: int) -> None:
    with pytest.raises(SchemaError, match=r"'boxes' is .* 8 .*variable=\['boxes'\]"):
        build(tmp_path / "s", Sparse(77), num_workers=num_workers)
    with pytest.raises(SchemaError, match=r"'n' is None in each of the 8 rows .*nullable=\['n'\]"):
        build(tmp_path / "s", [{"i": 0, "n": None}] * 20, num_workers=num_workers)
    declared: Any = {"nullable": ["n"], "variable": ["boxes"]}
    store = build(tmp_path / "s", Sparse(77), **declared, num_workers=num_workers)
    assert_holds(store, Sparse(77))
    with pytest.raises(SchemaError, match=r"is (None|an empty list) in each of the 200 rows"):
        build(tmp_path / "t", Sparse(-1), **declared, num_workers=num_workers)


def test_stream_is_read_until_a_row_shows_what_others_have(tmp_path: Path) -> None:
    declared: Any = {"nullable": ["n"], "variable": ["boxes"]}
    rows = (Sparse(77)[row] for row in range(NUM_ROWS))
    store = build(tmp_path / "s", rows, **declared, fingerprint="one")
    assert_holds(store, Sparse(77))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (
            [torch.zeros(2), torch.zeros(3)],
            r"'parts': found records of the shapes \[\(2,\), \(3,\)",
        ),
        ([{"t": ["a"]}, {"t": ["a", "b"]}], "'parts.t': lists of different lengths"),
        ([{"t": 1}, {"t": 1.5}], "'parts': the records of a list differ"),
    ],
)
def test_lists_of_parts_that_are_not_alike_are_refused(
    tmp_path: Path, parts: Any, words: str
) -> None:
    with pytest.raises(SchemaError, match=words):
        build(tmp_path / "s", [{"x": 1, "parts": parts}] * 3, variable=["parts"])


def make_fields(node: Any) -> Iterator[Any]:
    """The fields in the JSON value of a structure."""
    if "field" in node:
        yield node["field"]
    for child in node.get("children", ()):
        yield from make_fields(child)


def edit_field(name: str, **entries: Any) -> Any:
    def edit(body: Any) -> None:
        (field,) = (field for field in make_fields(body["structure"]) if field["name"] == name)
        field.update(entries)

    return edit


def edit_node(key: str, **entries: Any) -> Any:
    def edit(body: Any) -> None:
        root = body["structure"]
        root["children"][root["keys"].index(key)].update(entries)

    return edit


LEAF = {"kind": "leaf", "field": {"name": "captions", "dtype": "uint8", "shape": [None]}}


@pytest.mark.parametrize(
    "edit",
    [
        edit_field("captions", kind={"type": "text", "many": True}),
        edit_field("title", kind={"type": "text", "many": True}),
        edit_field("age", kind={"type": "mask"}),
        edit_field("at", kind={"type": "time", "unit": "weeks"}),
        edit_node("captions", children=[{"kind": "records", "children": [LEAF]}]),
        edit_node("captions", kind="optional", mask="captions.mask"),
        edit_node("age", mask=""),
        edit_node("age", children=[]),
        edit_node("age", children=[{"kind": "optional", "mask": "age.mask", "children": [LEAF]}]),
        edit_node("age", kind="records"),
    ],
)
def test_manifest_that_lies_is_refused(scenes: Path, edit: Any) -> None:
    sign_manifest(scenes, edit)
    with pytest.raises(StoreError, match="cannot be trusted"):
        open_store(scenes)


@pytest.mark.parametrize(
    "make",
    [
        lambda row: np.zeros((row % 3 + 1, 0)),
        lambda row: [{}] * (row % 3),
        lambda row: [np.zeros(0)] * (row % 3),
    ],
    ids=["arrays", "records without a field", "records without a number"],
)
def test_rows_with_a_length_and_no_values_are_refused(tmp_path: Path, make: Any) -> None:
    with pytest.raises(SchemaError, match=r"field 'x': .*no values.*length"):
        build(tmp_path / "s", [{"x": make(row), "y": row} for row in range(30)])


# None in tables


def test_text_of_which_some_is_missing_is_none_and_nan_is_a_number(tmp_path: Path) -> None:
    pandas = import_module("pandas")
    for dtype in (object, "string", "str"):
        column = pandas.Series(["a", None, "c"] * 9, dtype=dtype)
        store = build(tmp_path / str(dtype), ColumnDataset(pandas.DataFrame({"x": column})))
        assert [store[row]["x"] for row in range(3)] == ["a", None, "c"]
    frame = pandas.DataFrame({"x": [1.5, float("nan")] * 9})
    store = build(tmp_path / "s", ColumnDataset(frame))
    assert torch.isnan(store[1]["x"])


# Times


UTC = datetime.timezone.utc
OSLO = datetime.timezone(datetime.timedelta(hours=2))
DAY = datetime.date(2024, 5, 1)


@pytest.mark.parametrize(
    ("value", "kind", "number"),
    [
        (datetime.datetime(1970, 1, 2), kinds.Time("us"), 86_400_000_000),
        (datetime.datetime(1969, 12, 31, 23, 59, 59, 999_999), kinds.Time("us"), -1),
        (datetime.datetime(1970, 1, 1, 2, tzinfo=OSLO), kinds.Time("us", utc=True), 0),
        (datetime.datetime(1970, 1, 1, 2, tzinfo=UTC), kinds.Time("us", utc=True), 7_200_000_000),
        (datetime.date(1970, 1, 11), kinds.Time("D"), 10),
        (datetime.timedelta(microseconds=-5), kinds.Duration("us"), -5),
        (np.datetime64("1970-01-01T00:00:01", "ns"), kinds.Time("ns"), 10**9),
        (np.datetime64("1971", "Y"), kinds.Time("Y"), 1),
        (np.timedelta64(3, "s"), kinds.Duration("s"), 3),
    ],
)
def test_times_are_integers(tmp_path: Path, value: Any, kind: kinds.Kind, number: int) -> None:
    store = build(tmp_path / "s", [{"x": value}] * 9)
    (field,) = store.schema.fields
    assert (field.kind, field.dtype, field.shape) == (kind, torch.int64, ())
    assert store[4]["x"].item() == number
    assert read_schema(to_json(store.schema)) == store.schema


@pytest.mark.parametrize("days", [106_751_992, -106_751_992, 10**9 - 1])
def test_duration_that_int64_does_not_hold_is_refused(tmp_path: Path, days: int) -> None:
    long, short = (
        datetime.timedelta(days),
        datetime.timedelta(106_751_991 * (1 if days > 0 else -1)),
    )
    with pytest.raises(SchemaError, match=r"row 9, field 'x': .*numpy.timedelta64"):
        build(tmp_path / "s", [{"x": short}] * 9 + [{"x": long}] + [{"x": short}] * 30)
    store = build(tmp_path / "s", [{"x": short}] * 9)
    assert store[3]["x"].item() == short // datetime.timedelta(microseconds=1)


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_of_pandas_have_their_own_unit(tmp_path: Path, unit: str) -> None:
    pandas = import_module("pandas")
    time = pandas.Timestamp("2024-05-01 12:00:01").as_unit(unit)
    zoned = time.tz_localize("Europe/Oslo")
    duration = pandas.Timedelta(90, "s").as_unit(unit)
    store = build(tmp_path / "s", [{"t": time, "z": zoned, "d": duration}] * 9)
    found = [field.kind for field in store.schema.fields]
    assert found == [kinds.Time(unit), kinds.Time(unit, utc=True), kinds.Duration(unit)]
    found = store[0]
    assert found["t"].item() == time.asm8.astype(np.int64)
    assert found["t"] - found["z"] == 2 * 3600 * 10 ** {"s": 0, "ms": 3, "us": 6, "ns": 9}[unit]
    assert found["d"].item() == duration.asm8.astype(np.int64)


def test_arrays_of_times_are_integers(tmp_path: Path) -> None:
    times = np.arange("2024-05-01", "2024-05-05", dtype="datetime64[D]")
    store = build(tmp_path / "s", [{"x": times.astype(">M8[s]")}] * 9)
    assert store[0]["x"].tolist() == times.astype("datetime64[s]").astype(np.int64).tolist()
    lists = [{"i": 1, "x": [times[0], times[1]][: row % 3]} for row in range(9)]
    store = build(tmp_path / "t", lists)
    assert store.schema.fields[1].kind == kinds.Time("D")
    assert [len(store[row]["x"]) for row in range(9)] == [0, 1, 2] * 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (datetime.datetime(2024, 1, 1), datetime.datetime(2024, 1, 1, tzinfo=UTC)),
        (datetime.datetime(2024, 1, 1), DAY),
        (np.datetime64("2024", "s"), np.datetime64("2024", "ns")),
        (datetime.timedelta(1), 5),
    ],
)
def test_rows_of_another_meaning_are_refused(tmp_path: Path, one: Any, other: Any) -> None:
    for first, second in ((one, other), (other, one)):
        with pytest.raises(SchemaError, match="row 1, field 'x': found"):
            build(tmp_path / "s", [{"x": first}, {"x": second}])


def test_time_that_is_missing_is_none(tmp_path: Path) -> None:
    pandas = import_module("pandas")
    for at, (value, none) in enumerate(
        [
            (np.datetime64(5, "s"), np.datetime64("NaT", "s")),
            (pandas.Timestamp(5), pandas.NaT),
            (3, pandas.NA),
        ]
    ):
        store = build(tmp_path / str(at), [{"x": value}, {"x": none}] * 9)
        assert [store[row]["x"] is None for row in range(4)] == [False, True, False, True]


# Appended, in parts, from a server


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    "declared", [{"nullable": ["o.n"]}, {"variable": ["o"], "nullable": ["o.n"]}]
)
def test_none_in_a_late_record_is_declared(
    tmp_path: Path, declared: dict[str, Any], is_stream: bool
) -> None:
    rows: Any = [{"o": [{"n": "x"}] * (row % 3 + 1)} for row in range(NUM_ROWS)]
    rows[12] = {"o": [{"n": None}, {"n": "y"}]}
    with pytest.raises(SchemaError, match=r"row 12, .*nullable=\['o.n'\]"):
        build(tmp_path / "without", rows)
    given = (row for row in rows) if is_stream else rows
    store = build(tmp_path / "s", given, **declared)
    assert [store[row] for row in range(NUM_ROWS)] == rows


def test_form_of_a_record_waits_for_rows_that_have_one(tmp_path: Path) -> None:
    rows: Any = [{"o": [{"n": 1.5, "m": 2}] * (row % 3)} for row in range(12)]
    store = build(tmp_path / "s", rows, variable=["o", "o.m"])
    assert len(store[2]["o"]) == 2
    assert "mask" not in str(store.schema.fields)
    with pytest.raises(SchemaError, match=r"there is no field 'o.l'"):
        build(tmp_path / "t", rows, variable=["o", "o.l"])


@pytest.mark.parametrize("given", [None, "x"])
def test_form_of_a_record_may_be_none_from_the_first_row_on(
    tmp_path: Path, given: str | None
) -> None:
    rows: Any = [{"o": [{"n": given}] * (row % 3)} for row in range(20)]
    rows[19] = {"o": [{"n": "x"}, {"n": None}]}
    if given is None:
        rows[1] = {"o": [{"n": "z"}]}
    store = build(tmp_path / "s", rows, variable=["o"], nullable=["o.n"])
    assert [store[row] for row in range(20)] == rows


@pytest.mark.parametrize("items", [["a", None], [1, None], [{"n": 1}, None]])
@pytest.mark.parametrize("declared", [False, True])
def test_list_and_its_items_that_are_both_none_are_refused(
    tmp_path: Path, items: list[Any], declared: bool
) -> None:
    rows: Any = [{"t": items}, {"t": []}, {"t": items[:1]}, *([] if declared else [{"t": None}])]
    arguments: Any = {"variable": ["t"], "nullable": ["t"]} if declared else {}
    with pytest.raises(SchemaError, match=r"field 't': .*an empty list instead of None"):
        build(tmp_path / "s", rows, **arguments)
    kept = [row for row in rows if row["t"] is not None]
    store = build(tmp_path / "t", kept)
    assert [store[row] for row in range(3)] == kept


def test_list_of_several_dtypes_in_a_record_is_refused_and_a_tuple_is_not(tmp_path: Path) -> None:
    rows: Any = [{"o": [{"box": [row, 1, 2.0]}] * (row % 3)} for row in range(12)]
    for source in (rows, (row for row in rows)):
        with pytest.raises(SchemaError, match=r"'o.box' are lists of float64 and int64.*a tuple"):
            build(tmp_path / "s", source)
    for name, box in (("t", (1, 2.0)), ("u", [1.0, 2.0])):
        build(tmp_path / name, [{"o": [{"box": box, "l": 1}] * (row % 3)} for row in range(12)])


def test_store_of_a_store_has_the_same_files(tmp_path: Path) -> None:
    store = build(tmp_path / "s", Scenes(NUM_ROWS))
    other = build(tmp_path / "t", store)
    for name in os.listdir(store.files):
        if name != "manifest.json":
            assert (other.files / name).read_bytes() == (store.files / name).read_bytes(), name
