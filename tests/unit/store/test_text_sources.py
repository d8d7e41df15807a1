"""Columns of texts, and of other rows that differ in length, are stored by slices: the same store
as item by item, and the same errors."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from lightning_memmap import ColumnDataset, build_store
from lightning_memmap.errors import SchemaError
from lightning_memmap.store import Store, build_part, finish_store, range_writer
from lightning_memmap.store.sources import source_of
from lightning_memmap.store.sources.column_dataset import object_array
from tests.datasets import Wrapped, texts

import_module("polars")  # It sets an environment variable, which a test must not do.

NUM_ROWS = 90
GENERATOR = np.random.default_rng(0)
LENGTHS = [0, 3, 1, *GENERATOR.integers(0, 9, NUM_ROWS - 3).tolist()]
WORDS = ["", "ä", "\x00a\x00", "\ud83d", "\ude00", "plain", "日本語", "é" * 40]
TEXTS = [WORDS[k % len(WORDS)] * (k % 3) + str(k) * (k % 2) for k in range(NUM_ROWS)]
VALID = [text.encode("utf-8", "replace").decode() for text in TEXTS]


def with_none(values: list[Any]) -> list[Any]:
    return [None if k % 5 == 3 else value for k, value in enumerate(values)]


def ragged(dtype: str, *shape: int) -> list[np.ndarray]:
    return [GENERATOR.integers(0, 99, (length, *shape)).astype(dtype) for length in LENGTHS]


def lists(path: Path) -> Any:
    planes = [np.full((k % 3, 2 + k % 2, 4), k, np.uint8) for k in range(NUM_ROWS)]
    return ColumnDataset(
        {
            "age": np.arange(NUM_ROWS, dtype=np.int8),
            "text": TEXTS,
            "maybe": with_none(TEXTS),
            "data": [bytearray(b"\xff\x00") * (k % 4) for k in range(NUM_ROWS)],
            "tokens": [row.tolist() for row in ragged("int64")],
            "scores": with_none([tuple(row.tolist()) for row in ragged("float64")]),
            "same": [[k] * 20 for k in range(NUM_ROWS)],
            "track": ragged(">i2", 3),
            "maybe_track": with_none(ragged("float32")),
            "planes": planes,
            "when": ragged("datetime64[ms]"),
            "tensors": [torch.from_numpy(row) for row in ragged("float32", 2)],
            "last": torch.randn(NUM_ROWS, 2),
        }
    )


def arrays_of_text(path: Path) -> Any:
    texts = np.array([f"{k}" * (k % 7) for k in range(NUM_ROWS)])
    return ColumnDataset({"text": texts, "data": texts.astype("S")})


def pandas(path: Path) -> Any:
    library = import_module("pandas")
    frame = library.DataFrame({"age": np.arange(NUM_ROWS), "text": VALID})
    frame["maybe"] = library.Series(with_none(VALID), dtype="string")
    frame["lists"] = [row.tolist() for row in ragged("int64")]
    frame["kind"] = library.Categorical([f"kind {k % 3}" * (k % 3) for k in range(NUM_ROWS)])
    return ColumnDataset(frame)


def polars(path: Path) -> Any:
    library = import_module("polars")
    return ColumnDataset(
        library.DataFrame(
            {
                "age": np.arange(NUM_ROWS),
                "text": VALID,
                "maybe": with_none(VALID),
                "lists": [row.tolist() for row in ragged("int64")],
            }
        )
    )


def table() -> Any:
    pa = import_module("pyarrow")
    return pa.table(
        {
            "age": pa.array(with_none(list(range(NUM_ROWS))), pa.int16()),
            "text": VALID,
            "maybe": pa.array(with_none(VALID), pa.large_string()),
            "data": [text.encode() for text in VALID],
            "kind": pa.array(VALID).dictionary_encode(),
            "tokens": pa.array([row.tolist() for row in ragged("int64")], pa.list_(pa.int32())),
            "maybe_tokens": with_none([row.tolist() for row in ragged("int64")]),
        }
    )


def arrow(path: Path) -> Any:
    pa = import_module("pyarrow")
    return ColumnDataset(pa.concat_tables([table().slice(50), table().slice(0, 50)]))


def parquet(path: Path) -> Any:
    write_table = import_module("pyarrow.parquet").write_table
    write_table(table().slice(0, 60), path / "a.parquet", row_group_size=32)
    write_table(table().slice(60), path / "b.parquet")
    return ColumnDataset(path)


def hugging_face(path: Path) -> Any:
    library = import_module("datasets")
    return library.Dataset(table())


def hugging_face_numpy(path: Path) -> Any:
    return hugging_face(path).with_format("numpy", columns=["tokens"])


def hugging_face_torch(path: Path) -> Any:
    return hugging_face(path).with_format("torch", columns=["tokens"])


def hugging_face_shuffled(path: Path) -> Any:
    return Subset(hugging_face(path).shuffle(seed=1), range(7, 80))


def combined(path: Path) -> Any:
    rows = np.random.default_rng(0).permutation(NUM_ROWS).tolist()
    joined = ConcatDataset([lists(path), Subset(lists(path), rows)])
    return Subset(joined, [*range(20, 110), *rows[:30]])


def stacked(path: Path) -> Any:
    return StackDataset(table=lists(path), label=TensorDataset(torch.arange(NUM_ROWS)))


KINDS: list[Callable[[Path], Any]] = [
    lists,
    arrays_of_text,
    pandas,
    polars,
    arrow,
    parquet,
    hugging_face,
    hugging_face_numpy,
    hugging_face_torch,
    hugging_face_shuffled,
    combined,
    stacked,
]


def build(path: Path, dataset: Any, **options: Any) -> Store:
    return build_store(dataset, path, num_shards=7, progress=False, **options)


def not_called(*arguments: Any) -> None:
    raise AssertionError("it was read item by item")


def optional(dataset: Any) -> dict[str, str]:
    """The forms of what is None in some rows, as a class of one's own must be told them."""
    names = {"maybe", "scores", "maybe_track", "age", "maybe_tokens"}
    found = {name for row in range(len(dataset)) for name in none_in(dataset[row])}
    assert found <= names | {f"table.{name}" for name in names}
    return dict.fromkeys(found, "nullable")


def none_in(sample: Any) -> list[str]:
    table = sample.get("table")
    if table is not None:
        return [f"table.{name}" for name in none_in(table)]
    return [name for name, value in sample.items() if value is None]


def assert_same_store(one: Store, other: Store) -> None:
    assert one.schema == other.schema
    assert one.manifest.probes == other.manifest.probes
    assert one.manifest.checksums == other.manifest.checksums
    assert contents(one) == contents(other)


def contents(store: Store) -> dict[str, bytes]:
    """What the files of all fields contain, by their names."""
    names = {name for column in store.manifest.columns for name in column.file_bytes}
    return {name: (store.files / name).read_bytes() for name in names}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_store_by_slices_is_the_one_written_item_by_item(
    tmp_path: Path, kind: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = kind(tmp_path)
    forms = optional(dataset)
    by_items = build(tmp_path / "items", Wrapped(dataset), variable=forms)
    assert any(field.num_variable for field in by_items.schema.fields)
    monkeypatch.setattr(range_writer, "read_samples", not_called)
    for num_rows in (37, 8192):
        monkeypatch.setattr(range_writer, "_MAX_PACKED_ROWS", num_rows)
        assert_same_store(build(tmp_path / str(num_rows), dataset, variable=forms), by_items)


any_text = st.none() | texts(6) | st.text(st.characters(), max_size=3)


@pytest.mark.slow
@given(
    rows=st.lists(
        st.tuples(any_text, st.none() | st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4)),
        min_size=1,
        max_size=30,
    ),
    range_rows=st.integers(1, 40),
    sizes=st.data(),
)
def test_any_texts_and_lists_are_stored_as_item_by_item(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str | None, list[int] | None]],
    range_rows: int,
    sizes: st.DataObject,
) -> None:
    # The first rows show what there is.
    rows = [("a", [1]), ("bc", [1, 2]), (None, None), *rows]
    shapes = sizes.draw(
        st.lists(
            st.tuples(st.integers(0, 3), st.integers(0, 3)),
            min_size=len(rows),
            max_size=len(rows),
        )
    )
    path = tmp_path_factory.mktemp("store")
    dataset = ColumnDataset(
        {
            "text": [text for text, _ in rows],
            "numbers": [numbers for _, numbers in rows],
            "plane": [np.full((*shape, 2), k, np.int16) for k, shape in enumerate(shapes)],
        }
    )
    forms: Any = {"text": "nullable", "numbers": {"form": "list", "nullable": True}}
    forms["plane"] = {"form": "pad", "dims": 2}
    by_items = build(path / "items", Wrapped(dataset), variable=forms)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(range_writer, "_MAX_PACKED_ROWS", range_rows)
        patch.setattr(range_writer, "read_samples", not_called)
        by_slices = build(path / "slices", dataset, variable=forms)
    assert_same_store(by_slices, by_items)


class Label(str):
    __slots__ = ()

    def __str__(self) -> str:
        return f"label {super().__str__()}"


ROWS: dict[str, Callable[[int], Any]] = {
    "text": lambda k: f"text {k}" * (k % 3),
    "lists": lambda k: [k] * (k % 4),
    "audio": lambda k: np.zeros(k % 4, np.float32),
}


@pytest.mark.parametrize(
    ("name", "odd"),
    [
        ("text", 7),
        ("text", b"bytes"),
        ("text", None),
        ("text", ["a"]),
        ("text", np.zeros(3, np.uint8)),
        ("lists", [1, 2.5]),
        ("lists", [True]),
        ("lists", [2**63]),
        ("lists", np.arange(3)),
        ("lists", "text"),
        ("lists", [[1]]),
        ("audio", np.zeros(3, np.float64)),
        ("audio", np.zeros((3, 2), np.float32)),
        ("audio", [1.0, 2.0]),
        ("audio", np.float32(1)),
    ],
    ids=str,
)
def test_row_that_does_not_fit_is_refused_as_item_by_item(
    tmp_path: Path, name: str, odd: Any
) -> None:
    values = [*map(ROWS[name], range(60))]
    values[31] = odd
    column = object_array(values) if name == "text" else values
    assert_refused(tmp_path, ColumnDataset({name: column}), f"row 31, field '{name}")


def assert_refused(path: Path, dataset: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message) as by_items:
        build(path / "items", Wrapped(dataset))
    # Missing values are found before the build; that is not what this is about.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_memmap.store.build.nullable_columns", lambda dataset: set())
        with pytest.raises(SchemaError) as by_slices:
            build(path / "slices", dataset)
    assert str(by_slices.value) == str(by_items.value)


def test_what_slices_cannot_give_is_read_item_by_item(tmp_path: Path) -> None:
    texts = [Label(k) if k % 7 == 5 else str(k) * (k % 3) for k in range(60)]
    dataset = ColumnDataset({"text": texts, "n": np.arange(60)})
    assert source_of(dataset, build(tmp_path / "s", dataset).schema) is not None
    assert_same_store(build(tmp_path / "s", dataset), build(tmp_path / "t", Wrapped(dataset)))


def test_hugging_face_text_in_a_format_is_what_samples_have(tmp_path: Path) -> None:
    # numpy cuts off zeros at the end of a text.
    dataset = hugging_face(tmp_path).with_format("numpy", columns=["text", "data"])
    assert dataset[2]["text"] == "\x00a\x00\x00a"
    assert_same_store(build(tmp_path / "s", dataset), build(tmp_path / "t", Wrapped(dataset)))


def test_values_that_a_narrower_dtype_does_not_hold_are_refused_at_their_row(
    tmp_path: Path,
) -> None:
    values = [np.full(k % 4, 257 if k == 31 else k) for k in range(60)]
    dataset, dtypes = ColumnDataset({"x": values}), {"x": "uint8"}
    with pytest.raises(SchemaError, match=r"row 31, .*257 cannot be kept as uint8"):
        build(tmp_path / "s", dataset, store_dtypes=dtypes)
    kept = Subset(dataset, range(30))
    by_items = build(tmp_path / "t", Wrapped(kept), store_dtypes=dtypes)
    assert_same_store(build(tmp_path / "u", kept, store_dtypes=dtypes), by_items)


def test_store_by_slices_is_the_same_with_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = parquet(tmp_path)
    forms = optional(dataset)
    by_items = build(tmp_path / "items", Wrapped(dataset), variable=forms)
    monkeypatch.setattr(range_writer, "_MAX_PACKED_ROWS", 11)
    by_workers = build(tmp_path / "workers", dataset, variable=forms, num_workers=2)
    assert_same_store(by_workers, by_items)


def test_store_by_slices_in_parts_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = ColumnDataset({"text": TEXTS, "tokens": [row.tolist() for row in ragged("int64")]})
    by_items = build(tmp_path / "items", Wrapped(dataset))
    monkeypatch.setattr(range_writer, "_MAX_PACKED_ROWS", 11)
    monkeypatch.setattr(range_writer, "read_samples", not_called)
    for part in (2, 0, 1):
        build_part(dataset, tmp_path / "parts", (part, 3), num_shards=7, progress=False)
    assert_same_store(finish_store(tmp_path / "parts", progress=False), by_items)
