"""Samples that are TensorDicts come back as such."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack, tensorclass
from torch import Tensor
from torch.utils.data import default_collate

from lightning_memmap import MemmapDataModule, build_store
from lightning_memmap.errors import SchemaError
from lightning_memmap.loading.variable_batch import LayoutCollate
from lightning_memmap.schema.forms import read_layouts
from lightning_memmap.schema.schema import Schema
from lightning_memmap.store.sources.source import make_source
from tests.support.datasets import Wrapped, column_files
from tests.support.models import set_up
from tests.support.rows import assembled, make_loader
from tests.support.store.schemas import read_schema, to_json


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


def collated(samples: list[Any]) -> Any:
    """What torch makes of samples."""
    try:
        return default_collate(samples)
    except RuntimeError:
        if tuple(map(int, version("tensordict").split(".")[:2])) >= (0, 15):
            raise
        pytest.skip("torch cannot collate a TensorDict in a TensorDict before tensordict 0.15")


@each_kind
@pytest.mark.parametrize("num_shards", [1, 2])
def test_batches_are_those_of_default_collate(tmp_path: Path, kind: Any, num_shards: int) -> None:
    dataset = kind(10)
    data = MemmapDataModule(
        Wrapped(dataset), store_dir=tmp_path, batch_size=4, shuffle=False, num_shards=num_shards
    )
    set_up(data, "fit")
    for first, batch in zip((0, 4, 8), data.train_dataloader(), strict=True):
        assert_same(batch, collated([dataset[row] for row in range(10)][first : first + 4]))


def test_row_of_a_store_has_the_batch_size_of_the_sample(tmp_path: Path) -> None:
    dataset = nested(7)
    store = build_store(dataset, tmp_path / "store", progress=False)
    for row in range(7):
        assert_same(store[row], dataset[row])
        assert store[row]["inner"].batch_size == (5,)


def test_tensordict_is_stored_by_slices(tmp_path: Path) -> None:
    dataset = nested(50)
    assert make_source(dataset, Schema.infer([dataset[0]])).is_sliced
    by_slices = build_store(dataset, tmp_path / "slices", progress=False)
    by_items = build_store(Wrapped(dataset), tmp_path / "items", progress=False)
    assert by_slices.manifest.checksums == by_items.manifest.checksums
    assert column_files(by_slices) == column_files(by_items)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (TensorDict({"x": torch.zeros(3), "name": "one"}, []), "row 0, field 'name"),
        (TensorDict({"x": torch.zeros(3), "inner": TensorDict({}, [])}, []), "'inner'"),
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
    with pytest.raises(SchemaError, match=r"Example.*to_tensordict\(\)"):
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
    set_up(data, "fit")
    assert data.store_path("val") == tmp_path / "val"
    batches: Any = list(data.val_dataloader())
    assert [type(batch) for batch in batches] == [TensorDict, TensorDict]
    assert_same(torch.cat(batches), rows["val"])
    trained: Any = torch.cat(list(data.train_dataloader()))
    assert_same(trained[trained["x"][:, 0].argsort()], rows["train"])


# Fields whose rows differ in length


def of_length(row: int) -> int:
    return 1 + row * 7 % 5


def first_field(row: int) -> Any:
    x = torch.arange(of_length(row) * 3.0).view(-1, 3) + 100 * row
    return TensorDict({"x": x, "y": torch.tensor(row)}, [])


def later_field(row: int) -> Any:
    found = first_field(row)
    return TensorDict({"y": found["y"], "x": found["x"]}, [])


def trajectory(row: int) -> Any:
    x = first_field(row)["x"]
    return TensorDict({"x": x, "done": x[:, 0] > 3, "y": x[:, 0].long() // 100}, [len(x)])


def lazy_trajectory(row: int) -> Any:
    return lazy_stack([*trajectory(row)])


def inner_field(row: int) -> Any:
    found = first_field(row)
    inner = TensorDict({"x": found["x"]}, [len(found["x"])])
    return {"y": found["y"], "inner": inner}


def two_lengths(row: int) -> Any:
    return TensorDict({"x": torch.full((of_length(row), 1 + row % 3), row), "y": row}, [])


VARIABLE = [first_field, later_field, trajectory, lazy_trajectory, inner_field, two_lengths]


def batches_of(
    path: Path,
    make: Any,
    devices: int = 1,
    layout: dict[str, Any] | None = None,
) -> list[Any]:
    """The batches of 20 rows, 8 in each, of the rows of some data devices."""
    dataset = Wrapped([make(row) for row in range(20)])
    store = build_store(dataset, path / "store", progress=False)
    collate = LayoutCollate(store.schema, read_layouts(layout))
    loader = make_loader(store, devices, 8 // devices, collate=collate)
    return list(assembled(loader))


def flat(value: Any) -> dict[str, Tensor]:
    td = value if isinstance(value, TensorDict) else TensorDict(value, [])
    return dict(td.flatten_keys(".").items())


@pytest.mark.parametrize("make", VARIABLE, ids=lambda make: make.__name__)
@pytest.mark.parametrize("devices", [1, 2])
def test_variable_field_is_padded_with_a_mask_beside_it(
    tmp_path: Path, make: Any, devices: int
) -> None:
    row = 0
    for batch in batches_of(tmp_path, make, devices):
        found = flat(batch)
        (count,) = {len(value) for value in found.values()}
        for index in range(count):
            for name, value in flat(make(row)).items():
                mask = found.get(f"{name}_mask")
                kept = found[name][index] if mask is None else found[name][index][mask[index]]
                assert torch.equal(kept, value.flatten(0, -1).view_as(kept))
                assert mask is None or int(mask[index].sum()) == len(kept)
            row += 1
    assert row == 20


def test_trajectories_are_batched_with_their_longest_time(tmp_path: Path) -> None:
    # The last 4 rows are fewer than shards: they are in one step with the 8 before them.
    steps = [range(8), range(8, 20)]
    for rows, batch in zip(steps, batches_of(tmp_path, trajectory), strict=True):
        assert batch.batch_size == (len(rows), max(map(of_length, rows)))
    # Of other multiples, they have the rows alone in common.
    layout = {"x": {"multiple": 8}}
    (batch, *_) = batches_of(tmp_path, trajectory, layout=layout)
    assert batch.batch_size == (8,)
    assert batch["x"].shape == (*batch["x_mask"].shape, 3) == (8, 8, 3)


@pytest.mark.parametrize("make", [first_field, trajectory], ids=["first", "trajectory"])
def test_jagged_fields_stay_nested_tensors(tmp_path: Path, make: Any) -> None:
    layout = {
        name: "jagged" for name in ("x", "done", "y") if name in make(1) and make(1)[name].dim()
    }
    (batch, *_) = batches_of(tmp_path, make, layout=layout)
    assert batch.batch_size[0] == 8
    for row, part in enumerate(batch["x"].unbind()):
        assert torch.equal(part, make(row)["x"])


def test_layout_that_a_tensordict_cannot_hold_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"layout.*'x'"):
        batches_of(tmp_path, first_field, layout={"x": "list"})
    with pytest.raises(ValueError, match=r"layout: .*'x'.*'x_mask'"):
        batches_of(tmp_path / "own", lambda row: first_field(row).set("x_mask", torch.ones(1)))


def test_row_numbers_and_records_of_tensordicts_have_masks_too(tmp_path: Path) -> None:
    rows = Wrapped([first_field(row) for row in range(20)])
    data = MemmapDataModule(
        rows, store_dir=tmp_path, batch_size=8, shuffle=False, with_row_numbers=True
    )
    set_up(data, "fit")
    batch: Any = next(iter(data.train_dataloader()))
    assert batch["row_number"].tolist() == list(range(8))
    assert batch["x_mask"].sum(1).tolist() == [*map(of_length, range(8))]

    def records(row: int) -> Any:
        return {"y": row, "parts": [TensorDict({"x": x}, []) for x in first_field(row)["x"]]}

    (batch, *_) = batches_of(tmp_path / "2", records)
    assert [part.batch_size[0] for part in batch["parts"]] == [*map(of_length, range(8))]
    (batch, *_) = batches_of(tmp_path / "2", records, layout={"parts": "pad"})
    assert batch["parts"]["x_mask"].sum(1).tolist() == [*map(of_length, range(8))]
