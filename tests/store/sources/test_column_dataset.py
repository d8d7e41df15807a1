"""Datasets whose rows lie in arrays and tables are stored by slices: the store, and the errors, are
those of the same rows item by item."""

import datetime
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from lightning_memmap import ColumnDataset, MemmapDataModule, build_store
from lightning_memmap.errors import DatasetError, SchemaError
from lightning_memmap.store import Store, build_part, finish_store, writing
from lightning_memmap.store.columns import FixedColumn
from lightning_memmap.store.sources import source
from lightning_memmap.store.sources.source import make_source
from tests.support.datasets import Wrapped, column_files, texts

pytestmark = pytest.mark.slow


import_module("polars")  # It sets an environment variable, which a test must not do.

NUM_ROWS = 90
GENERATOR = np.random.default_rng(0)
LENGTHS = [0, 3, 1, *GENERATOR.integers(0, 9, NUM_ROWS - 3).tolist()]
WORDS = ["", "ä", "\x00a\x00", "\ud83d", "\ude00", "plain", "日本語", "é" * 40]
TEXTS = [WORDS[k % len(WORDS)] * (k % 3) + str(k) * (k % 2) for k in range(NUM_ROWS)]
VALID = [text.encode("utf-8", "replace").decode() for text in TEXTS]


def build(path: Path, dataset: Any, **options: Any) -> Store:
    return build_store(dataset, path, num_shards=7, progress=False, **options)


def not_called(*arguments: Any) -> None:
    raise AssertionError("it was read item by item")


def assert_same_store(one: Store, other: Store) -> None:
    assert one.schema == other.schema
    assert one.manifest.probes == other.manifest.probes
    assert one.manifest.checksums == other.manifest.checksums
    assert column_files(one) == column_files(other)


def assert_holds(store: Store, expected: Any) -> None:
    """Rows of one number each, bare or as the only part of a sample."""
    found: list[Any] = [store[row] for row in range(len(store))]
    for form in (lambda one: next(iter(one.values())), lambda one: one[0]):
        with suppress(AttributeError, IndexError, RuntimeError):
            found = [form(one) for one in found]
    assert [one.item() for one in found] == list(expected)


# What the rows lie in


def numbers(dtype: str, *shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).integers(0, 100, (NUM_ROWS, *shape)).astype(dtype)


def with_none(values: list[Any]) -> list[Any]:
    return [None if k % 5 == 3 else value for k, value in enumerate(values)]


def missing() -> dict[str, list[Any]]:
    """Numbers, times and truth values, of which some are None."""
    start = datetime.datetime(2024, 1, 1)
    return {
        "some_number": with_none([k / 2 for k in range(NUM_ROWS)]),
        "some_time": with_none([start + datetime.timedelta(hours=k) for k in range(NUM_ROWS)]),
        "some_flag": with_none([k % 2 == 0 for k in range(NUM_ROWS)]),
    }


def ragged(dtype: str, *shape: int) -> list[np.ndarray]:
    return [GENERATOR.integers(0, 99, (length, *shape)).astype(dtype) for length in LENGTHS]


def columns() -> dict[str, np.ndarray]:
    """Columns of numbers that every kind of table can have."""
    return {
        "age": numbers("int8"),
        "price": numbers("float32") / 7,
        "count": numbers("int64") * 2**40,
        "good": numbers("uint8") > 50,
    }


def tensors(path: Path) -> Any:
    return TensorDataset(
        torch.from_numpy(numbers("float32", 3, 2)), torch.from_numpy(numbers("int64"))
    )


def strided_tensors(path: Path) -> Any:
    return TensorDataset(
        torch.randn(NUM_ROWS, 4, dtype=torch.complex64).conj(),
        torch.nn.Parameter(torch.randn(NUM_ROWS, 2)),
        torch.arange(3 * NUM_ROWS).view(3, NUM_ROWS).T,
        torch.randn(NUM_ROWS, 3).bfloat16(),
        torch.tensor([5.0]).expand(NUM_ROWS),
    )


def one_tensor(path: Path) -> Any:
    return torch.from_numpy(numbers("uint8", 3, 8, 8))


def array(path: Path) -> Any:
    return numbers(">i4", 5)


def memmap(path: Path) -> Any:
    np.save(path / "tokens.npy", numbers("uint16", 33))
    return np.load(path / "tokens.npy", mmap_mode="r")


def mixed_columns(path: Path) -> Any:
    empty, labels = np.empty((NUM_ROWS, 0), np.float32), list(range(NUM_ROWS))
    tensor = torch.randn(NUM_ROWS, 2)
    return ColumnDataset({"tokens": memmap(path), "x": tensor, "label": labels, "empty": empty})


def subset(path: Path) -> Any:
    return Subset(tensors(path), np.random.default_rng(0).permutation(NUM_ROWS)[:71].tolist())


def subset_of_subset(path: Path) -> Any:
    return Subset(Subset(one_tensor(path), range(10, 80)), [*range(-5, 0), *range(30, 60)])


def concatenated(path: Path) -> Any:
    others = TensorDataset(torch.randn(7, 3, 2), torch.arange(7))
    joined = ConcatDataset([tensors(path), others, subset(path)])
    return Subset(joined, [*range(80, 120), 3, 150, 95, 0])


def stacked(path: Path) -> Any:
    return StackDataset(
        first=tensors(path), second=array(path), third=ColumnDataset(columns()), text=lists(path)
    )


def hdf5(path: Path) -> Any:
    file = import_module("h5py").File(path / "rows.h5", "w")
    file.create_dataset("x", data=numbers("float32", 6), chunks=(64, 6), compression="gzip")
    file.create_dataset("label", data=numbers(">u2"))
    return ColumnDataset({"x": file["x"], "label": file["label"]})


def hdf5_array(path: Path) -> Any:
    return Subset(hdf5(path).columns["x"], np.random.default_rng(0).permutation(NUM_ROWS)[:59])


def zarr_array(path: Path) -> Any:
    library = pytest.importorskip("zarr")
    x = library.create_array(str(path / "x.zarr"), shape=(NUM_ROWS, 6), chunks=(64, 6), dtype="f4")
    x[:] = numbers("float32", 6)
    return x


def zarr(path: Path) -> Any:
    return ColumnDataset({"x": zarr_array(path), "label": numbers("int64")})


def lists(path: Path) -> Any:
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
            **missing(),
            "planes": [np.full((k % 3, 2 + k % 2, 4), k, np.uint8) for k in range(NUM_ROWS)],
            "when": ragged("datetime64[ms]"),
            "tensors": [torch.from_numpy(row) for row in ragged("float32", 2)],
            "last": torch.randn(NUM_ROWS, 2),
        }
    )


def arrays_of_text(path: Path) -> Any:
    found = np.array([f"{k}" * (k % 7) for k in range(NUM_ROWS)])
    return ColumnDataset({"text": found, "data": found.astype("S")})


def combined(path: Path) -> Any:
    rows = np.random.default_rng(0).permutation(NUM_ROWS).tolist()
    joined = ConcatDataset([lists(path), Subset(lists(path), rows)])
    return Subset(joined, [*range(20, 110), *rows[:30]])


def pandas(path: Path) -> Any:
    library = import_module("pandas")
    frame = library.DataFrame({**columns(), "text": VALID})
    frame["nullable"] = library.array(numbers("int16"), dtype="Int16")
    frame["category"] = library.Categorical.from_codes(numbers("int8") % 3, [10, 20, 30])
    frame["maybe"] = library.Series(with_none(VALID), dtype="string")
    frame["lists"] = [row.tolist() for row in ragged("int64")]
    frame["kind"] = library.Categorical([f"kind {k % 3}" * (k % 3) for k in range(NUM_ROWS)])
    found = missing()
    frame["number"] = library.array(found["some_number"], dtype="Float32")
    frame["flag"] = library.array(found["some_flag"], dtype="boolean")
    frame["at"] = library.to_datetime(found["some_time"])
    frame["zoned"] = frame["at"].dt.tz_localize("Europe/Oslo")
    frame["since"] = frame["at"] - frame["at"][0]
    return ColumnDataset(frame[frame["age"] > 3])


def polars(path: Path) -> Any:
    found = {**columns(), "text": VALID, "maybe": with_none(VALID), **missing()}
    found["lists"] = [row.tolist() for row in ragged("int64")]
    return ColumnDataset(import_module("polars").DataFrame(found))


def table() -> Any:
    pa = import_module("pyarrow")
    boxes = pa.FixedSizeListArray.from_arrays(pa.array(numbers("float32", 3).reshape(-1)), 3)
    found = {
        **columns(),
        "box": boxes,
        "same": list(numbers("int32", 20)),
        "maybe_age": pa.array(with_none(list(range(NUM_ROWS))), pa.int16()),
        "text": VALID,
        "maybe": pa.array(with_none(VALID), pa.large_string()),
        "data": [text.encode() for text in VALID],
        "kind": pa.array(VALID).dictionary_encode(),
        "tokens": pa.array([row.tolist() for row in ragged("int64")], pa.list_(pa.int32())),
        "maybe_tokens": with_none([row.tolist() for row in ragged("int64")]),
        **missing(),
    }
    return pa.concat_tables([pa.table(found).slice(50), pa.table(found).slice(0, 50)])


def arrow(path: Path) -> Any:
    return ColumnDataset(table())


def parquet(path: Path) -> Any:
    rows, write_table = table(), import_module("pyarrow.parquet").write_table
    write_table(rows.slice(0, 60), path / "a.parquet", row_group_size=32)
    write_table(rows.slice(60), path / "b.parquet", row_group_size=20)
    return ColumnDataset(path)


def parquet_subset(path: Path) -> Any:
    return Subset(parquet(path), np.random.default_rng(0).permutation(NUM_ROWS)[:80].tolist())


def parquet_joined(path: Path) -> Any:
    dataset = parquet(path)
    return ConcatDataset(
        [dataset, Subset(dataset, range(9, 20)), Subset(dataset, [*range(30, 3, -1)])]
    )


def hugging_face(path: Path) -> Any:
    library = import_module("datasets")
    found = library.Dataset(table())
    return found.cast_column("age", library.Value("uint8"))


def hugging_face_labels(path: Path) -> Any:
    library = import_module("datasets")
    kinds = {
        "label": library.ClassLabel(names=["a", "b", "c"]),
        "box": library.Sequence(library.Value("float32"), length=4),
    }
    rows = {"label": numbers("int64") % 3, "box": numbers("float32", 4)}
    return library.Dataset.from_dict(rows, features=library.Features(kinds))


def hugging_face_torch(path: Path) -> Any:
    return hugging_face(path).with_format("torch", columns=["age", "price", "tokens"])


def hugging_face_numpy(path: Path) -> Any:
    return hugging_face(path).with_format("numpy", columns=["age", "count", "tokens"])


def hugging_face_shuffled(path: Path) -> Any:
    return Subset(hugging_face(path).shuffle(seed=1), range(7, 80))


KINDS: list[Callable[[Path], Any]] = [
    tensors, strided_tensors, one_tensor, array, memmap, mixed_columns, subset, subset_of_subset,
    concatenated, stacked, hdf5, hdf5_array, zarr, lists, arrays_of_text, combined, pandas, polars,
    arrow, parquet, parquet_subset, parquet_joined, hugging_face, hugging_face_labels,
    hugging_face_torch, hugging_face_numpy, hugging_face_shuffled,
]  # fmt: skip


def optional(dataset: Any) -> list[str]:
    """The names of what is None in some rows, which a class of one's own must declare."""
    return sorted({name for row in range(len(dataset)) for name in none_in(dataset[row], "")})


def none_in(sample: Any, prefix: str) -> list[str]:
    if not isinstance(sample, dict):
        return [prefix] if type(sample).__name__ in ("NoneType", "NaTType") else []
    return [
        found
        for name, part in sample.items()
        for found in none_in(part, f"{prefix}.{name}".removeprefix("."))
    ]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_store_by_slices_is_the_one_written_item_by_item(
    tmp_path: Path, kind: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = kind(tmp_path)
    nullable = optional(dataset)
    by_items = build(tmp_path / "items", Wrapped(dataset), nullable=nullable)
    assert all(none_in(by_items[k], "") == none_in(dataset[k], "") for k in range(30))
    # In many ranges, of which the last one is not whole; some also in one, as most stores are.
    monkeypatch.setattr(source.SampleReader, "read", not_called)
    for num_rows in (37, 8192) if kind in (lists, parquet, hugging_face) else (37,):
        monkeypatch.setattr(writing, "_MAX_PACKED_ROWS", num_rows)
        monkeypatch.setattr(writing, "_SLICE_BYTES", num_rows * by_items.manifest.row_bytes)
        assert_same_store(build(tmp_path / str(num_rows), dataset, nullable=nullable), by_items)


@pytest.mark.parametrize("kind", [memmap, subset, parquet, hugging_face])
def test_store_by_slices_is_the_same_with_workers_and_in_parts(
    tmp_path: Path, kind: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = kind(tmp_path)
    by_items = build(tmp_path / "items", Wrapped(dataset), nullable=optional(dataset))
    monkeypatch.setattr(writing, "_MAX_PACKED_ROWS", 11)
    assert_same_store(build(tmp_path / "workers", dataset, num_workers=2), by_items)
    monkeypatch.setattr(source.SampleReader, "read", not_called)
    for part in (2, 0, 1):
        build_part(dataset, tmp_path / "parts", (part, 3), num_shards=7, progress=False)
    assert_same_store(finish_store(tmp_path / "parts", progress=False), by_items)


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    num_shards=st.integers(1, 9),
    range_rows=st.integers(1, 50),
    seed=st.integers(0, 99),
    num_picked=st.integers(1, 60),
)
def test_any_rows_of_joined_arrays_are_stored_in_their_order(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    num_shards: int,
    range_rows: int,
    seed: int,
    num_picked: int,
) -> None:
    starts = np.cumsum([0, *sizes])
    parts = [TensorDataset(torch.arange(starts[k], starts[k + 1])) for k in range(len(sizes))]
    rows = np.random.default_rng(seed).integers(-starts[-1], starts[-1], num_picked)
    path = tmp_path_factory.mktemp("store") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "_SLICE_BYTES", 8 * range_rows)
        patch.setattr(source.SampleReader, "read", not_called)
        dataset = Subset(ConcatDataset(parts), rows.tolist())
        store = build_store(dataset, path, num_shards=num_shards, progress=False)
    assert_holds(store, rows % starts[-1])


any_text = st.none() | texts(6) | st.text(st.characters(), max_size=3)
any_row = st.tuples(
    any_text,
    st.none() | st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
)


@pytest.mark.slow
@given(rows=st.lists(any_row, min_size=1, max_size=30), range_rows=st.integers(1, 40))
def test_any_texts_and_lists_are_stored_as_item_by_item(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], range_rows: int
) -> None:
    # The first rows show what there is.
    rows = [("a", [1], (1, 1)), ("bc", [1, 2], (2, 1)), (None, None, (1, 2)), *rows]
    path = tmp_path_factory.mktemp("store")
    planes = [np.full((*shape, 2), k, np.int16) for k, (_, _, shape) in enumerate(rows)]
    found = {"text": [row[0] for row in rows], "numbers": [row[1] for row in rows], "plane": planes}
    declared: Any = {"variable": {"numbers": 1, "plane": 2}, "nullable": ["text", "numbers"]}
    dataset = ColumnDataset(found)
    by_items = build(path / "items", Wrapped(dataset), **declared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "_MAX_PACKED_ROWS", range_rows)
        patch.setattr(source.SampleReader, "read", not_called)
        by_slices = build(path / "slices", dataset, **declared)
    assert_same_store(by_slices, by_items)


# What does not fit, and what must be read item by item


class Label(str):
    __slots__ = ()

    def __str__(self) -> str:
        return f"label {super().__str__()}"


def test_what_slices_cannot_give_is_read_item_by_item(tmp_path: Path) -> None:
    found = [Label(k) if k % 7 == 5 else str(k) * (k % 3) for k in range(60)]
    dataset = ColumnDataset({"text": found, "n": np.arange(60)})
    assert make_source(dataset, build(tmp_path / "s", dataset).schema).is_sliced
    assert_same_store(build(tmp_path / "s", dataset), build(tmp_path / "t", Wrapped(dataset)))


ROWS: dict[str, Callable[[int], Any]] = {
    "text": lambda k: f"text {k}" * (k % 3),
    "lists": lambda k: [k] * (k % 4),
    "audio": lambda k: np.zeros(k % 4, np.float32),
}


@pytest.mark.parametrize(
    ("name", "odd"),
    [
        *(("text", odd) for odd in (7, b"bytes", None, ["a"], np.zeros(3, np.uint8))),
        *(("lists", odd) for odd in ([1, 2.5], [True], [2**63], np.arange(3.0), "text", [[1]])),
        ("audio", np.zeros(3, np.float64)),
        ("audio", np.zeros((3, 2), np.float32)),
        ("audio", [1.0, 2.0]),
        ("audio", np.float32(1)),
    ],
    ids=str,
)
def test_row_that_does_not_fit_is_refused_as_item_by_item(
    tmp_path: Path, name: str, odd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [*map(ROWS[name], range(60))]
    values[31] = odd
    dataset = ColumnDataset({name: values})
    # Missing values are found before the build; that is not what this is about.
    monkeypatch.setattr("lightning_memmap.store.probes.find_columns", lambda dataset: None)
    with pytest.raises(SchemaError, match=f"row 31, field '{name}") as by_items:
        build(tmp_path / "items", Wrapped(dataset))
    with pytest.raises(SchemaError) as by_slices:
        build(tmp_path / "slices", dataset)
    assert str(by_slices.value) == str(by_items.value)


class Doubled(TensorDataset):
    def __getitem__(self, row: int) -> Any:
        return (2 * super().__getitem__(row)[0],)


class OwnSubset(Subset[Any]):
    def __getitem__(self, row: Any) -> Any:
        return (-super().__getitem__(row)[0],)

    def __getitems__(self, rows: list[int]) -> list[Any]:
        return [self[row] for row in rows]


class OwnTensor(torch.Tensor):
    def __getitem__(self, row: Any) -> Any:
        return super().as_subclass(torch.Tensor)[row] + 1


class Batched(Wrapped):
    """Gives many rows at once, and notes how many."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self.counts: list[int] = []

    def __getitems__(self, rows: list[int]) -> list[Any]:
        self.counts.append(len(rows))
        return [self.dataset[row] for row in rows]


class Negated(Batched):
    def __getitem__(self, row: int) -> Any:
        return -self.dataset[row]


VALUES = torch.arange(40.0)


@pytest.mark.parametrize(
    "dataset",
    [
        Doubled(VALUES),
        OwnSubset(TensorDataset(VALUES), range(40)),
        Subset(ConcatDataset([TensorDataset(VALUES), Doubled(VALUES)]), range(80)),
        VALUES.as_subclass(OwnTensor),
        Negated(VALUES),
        Subset(Negated(VALUES), range(40)),
    ],
    ids=["dataset", "subset", "within", "tensor", "inherits getitems", "subset of that"],
)
def test_what_a_subclass_overrides_decides_what_is_stored(tmp_path: Path, dataset: Any) -> None:
    store = build(tmp_path / "store", dataset)
    expected = [dataset[row] for row in range(len(dataset))]
    assert_holds(store, [float(one[0] if isinstance(one, tuple) else one) for one in expected])


def test_dataset_that_gives_many_rows_at_once_is_read_in_slices(tmp_path: Path) -> None:
    dataset = Batched(torch.randn(3000))
    assert_holds(build(tmp_path / "store", dataset), dataset.dataset.tolist())
    assert sum(dataset.counts) == 3000
    assert len(dataset.counts) < 10


def test_dataset_that_raises_for_many_rows_names_the_row(tmp_path: Path) -> None:
    class Broken(Batched):
        def __getitems__(self, rows: list[int]) -> list[Any]:
            raise ValueError("many")

        def __getitem__(self, row: int) -> Any:
            if row == 33:
                raise ValueError("one")
            return self.dataset[row]

    with pytest.raises(DatasetError, match="raised at row 33: ValueError: one"):
        build(tmp_path / "store", Broken(torch.randn(60)))


def test_hugging_face_images_and_transforms_are_stored_as_items(tmp_path: Path) -> None:
    datasets = import_module("datasets")
    from PIL import Image

    images = [Image.fromarray(pixels) for pixels in numbers("uint8", 5, 4, 3)[:20]]
    features = datasets.Features({"image": datasets.Image()})
    dataset = datasets.Dataset.from_dict({"image": images}, features=features)
    store = build(tmp_path / "images", dataset)
    for row, image in enumerate(images):
        assert np.array_equal(store[row]["image"].movedim(0, -1), image)
    dataset = datasets.Dataset.from_dict({"x": list(range(50))})
    dataset.set_transform(lambda batch: {"x": [value * 2 for value in batch["x"]]})
    assert_holds(build(tmp_path / "transform", dataset), range(0, 100, 2))


def test_hugging_face_text_in_a_format_is_what_samples_have(tmp_path: Path) -> None:
    # numpy cuts off zeros at the end of a text.
    data = {"text": VALID, "data": [text.encode() for text in VALID]}
    dataset = import_module("datasets").Dataset.from_dict(data).with_format("numpy")
    assert dataset[2]["text"] == "\x00a\x00\x00a"
    assert_same_store(build(tmp_path / "s", dataset), build(tmp_path / "t", Wrapped(dataset)))


def test_hugging_face_dtype_is_what_a_single_sample_has(tmp_path: Path) -> None:
    data = {"label": list(range(50)), "x": [[row, 1.0] for row in range(50)]}
    dataset = import_module("datasets").Dataset.from_dict(data)
    dataset = dataset.with_format("numpy", dtype=np.int32)
    # Read with others, a label has the dtype of the format, and alone it has not.
    assert dataset[3]["label"].dtype == np.int64
    assert dataset.__getitems__([3, 4])[0]["label"].dtype == np.int32
    store = build(tmp_path / "s", dataset)
    assert {field.name: str(field) for field in store.schema.fields} == {
        "label": "int64 ()",
        "x": "int32 (2,)",
    }
    assert_same_store(store, build(tmp_path / "t", Wrapped(dataset)))


# Other builds of the same dataset


def test_store_by_slices_that_was_interrupted_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = TensorDataset(torch.arange(1000))
    monkeypatch.setattr(writing, "_SLICE_BYTES", 8 * 100)
    written: list[int] = []
    write = FixedColumn.write

    def interrupt(self: FixedColumn, files: Any, rows: Any, values: Any) -> None:
        if len(written) == 4:
            raise KeyboardInterrupt
        written.append(int(values.data[0]))
        write(self, files, rows, values)

    monkeypatch.setattr(FixedColumn, "write", interrupt)
    with suppress(KeyboardInterrupt):
        build(tmp_path / "store", dataset)
    assert "400 of 1,000 rows are kept" in caplog.text
    written.append(-1)
    store = build(tmp_path / "store", dataset)
    assert written == [0, 100, 200, 300, -1, 400, 500, 600, 700, 800, 900]
    assert_holds(store, range(1000))


@pytest.mark.parametrize("kind", [pandas, arrow, polars, hdf5])
def test_store_of_changed_columns_is_refused(
    tmp_path: Path, kind: Callable[[Path], ColumnDataset]
) -> None:
    dataset = kind(tmp_path)
    build(tmp_path / "store", dataset)
    found = dict(dataset.columns)
    if kind is hdf5:  # The file was written again.
        file = found["x"].file
        file["x"][33] = -1
        file.flush()
    else:
        found["age"] = found["age"].copy()
        found["age"][33] += 1
    with pytest.raises(DatasetError, match="row 33 of the dataset differs"):
        build(tmp_path / "store", ColumnDataset(found))


# What is a dataset, a table or a column


def later_tables() -> dict[str, Any]:
    """Tables that are computed or read when they are asked for."""
    pa, library = import_module("pyarrow"), import_module("polars")
    found = pa.table({"x": [1, 2, 3], "y": [0.5, 1.5, 2.5]})
    dataset = import_module("pyarrow.dataset").dataset(found)

    class DuckDBPyRelation:
        to_arrow_table = staticmethod(lambda: found)

    DuckDBPyRelation.__module__ = "duckdb._relation"
    return {
        "LazyFrame": library.LazyFrame(found.to_pydict()),
        "RecordBatch": pa.record_batch(found.to_pydict()),
        "RecordBatchReader": found.to_reader(),
        "InMemoryDataset": dataset,
        "Scanner": dataset.scanner(),
        "DuckDBPyRelation": DuckDBPyRelation(),
    }


@pytest.mark.parametrize("kind", [*later_tables()])
def test_table_that_is_computed_later_has_columns(tmp_path: Path, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"a {kind} has columns, not rows: .*ColumnDataset"):
        build_store(later_tables()[kind], tmp_path / "store")
    with pytest.raises(TypeError, match=f"column 'x': found a {kind}, which has no rows"):
        ColumnDataset({"x": later_tables()[kind]})
    dataset = ColumnDataset(later_tables()[kind], names=["y", "x"])
    assert dataset[2] == {"y": 2.5, "x": 3}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: {"x": torch.zeros(3)}, r"has columns, not rows: .*ColumnDataset"),
        (lambda path: import_module("pyarrow").table({"x": [1]}), "has columns, not rows"),
        (lambda path: import_module("pandas").DataFrame({"x": [1]}), "has columns, not rows"),
        (lambda path: import_module("polars").DataFrame({"x": [1]}), "has columns, not rows"),
        (zarr_array, r"an Array has no length: .*ColumnDataset"),
        (lambda path: 5, r"5: an int has no length"),
        (lambda path: None, "None: a NoneType has no length"),
    ],
)
def test_what_is_no_dataset_is_refused_with_the_way_out(
    tmp_path: Path, make: Any, words: str
) -> None:
    with pytest.raises(TypeError, match=f"dataset(: |=).*{words}"):
        build_store(make(tmp_path), tmp_path / "store")


@pytest.mark.parametrize(
    ("given", "names", "error", "message"),
    [
        ({}, None, ValueError, "columns"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, None, ValueError, "column 'y' has 4 rows"),
        ({"x": np.zeros(3), "y": 4}, None, TypeError, "column 'y': found a int"),
        ({"x": np.zeros(3)}, ["y"], ValueError, "column 'y'"),
        ({"x": np.zeros(3)}, ["x", "x"], ValueError, "column 'x'"),
        ({"x": np.zeros(3)}, "x", TypeError, "names='x'"),
        (np.zeros(3), None, TypeError, "columns: found a ndarray"),
        (TensorDataset(torch.zeros(3)), None, TypeError, "columns: a TensorDataset"),
        (
            import_module("datasets").Dataset.from_dict({"x": [1]}),
            None,
            TypeError,
            "columns: a Dataset",
        ),
        ({"x": {"y": np.zeros(3)}}, None, TypeError, "column 'x': found a dict, which has no rows"),
        ({"x": "abc"}, None, TypeError, "column 'x': found a str, which has no rows"),
        (
            {"x": import_module("pandas").DataFrame({"a": [1]})},
            None,
            TypeError,
            "column 'x': found a DataFrame, which has no rows",
        ),
    ],
)
def test_columns_that_make_no_dataset_are_refused(
    given: Any, names: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ColumnDataset(given, names)


def test_dict_of_splits_is_refused_with_the_way_out(tmp_path: Path) -> None:
    datasets = import_module("datasets")
    split = datasets.Dataset.from_dict({"x": [1, 2]})
    given = datasets.DatasetDict({"train": split, "test": split})
    words = r"a DatasetDict .* splits \['train', 'test'"
    with pytest.raises(TypeError, match=f"dataset: {words}"):
        build_store(given, tmp_path / "s")
    with pytest.raises(TypeError, match=f"columns: {words}"):
        ColumnDataset(given)
    with pytest.raises(TypeError, match=f"train_dataset: {words}"):
        MemmapDataModule(given, store_dir=tmp_path)
    data = MemmapDataModule(val_dataset=given, store_dir=tmp_path)
    assert list(data.val_dataset) == ["train", "test"]


def test_column_dataset_rows_outside_raise_index_error() -> None:
    dataset = ColumnDataset({"x": np.arange(3)})
    assert [int(sample["x"]) for sample in (dataset[0], dataset[-1])] == [0, 2]
    for row in (3, -4):
        with pytest.raises(IndexError, match=f"row {row}"):
            dataset[row]


class Labelled:
    """A Series of a library that is not known."""

    shape, dtype, iloc = (5,), np.dtype("int64"), None

    def __getitem__(self, label: int) -> int:
        return [5, 0, 1, 2, 7].index(label) + 10

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.arange(10, 15)


def series(kind: str) -> Any:
    """The numbers 10 to 14, where a library has labels in another order than the rows."""
    library, pa = import_module("pandas"), import_module("pyarrow")
    kinds: dict[str, Callable[[], Any]] = {
        "pyarrow array": lambda: pa.array(range(10, 15)),
        "pyarrow chunks": lambda: pa.chunked_array([[10, 11], [12, 13, 14]]),
        "polars": lambda: import_module("polars").Series([10, 11, 12, 13, 14]),
        "pandas index": lambda: library.Index(range(10, 15)),
        "unknown": Labelled,
    }
    if kind in kinds:
        return kinds[kind]()
    values = library.array(range(10, 15), "Int64") if kind == "pandas Int64" else range(10, 15)
    derived = type("Derived", (library.Series,), {"__module__": "elsewhere"})
    made = derived if kind == "derived class" else library.Series
    return made(values, index=[5, 0, 1, 2, 7])


@pytest.mark.parametrize(
    "kind",
    ["pandas", "pandas Int64", "pandas index", "derived class", "polars", "pyarrow array",
     "pyarrow chunks", "unknown"],
)  # fmt: skip
def test_series_is_read_by_position(tmp_path: Path, kind: str) -> None:
    dataset = ColumnDataset({"x": series(kind)})
    assert [dataset[row]["x"] for row in range(-5, 5)] == [10, 11, 12, 13, 14] * 2
    assert_holds(build(tmp_path / "s", dataset), range(10, 15))


def test_tensordict_and_tensor_that_requires_grad_are_columns(tmp_path: Path) -> None:
    given = {"x": TensorDict({"a": torch.arange(3)}, [3]), "y": torch.nn.Parameter(torch.zeros(3))}
    dataset = ColumnDataset(given)
    assert not dataset[1]["y"].requires_grad
    store = build(tmp_path / "s", dataset)
    assert [int(store[row]["x"]["a"]) for row in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    "values",
    [["a\0", "bc"], [b"a\0", b"bc"], [[1], [2, 3]], [["a", "b"], ["c", "d"]], [2, 3], [[2], [3]]],
    ids=str,
)
def test_list_is_a_column_of_its_items(tmp_path: Path, values: list[Any]) -> None:
    dataset = ColumnDataset({"x": values})
    store = build(tmp_path / "s", dataset)
    for row, value in enumerate(values):
        for found in (dataset[row]["x"], store[row]["x"]):
            assert (found.tolist() if hasattr(found, "tolist") else found) == value
    with pytest.raises(SchemaError, match=r"row 1, field 'x': found uint8 .* expected int64"):
        build(tmp_path / "t", ColumnDataset({"x": [1, "a"]}))
