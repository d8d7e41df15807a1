"""Batches of lists of records, of rows that are None, and of row numbers, from any place."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from lightning_memmap import MemmapDataModule
from lightning_memmap.loading.variable_batch import LayoutCollate
from lightning_memmap.sampling import Subset
from lightning_memmap.schema import Layout, Masked, Pad
from lightning_memmap.schema.forms import ListOfRows, read_declared
from lightning_memmap.store import Store, build_store
from lightning_memmap.transforms import PerSample
from tests.support.datasets import Scenes, assert_scenes
from tests.support.models import set_up
from tests.support.rows import assert_gives_all_rows, cpus, make_split
from tests.support.rows import loader_over as rows_loader

NUM_ROWS = 120
LAYOUTS: dict[str, dict[str, Layout]] = {
    "list": {},
    "pad": {"objects": Pad(), "objects.label": Pad(value=0)},
    "sound list": {"sound": ListOfRows()},
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("records") / "s"
    return build_store(Scenes(NUM_ROWS), path, num_shards=12, progress=False)


def loader_over(store: Store, rows: Any, batch_size: int, form: str, **options: Any) -> Any:
    collate = LayoutCollate(store.schema, LAYOUTS[form])
    return rows_loader(store, rows, batch_size, shuffle=True, seed=3, collate=collate, **options)


@pytest.mark.parametrize(
    ("num_devices", "transform"),
    [
        *((num_devices, None) for num_devices in (1, 2, 3, 4)),
        (3, lambda batch: batch),
        (2, PerSample(lambda row: row)),
    ],
)
@pytest.mark.parametrize("form", LAYOUTS)
def test_batches_do_not_depend_on_the_number_of_data_devices(
    store: Store, form: str, num_devices: int, transform: Any
) -> None:
    rows = make_split(store, num_devices)
    loader = loader_over(
        store, rows, 24 // num_devices, form, transform=transform, topology=cpus(num_devices)
    )
    assert_gives_all_rows(loader, Scenes(NUM_ROWS), assert_scenes)


@pytest.mark.parametrize(
    ("layouts", "words"),
    [
        ({"objects.label": Pad()}, "layout: .*'objects'"),
        ({"objects": Pad(value=-1)}, "layout: .*'objects.mask'.*value=-1"),
        ({"object": Pad()}, "'object'.*'objects.label'"),
    ],
)
def test_layout_that_a_list_cannot_have_is_refused(
    store: Store, layouts: dict[str, Layout], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        LayoutCollate(store.schema, layouts)


def test_field_that_may_not_be_none_is_not_declared(store: Store) -> None:
    with pytest.raises(ValueError, match=r"nullable: .*'row'"):
        store.schema.check_declared(read_declared(None, ["row"]))
    with pytest.raises(ValueError, match=r"variable: .*'row'"):
        store.schema.check_declared(read_declared(["row"], None))
    store.schema.check_declared(read_declared(["objects"], None))


def test_rows_of_several_fields_are_in_the_parts_of_a_masked_value() -> None:
    assert Masked([1, 2], torch.tensor([True, False])).rows() == [1, None]
    with pytest.raises(TypeError, match="Masked: values is a dict"):
        Masked({"a": torch.zeros(2)}, torch.ones(2, dtype=torch.bool)).rows()


class Numbers:
    """Row ``i`` as a sample of some kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 61

    def __getitem__(self, row: int) -> Any:
        if not 0 <= row < 61:
            raise IndexError(row)
        value = torch.tensor(row)
        kinds = {
            "dict": {"x": value},
            "tuple": (value, -value),
            "tensor": value,
            "tensordict": TensorDict({"x": value}, []),
            "class": Pair(row),
            "taken": {"row_number": value},
        }
        return kinds[self.kind]


class Pair(NamedTuple):
    x: int


def numbers_in(kind: str, batch: Any) -> tuple[Tensor, Tensor]:
    """Row numbers, and the values in which the dataset has them too."""
    if kind in ("dict", "tensordict"):
        assert set(batch.keys()) == {"x", "row_number"}
        return batch["row_number"], batch["x"]
    assert len(batch) == (3 if kind == "tuple" else 2)
    return batch[-1], batch[0]


@pytest.mark.parametrize("residency", ["mmap", "host", "stream"])
@pytest.mark.parametrize("kind", ["dict", "tuple", "tensor", "tensordict"])
def test_batches_carry_the_rows_of_the_dataset(tmp_path: Path, kind: str, residency: str) -> None:
    options: dict[str, Any] = {"store_dir": tmp_path, "batch_size": 8, "num_shards": 4}
    options["residency"] = residency
    data = MemmapDataModule(Numbers(kind), Numbers(kind), with_row_numbers=True, **options)
    data.prepare_data()
    chosen = [*range(3, 50, 2)]
    for changes, expected in (
        ({}, [*range(61)]),
        ({"subset": Subset(chosen)}, chosen),
    ):
        changed = data.with_options(**changes)
        changed.setup("fit")
        seen = list[int]()
        for batch in changed.train_dataloader():
            numbers, values = numbers_in(kind, batch)
            assert numbers.dtype == torch.int64
            assert torch.equal(numbers, values)
            seen += numbers.tolist()
        assert sorted(seen) == expected
        assert seen != expected
        val = [numbers_in(kind, batch)[0] for batch in changed.val_dataloader()]
        assert torch.cat(val).tolist() == [*range(61)]


@pytest.mark.parametrize(
    ("kind", "words"),
    [("class", "with_row_numbers=.*'Pair'"), ("taken", "with_row_numbers=.*'row_number'")],
)
def test_row_numbers_without_a_place_are_refused(tmp_path: Path, kind: str, words: str) -> None:
    data = set_up(MemmapDataModule(Numbers(kind), store_dir=tmp_path, with_row_numbers=True), "fit")
    with pytest.raises(ValueError, match=words):
        data.train_dataloader()
