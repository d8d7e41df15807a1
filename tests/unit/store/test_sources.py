"""Datasets whose rows lie in arrays are stored by slices: the same bytes as item by item, and the
samples that a DataLoader gives."""

from collections.abc import Callable, Iterator
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
from torch.utils.data import ConcatDataset, DataLoader, StackDataset, Subset, TensorDataset

from lightning_memmap import ColumnDataset, MemmapDataModule, build_store
from lightning_memmap.errors import DatasetError, SchemaError
from lightning_memmap.schema import Schema
from lightning_memmap.store import range_writer
from lightning_memmap.store.columns import FixedColumn
from lightning_memmap.store.files import leaf_bytes
from lightning_memmap.store.sources import source_of
from tests.datasets import Wrapped, column_files

import_module("polars")  # It sets an environment variable, which a test must not do.

NUM_ROWS = 150


def numbers(dtype: str, *shape: int) -> np.ndarray:
    generator = np.random.default_rng(len(shape))
    return generator.integers(0, 100, (NUM_ROWS, *shape)).astype(dtype)


def columns() -> dict[str, np.ndarray]:
    """Columns of numbers that every kind of table can have."""
    return {
        "age": numbers("int8"),
        "price": numbers("float32") / 7,
        "balance": numbers("float64") / 3,
        "count": numbers("int64") * 2**40,
        "good": numbers("uint8") > 50,
    }


def tensors(path: Path) -> Any:
    return TensorDataset(
        torch.from_numpy(numbers("float32", 3, 2)), torch.from_numpy(numbers("int64"))
    )


def strided_tensors(path: Path) -> Any:
    values = torch.randn(NUM_ROWS, 4, dtype=torch.complex64)
    return TensorDataset(
        values.mT.contiguous().mT if values.ndim > 2 else values.conj(),
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
    np.save(path / "tokens.npy", numbers("uint16", 33))
    tokens = np.load(path / "tokens.npy", mmap_mode="r")
    empty = np.empty((NUM_ROWS, 0), np.float32)
    labels = list(range(NUM_ROWS))
    return ColumnDataset(
        {"tokens": tokens, "x": torch.randn(NUM_ROWS, 2), "label": labels, "empty": empty}
    )


def subset(path: Path) -> Any:
    rows = np.random.default_rng(0).permutation(NUM_ROWS)[:101]
    return Subset(tensors(path), rows.tolist())


def subset_of_subset(path: Path) -> Any:
    return Subset(Subset(one_tensor(path), range(10, 140)), [*range(-5, 0), *range(50, 120)])


def concatenated(path: Path) -> Any:
    others = TensorDataset(torch.randn(7, 3, 2), torch.arange(7))
    return Subset(
        ConcatDataset([tensors(path), others, subset(path)]), [*range(130, 170), 3, 250, 155, 0]
    )


def concatenated_whole(path: Path) -> Any:
    return ConcatDataset([one_tensor(path), one_tensor(path)[:3], one_tensor(path).flip(0)])


def stacked(path: Path) -> Any:
    return StackDataset(first=tensors(path), second=array(path), third=ColumnDataset(columns()))


def hdf5(path: Path) -> Any:
    h5py = import_module("h5py")
    file = h5py.File(path / "rows.h5", "w")
    file.create_dataset("x", data=numbers("float32", 6), chunks=(64, 6), compression="gzip")
    file.create_dataset("label", data=numbers(">u2"))
    return ColumnDataset({"x": file["x"], "label": file["label"]})


def hdf5_array(path: Path) -> Any:
    return Subset(hdf5(path).columns["x"], np.random.default_rng(0).permutation(NUM_ROWS)[:59])


def zarr(path: Path) -> Any:
    library = import_module("zarr")
    x = library.create_array(str(path / "x.zarr"), shape=(NUM_ROWS, 6), chunks=(64, 6), dtype="f4")
    x[:] = numbers("float32", 6)
    label = library.create_array(str(path / "label.zarr"), shape=(NUM_ROWS,), dtype="i8")
    label[:] = numbers("int64")
    return ColumnDataset({"x": x, "label": label})


def pandas(path: Path) -> Any:
    library = import_module("pandas")
    frame = library.DataFrame(columns())
    frame["nullable"] = library.array(numbers("int16"), dtype="Int16")
    frame["category"] = library.Categorical.from_codes(numbers("int8") % 3, [10, 20, 30])
    return ColumnDataset(frame[frame["age"] > 3])


def polars(path: Path) -> Any:
    frame = import_module("polars").DataFrame(columns())
    return ColumnDataset(frame)


def table() -> Any:
    pa = import_module("pyarrow")
    lists = pa.FixedSizeListArray.from_arrays(pa.array(numbers("float32", 3).reshape(-1)), 3)
    whole = pa.table({**columns(), "box": lists, "tokens": list(numbers("int32", 20))})
    return pa.concat_tables([whole.slice(50), whole.slice(0, 50)])


def arrow(path: Path) -> Any:
    return ColumnDataset(table())


def parquet(path: Path) -> Any:
    table()
    write_table = import_module("pyarrow.parquet").write_table
    write_table(table().slice(0, 101), path / "a.parquet", row_group_size=32)
    write_table(table().slice(101), path / "b.parquet", row_group_size=20)
    return ColumnDataset(path)


def parquet_subset(path: Path) -> Any:
    rows = np.random.default_rng(0).permutation(NUM_ROWS)
    return Subset(parquet(path), rows[:140].tolist())


def hugging_face(path: Path) -> Any:
    library = import_module("datasets")
    labels = library.Features(
        {
            "age": library.Value("uint8"),
            "price": library.Value("float32"),
            "balance": library.Value("float64"),
            "count": library.Value("int64"),
            "good": library.Value("bool"),
            "label": library.ClassLabel(names=["a", "b", "c"]),
            "box": library.Sequence(library.Value("float32"), length=4),
            "tokens": library.Sequence(library.Value("int32")),
        }
    )
    data = {
        **columns(),
        "label": numbers("int64") % 3,
        "box": numbers("float32", 4),
        "tokens": numbers("int32", 20),
    }
    return library.Dataset.from_dict(data, features=labels)


def hugging_face_torch(path: Path) -> Any:
    return hugging_face(path).with_format("torch")


def hugging_face_numpy(path: Path) -> Any:
    return hugging_face(path).with_format("numpy", columns=["age", "balance", "tokens"])


def hugging_face_shuffled(path: Path) -> Any:
    return Subset(hugging_face(path).shuffle(seed=1), range(7, 120))


KINDS: list[Callable[[Path], Any]] = [
    tensors,
    strided_tensors,
    one_tensor,
    array,
    memmap,
    mixed_columns,
    subset,
    subset_of_subset,
    concatenated,
    concatenated_whole,
    stacked,
    hdf5,
    hdf5_array,
    zarr,
    pandas,
    polars,
    arrow,
    parquet,
    parquet_subset,
    hugging_face,
    hugging_face_torch,
    hugging_face_numpy,
    hugging_face_shuffled,
]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def plain(value: Any) -> torch.Tensor:
    if torch.is_tensor(value):
        return value.detach().resolve_conj().contiguous()
    array = np.array(value)
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))


def assert_same(one: Any, other: Any) -> None:
    """Samples of one structure, with the same bits."""
    if isinstance(one, dict):
        assert list(one) == list(other)
        one, other = list(one.values()), list(other.values())
    if isinstance(one, (list, tuple)):
        for first, second in zip(one, other, strict=True):
            assert_same(first, second)
        return
    found, expected = map(plain, (one, other))
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert leaf_bytes(found).tobytes() == leaf_bytes(expected).tobytes()


@each_kind
def test_store_by_slices_has_the_bytes_of_one_written_item_by_item(
    tmp_path: Path, kind: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = kind(tmp_path)
    assert source_of(dataset, Schema.infer([dataset[0]])) is not None
    by_items = build_store(Wrapped(dataset), tmp_path / "items", num_shards=7, progress=False)
    # In many ranges, of which the last one is not whole.
    monkeypatch.setattr(range_writer, "_SLICE_BYTES", 37 * by_items.manifest.row_bytes)
    monkeypatch.setattr(range_writer, "read_samples", not_called)
    by_slices = build_store(dataset, tmp_path / "slices", num_shards=7, progress=False)
    assert column_files(by_slices) == column_files(by_items)
    assert by_slices.manifest.probes == by_items.manifest.probes
    assert by_slices.manifest.checksums == by_items.manifest.checksums
    assert by_slices.schema == by_items.schema


def not_called(*arguments: Any) -> None:
    raise AssertionError("it was read item by item")


@each_kind
def test_store_by_slices_gives_the_samples_of_a_data_loader(
    tmp_path: Path, kind: Callable[[Path], Any]
) -> None:
    dataset = kind(tmp_path)
    store = build_store(dataset, tmp_path / "store", progress=False)
    samples: Iterator[Any] = iter(DataLoader(dataset, batch_size=None, collate_fn=lambda one: one))
    for row, sample in enumerate(samples):
        assert_same(store[row], sample)
    assert row == len(store) - 1


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
        patch.setattr(range_writer, "_SLICE_BYTES", 8 * range_rows)
        patch.setattr(range_writer, "read_samples", not_called)
        dataset = Subset(ConcatDataset(parts), rows.tolist())
        store = build_store(dataset, path, num_shards=num_shards, progress=False)
    assert [int(store[row][0]) for row in range(num_picked)] == (rows % starts[-1]).tolist()


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


@pytest.mark.parametrize("kind", ["dataset", "subset", "inner", "tensor"])
def test_what_a_subclass_overrides_decides_what_is_stored(tmp_path: Path, kind: str) -> None:
    values = torch.arange(40.0)
    dataset: Any = {
        "dataset": lambda: Doubled(values),
        "subset": lambda: OwnSubset(TensorDataset(values), range(40)),
        "inner": lambda: Subset(ConcatDataset([TensorDataset(values), Doubled(values)]), range(80)),
        "tensor": lambda: values.as_subclass(OwnTensor),
    }[kind]()
    store = build_store(dataset, tmp_path / "store", progress=False)
    for row in range(len(dataset)):
        assert_same(store[row], dataset[row])


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


def test_dataset_that_gives_many_rows_at_once_is_read_in_slices(tmp_path: Path) -> None:
    values = torch.randn(3000, 2)
    dataset = Batched(values)
    store = build_store(dataset, tmp_path / "store", progress=False)
    assert sum(dataset.counts) == 3000
    assert len(dataset.counts) < 10
    for row in range(3000):
        assert_same(store[row], values[row])


@pytest.mark.parametrize("inner", [False, True])
def test_getitem_of_a_subclass_wins_over_an_inherited_getitems(tmp_path: Path, inner: bool) -> None:
    values = torch.randn(60)
    dataset = Negated(values)
    given = Subset(dataset, range(60)) if inner else dataset
    store = build_store(given, tmp_path / "store", progress=False)
    assert dataset.counts == []
    assert_same([store[row] for row in range(60)], list(-values))


def test_dataset_that_raises_for_many_rows_names_the_row(tmp_path: Path) -> None:
    class Broken(Batched):
        def __getitems__(self, rows: list[int]) -> list[Any]:
            raise ValueError("many")

        def __getitem__(self, row: int) -> Any:
            if row == 33:
                raise ValueError("one")
            return self.dataset[row]

    with pytest.raises(DatasetError, match="raised at row 33: ValueError: one"):
        build_store(Broken(torch.randn(60)), tmp_path / "store", progress=False)


def test_arrow_lists_of_other_lengths_are_refused_at_their_row(tmp_path: Path) -> None:
    pa = import_module("pyarrow")
    lists = pa.table({"tokens": [[1, 2, 3]] * 30 + [[1, 2]] + [[1, 2, 3]] * 30})
    with pytest.raises(SchemaError, match="row 30, field 'tokens'"):
        build_store(ColumnDataset(lists), tmp_path / "store", progress=False)


@pytest.mark.parametrize("length", [3, 40])
def test_hugging_face_lists_of_other_lengths_are_stored(tmp_path: Path, length: int) -> None:
    datasets = import_module("datasets")
    rows = [list(range(length))] * 30 + [list(range(length + 1))] * 30
    dataset = datasets.Dataset.from_dict({"tokens": rows})
    store = build_store(dataset, tmp_path / "store", progress=False)
    for row, tokens in enumerate(rows):
        assert [int(token) for token in store[row]["tokens"]] == tokens


def test_hugging_face_images_and_numbers_are_stored_as_items(tmp_path: Path) -> None:
    datasets = import_module("datasets")
    from PIL import Image

    images = [Image.fromarray(pixels) for pixels in numbers("uint8", 5, 4, 3)[:20]]
    dataset = datasets.Dataset.from_dict(
        {"image": images, "label": list(range(20))},
        features=datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")}),
    )
    store = build_store(dataset, tmp_path / "store", progress=False)
    for row, image in enumerate(images):
        expected = torch.from_numpy(np.asarray(image).copy()).movedim(-1, 0)
        assert store[row]["image"].equal(expected)
        assert store[row]["label"] == row


def test_hugging_face_transform_decides_what_is_stored(tmp_path: Path) -> None:
    datasets = import_module("datasets")
    dataset = datasets.Dataset.from_dict({"x": list(range(50))})
    dataset.set_transform(lambda batch: {"x": [value * 2 for value in batch["x"]]})
    store = build_store(dataset, tmp_path / "store", progress=False)
    assert [int(store[row]["x"]) for row in range(50)] == list(range(0, 100, 2))


@pytest.mark.parametrize("kind", [memmap, subset, parquet, hugging_face])
def test_store_by_slices_is_the_same_with_workers(
    tmp_path: Path, kind: Callable[[Path], Any]
) -> None:
    dataset = kind(tmp_path)
    by_items = build_store(Wrapped(dataset), tmp_path / "items", progress=False)
    store = build_store(dataset, tmp_path / "s", num_workers=2, progress=False)
    assert column_files(store) == column_files(by_items)


def test_store_by_slices_that_was_interrupted_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = TensorDataset(torch.arange(1000))
    monkeypatch.setattr(range_writer, "_SLICE_BYTES", 8 * 100)
    written: list[int] = []
    write = FixedColumn.write

    def interrupt(self: FixedColumn, files: Any, rows: Any, values: Any) -> None:
        if len(written) == 4:
            raise KeyboardInterrupt
        written.append(int(values.data[0]))
        write(self, files, rows, values)

    monkeypatch.setattr(FixedColumn, "write", interrupt)
    with suppress(KeyboardInterrupt):
        build_store(dataset, tmp_path / "store", progress=False)
    assert "400 of 1,000 rows are kept" in caplog.text
    written.append(-1)
    store = build_store(dataset, tmp_path / "store", progress=False)
    assert written == [0, 100, 200, 300, -1, 400, 500, 600, 700, 800, 900]
    assert [int(store[row][0]) for row in range(1000)] == list(range(1000))


@pytest.mark.parametrize("kind", [pandas, arrow, polars])
def test_store_of_changed_columns_is_refused(
    tmp_path: Path, kind: Callable[[Path], ColumnDataset]
) -> None:
    dataset = kind(tmp_path)
    build_store(dataset, tmp_path / "store", progress=False)
    changed = dataset.columns["age"].copy()
    changed[33] += 1
    other = ColumnDataset({**dataset.columns, "age": changed})
    with pytest.raises(DatasetError, match="row 33 of the dataset differs"):
        build_store(other, tmp_path / "store", progress=False)


def test_store_of_a_file_that_was_written_again_is_refused(tmp_path: Path) -> None:
    dataset = hdf5(tmp_path)
    build_store(dataset, tmp_path / "store", progress=False)
    changed = dataset.columns["x"].file
    changed["x"][33] = -1
    changed.flush()
    with pytest.raises(DatasetError, match="row 33 of the dataset differs"):
        build_store(ColumnDataset(dict(changed)), tmp_path / "store", progress=False)


def later_tables() -> dict[str, Any]:
    """Tables that are computed or read when they are asked for."""
    pa, polars = import_module("pyarrow"), import_module("polars")
    columns = {"x": [1, 2, 3], "y": [0.5, 1.5, 2.5]}
    found = pa.table(columns)
    dataset = import_module("pyarrow.dataset").dataset(found)

    class DuckDBPyRelation:
        to_arrow_table = staticmethod(lambda: found)

    DuckDBPyRelation.__module__ = "duckdb._relation"
    return {
        "LazyFrame": polars.LazyFrame(columns),
        "RecordBatch": pa.record_batch(columns),
        "RecordBatchReader": found.to_reader(),
        "InMemoryDataset": dataset,
        "Scanner": dataset.scanner(),
        "DuckDBPyRelation": DuckDBPyRelation(),
    }


@pytest.mark.parametrize("kind", [*later_tables()])
def test_table_that_is_computed_later_has_columns(tmp_path: Path, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"a {kind} has columns and no rows: give .*ColumnDataset"):
        build_store(later_tables()[kind], tmp_path / "store")
    with pytest.raises(TypeError, match=f"column 'x': found a {kind}, which has no rows"):
        ColumnDataset({"x": later_tables()[kind]})
    dataset = ColumnDataset(later_tables()[kind], names=["y", "x"])
    assert dataset[2] == {"y": 2.5, "x": 3}


@pytest.mark.parametrize("kind", ["dict", "pandas", "polars", "pyarrow"])
def test_table_is_refused_as_a_dataset_with_the_way_out(tmp_path: Path, kind: str) -> None:
    found: Any = {"x": torch.zeros(3)}
    if kind == "pyarrow":
        found = import_module("pyarrow").table({"x": [1, 2]})
    elif kind != "dict":
        found = import_module(kind).DataFrame({"x": [1, 2]})
    with pytest.raises(TypeError, match=r"has columns and no rows: give .*ColumnDataset"):
        build_store(found, tmp_path / "store")


@pytest.mark.parametrize(
    ("given", "names", "error", "message"),
    [
        ({}, None, ValueError, "there are none"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, None, ValueError, "column 'y' has 4 rows"),
        ({"x": np.zeros(3), "y": 4}, None, TypeError, "column 'y': found a int"),
        ({"x": np.zeros(3)}, ["y"], ValueError, "column 'y': there is no such column"),
        ({"x": np.zeros(3)}, ["x", "x"], ValueError, "column 'x': it is there twice"),
        ({"x": np.zeros(3)}, "x", TypeError, "names='x': give a list"),
        (np.zeros(3), None, TypeError, "columns: found a ndarray"),
        ({"x": {"y": np.zeros(3)}}, None, TypeError, "column 'x': found a dict, which has no rows"),
        ({"x": "abc"}, None, TypeError, "column 'x': found a str, which has no rows"),
    ],
)
def test_columns_that_make_no_dataset_are_refused(
    given: Any, names: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ColumnDataset(given, names)


def test_column_dataset_rows_outside_raise_index_error() -> None:
    dataset = ColumnDataset({"x": np.arange(3)})
    assert [int(sample["x"]) for sample in (dataset[0], dataset[-1])] == [0, 2]
    for row in (3, -4):
        with pytest.raises(IndexError, match=f"row {row}"):
            dataset[row]


LABELS = [5, 0, 1, 2, 7]


def series(kind: str) -> Any:
    """The numbers 10 to 14, where a library has labels in another order than the rows."""
    if kind in ("pyarrow array", "pyarrow chunks"):
        arrow = import_module("pyarrow")
        return (arrow.array if kind == "pyarrow array" else arrow.chunked_array)(
            range(10, 15) if kind == "pyarrow array" else [[10, 11], [12, 13, 14]]
        )
    if kind == "polars":
        return import_module("polars").Series([10, 11, 12, 13, 14])
    pandas = import_module("pandas")
    if kind == "pandas index":
        return pandas.Index(range(10, 15))
    if kind == "derived class":
        return type("Derived", (pandas.Series,), {"__module__": "elsewhere"})(
            range(10, 15), index=LABELS
        )
    values = pandas.array(range(10, 15), "Int64") if kind == "pandas Int64" else range(10, 15)
    return pandas.Series(values, index=LABELS)


class Labelled:
    """A Series of a library that is not known."""

    shape, dtype, iloc = (5,), np.dtype("int64"), None

    def __getitem__(self, label: int) -> int:
        return LABELS.index(label) + 10

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.arange(10, 15)


@pytest.mark.parametrize(
    "kind",
    ["pandas", "pandas Int64", "pandas index", "derived class", "polars", "pyarrow array",
     "pyarrow chunks", "unknown"],
)  # fmt: skip
def test_series_is_read_by_position(tmp_path: Path, kind: str) -> None:
    dataset = ColumnDataset({"x": Labelled() if kind == "unknown" else series(kind)})
    assert [dataset[row]["x"] for row in range(-5, 5)] == [10, 11, 12, 13, 14] * 2
    store = build_store(dataset, tmp_path / "s", num_shards=2, progress=False)
    assert [int(store[row]["x"]) for row in range(5)] == [10, 11, 12, 13, 14]


def test_frame_as_a_column_is_refused() -> None:
    with pytest.raises(TypeError, match="column 'x': found a DataFrame, which has no rows"):
        ColumnDataset({"x": import_module("pandas").DataFrame({"a": [1]})})


def test_tensordict_is_a_column(tmp_path: Path) -> None:
    dataset = ColumnDataset({"x": TensorDict({"a": torch.arange(3)}, [3])})
    store = build_store(dataset, tmp_path / "s", progress=False)
    assert [int(store[row]["x"]["a"]) for row in range(3)] == [0, 1, 2]


def test_column_that_requires_grad_is_stored(tmp_path: Path) -> None:
    dataset = ColumnDataset({"x": torch.nn.Parameter(torch.arange(3.0))})
    assert not dataset[1]["x"].requires_grad
    store = build_store(dataset, tmp_path / "s", progress=False)
    assert [float(store[row]["x"]) for row in range(3)] == [0, 1, 2]


def test_array_of_a_closed_file_is_refused(tmp_path: Path) -> None:
    with import_module("h5py").File(tmp_path / "rows.h5", "w") as file:
        file["x"] = np.arange(3)
        array = file["x"]
        opened = ColumnDataset({"x": array})
    with pytest.raises(DatasetError, match=r"column 'x': it cannot be read .* keep its file open"):
        ColumnDataset({"x": array})
    with pytest.raises(DatasetError, match="the dataset raised at row 0"):
        build_store(opened, tmp_path / "s", progress=False)


def parquet_files(directory: Path, **files: Any) -> Path:
    arrow = import_module("pyarrow")
    writer = import_module("pyarrow.parquet")
    directory.mkdir()
    for name, columns in files.items():
        writer.write_table(arrow.table(columns), directory / f"{name}.parquet")
    return directory


@pytest.mark.parametrize("dtype", ["int16", "float32", "bool"])
def test_lists_of_which_some_are_missing_are_the_same_in_all_groups_of_rows(
    tmp_path: Path, dtype: str
) -> None:
    arrow = import_module("pyarrow")
    lists = [None if row in (13, 14, 31) else np.full(row % 4, row % 2, dtype) for row in range(40)]
    column = arrow.array(lists, arrow.list_(arrow.from_numpy_dtype(dtype)))
    path = tmp_path / "a.parquet"
    import_module("pyarrow.parquet").write_table(arrow.table({"x": column}), path, row_group_size=5)
    store = build_store(ColumnDataset(path), tmp_path / "s", num_shards=4, progress=False)
    for row, expected in enumerate(lists):
        found = store[row]["x"]
        if expected is None:
            assert found is None
        else:
            assert found.dtype == getattr(torch, dtype)
            assert found.tolist() == expected.tolist()


def test_parquet_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        path = parquet_files(tmp_path / name, a={"x": [1]}, b={"x": [2]})
        (path / f"{name}.parquet").write_text("junk")
        with pytest.raises(DatasetError, match=rf"{name}\.parquet: it cannot be read as a Parquet"):
            ColumnDataset(path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ColumnDataset(tmp_path / "nowhere.parquet")


def test_parquet_file_with_damaged_rows_is_named(tmp_path: Path) -> None:
    path = (
        parquet_files(tmp_path / "d", a={"x": [f"row {row}" for row in range(1000)]}) / "a.parquet"
    )
    data = bytearray(path.read_bytes())
    data[4:60] = b"\xff" * 56
    path.write_bytes(data)
    with pytest.raises(DatasetError, match=r"a\.parquet: it cannot be read as a Parquet file"):
        build_store(ColumnDataset(path), tmp_path / "s", progress=False)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"y": [1]},
            r"b\.parquet: it has no column 'x', which .*a\.parquet has; its columns are y",
        ),
        ({"x": [1.5]}, r"b\.parquet: column 'x' is double, and int64 in .*a\.parquet"),
    ],
)
def test_parquet_files_that_differ_are_refused(tmp_path: Path, other: Any, message: str) -> None:
    with pytest.raises(DatasetError, match=message):
        ColumnDataset(parquet_files(tmp_path / "d", a={"x": [1]}, b=other))


def test_dict_of_splits_is_refused_with_the_way_out(tmp_path: Path) -> None:
    datasets = import_module("datasets")
    split = datasets.Dataset.from_dict({"x": [1, 2]})
    given = datasets.DatasetDict({"train": split, "test": split})
    words = (
        r"a DatasetDict has a dataset for each split: choose one of the splits \['train', 'test'"
    )
    with pytest.raises(TypeError, match=f"dataset: {words}"):
        build_store(given, tmp_path / "s")
    with pytest.raises(TypeError, match=f"columns: {words}"):
        ColumnDataset(given)
    with pytest.raises(TypeError, match=f"train_dataset: {words}"):
        MemmapDataModule(given, store_dir=tmp_path)
    data = MemmapDataModule(val_dataset=given, store_dir=tmp_path)
    assert list(data.val_dataset) == ["train", "test"]


@pytest.mark.parametrize(
    "values",
    [["a\0", "bc"], [b"a\0", b"bc"], [[1], [2, 3]], [["a", "b"], ["c", "d"]], [2, 3], [[2], [3]]],
    ids=str,
)
def test_list_is_a_column_of_its_items(tmp_path: Path, values: list[Any]) -> None:
    dataset = ColumnDataset({"x": values})
    store = build_store(dataset, tmp_path / "s", progress=False)
    for row, value in enumerate(values):
        for found in (dataset[row]["x"], store[row]["x"]):
            assert (found.tolist() if hasattr(found, "tolist") else found) == value
    with pytest.raises(SchemaError, match=r"row 1, field 'x': found uint8 .* expected int64"):
        build_store(ColumnDataset({"x": [1, "a"]}), tmp_path / "t", progress=False)
