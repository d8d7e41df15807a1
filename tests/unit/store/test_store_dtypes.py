"""Fields that are kept in another dtype than the samples have: no value changes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from lightning_memmap import MemmapDataModule, build_store, open_store
from lightning_memmap.errors import DatasetError, SchemaError, StoreError
from lightning_memmap.schema.fields import DTYPES, Field
from lightning_memmap.schema.leaves import narrowed
from lightning_memmap.store.directory import is_store
from tests.datasets import Wrapped
from tests.unit.store.layout import files_of

UINT8 = {"image": "uint8"}


def rows(num_rows: int = 100) -> list[dict[str, Any]]:
    return [{"image": torch.full((2, 2), float(row)), "label": row} for row in range(num_rows)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_field_is_kept_in_the_dtype_that_is_asked_for(tmp_path: Path, num_workers: int) -> None:
    options: dict[str, Any] = {"store_dtypes": UINT8, "progress": False}
    store = build_store(rows(), tmp_path / "s", num_workers=num_workers, **options)
    assert (files_of(tmp_path / "s") / "image.memmap").stat().st_size == 400
    for row, sample in enumerate(rows()):
        assert store[row]["image"].dtype == torch.uint8
        assert store[row]["image"].equal(sample["image"].byte())
        assert store[row]["label"].dtype == torch.int64
    build_store(rows(), tmp_path / "s", check="full", **options)
    store.check_dataset(rows())
    with pytest.raises(DatasetError, match="row 0 of the dataset differs"):
        store.check_dataset([{**sample, "image": sample["image"] + 1} for sample in rows()])


def test_slices_items_and_streams_are_kept_alike(tmp_path: Path) -> None:
    values = torch.arange(300.0).view(100, 3)
    kept: list[bytes] = []
    for name, dataset in {
        "slices": TensorDataset(values),
        "items": Wrapped(TensorDataset(values)),
        "stream": iter(TensorDataset(values)),
        "arrays": [(row,) for row in values.numpy().astype(">f4")],
    }.items():
        store = build_store(
            dataset, tmp_path / name, store_dtypes={"0": torch.int16}, progress=False
        )
        kept.append((store.files / "0.memmap").read_bytes())
    assert len(kept[0]) == 600
    assert kept == [kept[0]] * 4


@pytest.mark.parametrize("value", [255.5, 256.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["slices", "items", "stream"])
def test_value_that_would_change_is_refused_at_its_row(
    tmp_path: Path, kind: str, value: float
) -> None:
    values = torch.arange(100.0)
    values[33] = value
    dataset: Any = TensorDataset(values)
    dataset = {"slices": dataset, "items": Wrapped(dataset), "stream": iter(dataset)}[kind]
    message = rf"row 33, field '0': {value} cannot be kept as uint8"
    with pytest.raises(SchemaError, match=message):
        build_store(dataset, tmp_path / "s", store_dtypes={"0": "uint8"}, progress=False)
    assert not is_store(tmp_path / "s")


@given(
    st.sampled_from(["float64", "float32", "int64", "uint8", "bool", "int16"]),
    st.sampled_from(sorted(set(DTYPES) - {"complex64", "complex128"})),
    st.integers(-300, 70_000) | st.floats(width=32),
)
def test_values_are_kept_exactly_or_not_at_all(given_as: str, kept_as: str, value: float) -> None:
    with np.errstate(all="ignore"):
        array = np.array(np.array([value, 1.0]).astype(given_as))
    field = Field("x", DTYPES[kept_as], (), given=DTYPES[given_as])
    try:
        found = narrowed(field, array)
    except SchemaError:
        # Otherwise each value would have an equal one in the other dtype.
        exact = torch.from_numpy(array).to(field.dtype).double()
        assert not np.array_equal(exact.numpy(), array.astype(np.float64), equal_nan=True)
    else:
        assert torch.is_tensor(found)
        assert found.dtype == field.dtype
        assert np.array_equal(found.double().numpy(), array.astype(np.float64), equal_nan=True)


@pytest.mark.parametrize(
    ("dtypes", "error", "message"),
    [
        ({"image": "float8"}, ValueError, r"store_dtypes\['image'\]='float8': choose one of bool"),
        ({"image": 8}, ValueError, r"store_dtypes\['image'\]=8"),
        ("uint8", TypeError, "store_dtypes='uint8': give a dict"),
        ({"mask": "bool"}, SchemaError, r"store_dtypes\['mask'\]: there is no such field"),
        ({"wave": "float32"}, SchemaError, "choose complex64"),
    ],
)
def test_dtypes_that_cannot_be_are_refused(
    tmp_path: Path, dtypes: Any, error: type[Exception], message: str
) -> None:
    samples = [{**sample, "wave": 1j} for sample in rows(9)]
    with pytest.raises(error, match=message):
        build_store(samples, tmp_path / "s", store_dtypes=dtypes, progress=False)


def test_store_with_other_dtypes_is_refused(tmp_path: Path) -> None:
    build_store(rows(), tmp_path / "s", store_dtypes=UINT8, progress=False)
    for dtypes in (None, {"image": "int16"}):
        with pytest.raises(StoreError, match=r"keeps 'image' as uint8; .* overwrite=True"):
            build_store(rows(), tmp_path / "s", store_dtypes=dtypes)
    store = build_store(rows(), tmp_path / "s", overwrite=True, progress=False)
    assert store[3]["image"].dtype == torch.float32


def test_data_module_keeps_dtypes(tmp_path: Path) -> None:
    data = MemmapDataModule(rows(), store_dir=tmp_path, batch_size=5, store_dtypes=UINT8)
    data.prepare_data()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch["image"].dtype == torch.uint8
    assert open_store(tmp_path / "train").schema.fields[0].given == torch.float32
    data.teardown("fit")
    data.store_dtypes = None
    with pytest.raises(StoreError, match="keeps 'image' as uint8"):
        data.prepare_data()


def test_names_of_no_field_are_refused_where_there_is_a_store(tmp_path: Path) -> None:
    samples = [{"image": torch.zeros(2)}] * 3
    build_store(samples, tmp_path / "s", progress=False)
    with pytest.raises(SchemaError, match=r"store_dtypes\['images'\]: there is no such field"):
        build_store(samples, tmp_path / "s", store_dtypes={"images": "float16"}, progress=False)
