"""Samples that are TensorDicts or tensorclasses come back as such."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, is_tensorclass, tensorclass
from torch import Tensor
from torch.utils.data import default_collate

from lightning_memmap import MemmapDataModule, build_store, open_store
from lightning_memmap.errors import SchemaError
from lightning_memmap.schema import Schema, read_schema
from lightning_memmap.store.sources import field_arrays
from tests.datasets import Wrapped, column_files


@tensorclass
class Example:
    image: Tensor
    label: Tensor

    def doubled(self) -> Tensor:
        return 2 * self.image


def nested(num_rows: int) -> TensorDict:
    inner = TensorDict({"box": torch.randn(num_rows, 5, 4)}, [num_rows, 5])
    return TensorDict(
        {"x": torch.arange(3 * num_rows).view(num_rows, 3), "inner": inner}, [num_rows]
    )


def examples(num_rows: int) -> Any:
    return Example(
        image=torch.randn(num_rows, 2, 2), label=torch.arange(num_rows), batch_size=[num_rows]
    )


def with_numbers(num_rows: int) -> Any:
    return [(sample, {"row": row}) for row, sample in enumerate(examples(num_rows))]


KINDS = [nested, examples, with_numbers]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, (list, tuple)):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, dict):
        assert_same(list(found.values()), list(expected.values()))
    else:
        assert type(found) is type(expected)
        if isinstance(expected, TensorDict) or is_tensorclass(expected):
            assert found.batch_size == expected.batch_size
            assert set(found.keys()) == set(expected.keys())
        assert bool((found == expected).all())


@each_kind
@pytest.mark.parametrize("num_shards", [1, 2])
def test_batches_are_those_of_default_collate(tmp_path: Path, kind: Any, num_shards: int) -> None:
    dataset = kind(10)
    data = MemmapDataModule(
        Wrapped(dataset), store_dir=tmp_path, batch_size=4, shuffle=False, num_shards=num_shards
    )
    data.prepare_data()
    data.setup("fit")
    for first, batch in zip((0, 4, 8), data.train_dataloader(), strict=True):
        assert_same(batch, default_collate([dataset[row] for row in range(10)][first : first + 4]))


def test_tensorclass_comes_back_with_its_methods(tmp_path: Path) -> None:
    dataset = examples(6)
    store = build_store(Wrapped(dataset), tmp_path / "store", progress=False)
    batch = store.schema.builder(dataset[0])(store.tensors)
    assert isinstance(batch, Example)
    assert batch.doubled().shape == (6, 2, 2)
    assert type(store[0]) is TensorDict
    assert store[0].batch_size == ()


def test_row_of_a_store_has_the_batch_size_of_the_sample(tmp_path: Path) -> None:
    dataset = nested(7)
    store = build_store(dataset, tmp_path / "store", progress=False)
    for row in range(7):
        assert_same(store[row], dataset[row])
        assert store[row]["inner"].batch_size == (5,)


def test_tensordict_is_stored_by_slices(tmp_path: Path) -> None:
    dataset = nested(50)
    assert field_arrays(dataset, Schema.from_sample(dataset[0])) is not None
    by_slices = build_store(dataset, tmp_path / "slices", progress=False)
    by_items = build_store(Wrapped(dataset), tmp_path / "items", progress=False)
    assert by_slices.manifest.checksums == by_items.manifest.checksums
    assert column_files(by_slices) == column_files(by_items)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (TensorDict({"x": torch.zeros(3), "name": "one"}, []), "row 0, field 'name"),
        (TensorDict({"x": torch.zeros(3), "inner": TensorDict({}, [])}, []), "'inner': found an"),
    ],
)
def test_tensordict_with_something_else_is_refused(
    tmp_path: Path, sample: TensorDict, message: str
) -> None:
    with pytest.raises(SchemaError, match=message):
        build_store([sample] * 9, tmp_path / "store", progress=False)


def test_row_with_other_keys_is_refused(tmp_path: Path) -> None:
    rows = [TensorDict({"x": torch.zeros(3)}, [])] * 9 + [TensorDict({"y": torch.zeros(3)}, [])]
    with pytest.raises(SchemaError, match=r"row 9, field 'value': found tensordict of \['y'\]"):
        build_store(rows, tmp_path / "store", progress=False)


def test_schema_comes_back_from_json(tmp_path: Path) -> None:
    for dataset in (nested(3), examples(3)):
        schema = Schema.from_sample(dataset[0])
        assert read_schema(schema.to_json()) == schema


@pytest.mark.parametrize("feature_dims", [-1, "1", None])
def test_schema_that_is_no_tensordict_is_refused(feature_dims: Any) -> None:
    value = Schema.from_sample(nested(3)[0]).to_json()
    value["structure"]["children"][1]["feature_dims"] = feature_dims
    with pytest.raises(SchemaError):
        read_schema(value)


def test_store_is_opened_without_the_class(tmp_path: Path) -> None:
    build_store(Wrapped(examples(5)), tmp_path / "store", progress=False)
    sample = open_store(tmp_path / "store")[4]
    assert type(sample) is TensorDict
    assert sample["label"] == 4


def test_tensordicts_are_the_datasets_of_a_data_module(tmp_path: Path) -> None:
    rows = {"train": nested(50), "val": nested(20)}
    data = MemmapDataModule(rows["train"], rows["val"], store_dir=tmp_path, batch_size=10)
    data.prepare_data()
    data.setup("fit")
    assert data.store_path("val") == tmp_path / "val"
    batches: Any = list(data.val_dataloader())
    assert [type(batch) for batch in batches] == [TensorDict, TensorDict]
    assert_same(torch.cat(batches), rows["val"])
    trained: Any = torch.cat(list(data.train_dataloader()))
    assert_same(trained[trained["x"][:, 0].argsort()], rows["train"])
