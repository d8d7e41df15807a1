"""Samples that are TensorDicts come back as such."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, tensorclass
from torch import Tensor
from torch.utils.data import default_collate

from lightning_memmap import MemmapDataModule, build_store
from lightning_memmap.errors import SchemaError
from lightning_memmap.schema.schema import Schema
from lightning_memmap.store.sources.source import source_of
from tests.datasets import Wrapped, column_files
from tests.unit.schema.reading import read_schema, to_json


@tensorclass
class Example:
    image: Tensor
    label: Tensor


def nested(num_rows: int) -> TensorDict:
    inner = TensorDict({"box": torch.randn(num_rows, 5, 4)}, [num_rows, 5])
    return TensorDict(
        {"x": torch.arange(3 * num_rows).view(num_rows, 3), "inner": inner}, [num_rows]
    )


def with_numbers(num_rows: int) -> Any:
    return [(sample, {"row": row}) for row, sample in enumerate(nested(num_rows))]


KINDS = [nested, with_numbers]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, (list, tuple)):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, dict):
        assert_same(list(found.values()), list(expected.values()))
    else:
        assert type(found) is type(expected)
        if isinstance(expected, TensorDict):
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


def test_row_of_a_store_has_the_batch_size_of_the_sample(tmp_path: Path) -> None:
    dataset = nested(7)
    store = build_store(dataset, tmp_path / "store", progress=False)
    for row in range(7):
        assert_same(store[row], dataset[row])
        assert store[row]["inner"].batch_size == (5,)


def test_tensordict_is_stored_by_slices(tmp_path: Path) -> None:
    dataset = nested(50)
    assert source_of(dataset, Schema.infer([dataset[0]])).is_sliced
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


def test_schema_comes_back_from_json() -> None:
    schema = Schema.infer([nested(3)[0]])
    assert read_schema(to_json(schema)) == schema


def test_tensorclass_is_refused_with_the_way_out(tmp_path: Path) -> None:
    given = Example(image=torch.zeros(3, 2), label=torch.arange(3), batch_size=[3])
    with pytest.raises(SchemaError, match=r"found a tensorclass, Example.*to_tensordict\(\)"):
        build_store(Wrapped(given), tmp_path / "store", progress=False)
    rows = Wrapped(given.to_tensordict())
    assert build_store(rows, tmp_path / "store", progress=False)[2]["label"] == 2


@pytest.mark.parametrize("feature_dims", [-1, "1", None])
def test_schema_that_is_no_tensordict_is_refused(feature_dims: Any) -> None:
    value = json.loads(json.dumps(to_json(Schema.infer([nested(3)[0]]))))
    value["structure"]["children"][1]["feature_dims"] = feature_dims
    with pytest.raises(SchemaError):
        read_schema(value)


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
