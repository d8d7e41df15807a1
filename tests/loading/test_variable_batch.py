"""Batches of rows that differ in length: padded, jagged, lists, from any place, in any order."""

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_memmap.errors import StoreError
from lightning_memmap.loading import variable_rows
from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.loading.split import SplitRows
from lightning_memmap.loading.transform import OnSuperBatch
from lightning_memmap.loading.variable_batch import LayoutCollate
from lightning_memmap.loading.variable_rows import VariableRows, make_variable_rows
from lightning_memmap.sampling import SequentialSampler
from lightning_memmap.schema import Layout, Pad
from lightning_memmap.schema.fields import Field
from lightning_memmap.schema.forms import FetchedRows, Jagged, ListOfRows
from lightning_memmap.store import Store, build_store, open_store
from lightning_memmap.transforms import PerSample
from tests.support.datasets import Ragged, assert_ragged, padded
from tests.support.rows import assert_gives_all_rows, cpus, make_split, order_rows
from tests.support.rows import loader_over as rows_loader

NUM_ROWS = 200


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("variable") / "s"
    return build_store(Ragged(NUM_ROWS), path, num_shards=12, progress=False)


LAYOUTS: dict[str, dict[str, Layout]] = {
    "pad": {},
    "pad with": {name: Pad(value=7, multiple=4) for name in ("sound", "image", "ids")},
    "jagged": {"sound": Jagged(), "image": ListOfRows(), "ids": Jagged()},
    "list": {name: ListOfRows() for name in ("sound", "image", "ids")},
}


def loader_over(
    store: Store, rows: SplitRows, batch_size: int, form: str = "pad", **options: Any
) -> SuperBatchLoader:
    collate = LayoutCollate(store.schema, LAYOUTS[form])
    return rows_loader(store, rows, batch_size, shuffle=True, seed=3, collate=collate, **options)


@pytest.mark.parametrize(
    ("num_devices", "transform"),
    [(1, None), (2, None), (3, None), (4, None), (3, lambda batch: batch)],
)
@pytest.mark.parametrize("form", LAYOUTS)
def test_batches_do_not_depend_on_the_number_of_data_devices(
    store: Store, form: str, num_devices: int, transform: Any
) -> None:
    rows = make_split(store, num_devices)
    loader = loader_over(
        store, rows, 24 // num_devices, form, transform=transform, topology=cpus(num_devices)
    )
    options = {"value": 7, "multiple": 4} if form == "pad with" else {}
    # No more padding than they need.
    assert_gives_all_rows(loader, Ragged(NUM_ROWS), partial(assert_ragged, **options))


@pytest.mark.parametrize("form", LAYOUTS)
def test_batches_of_each_device_have_the_widths_of_the_step(store: Store, form: str) -> None:
    whole = loader_over(store, make_split(store, 3), 4, form, topology=cpus(3))
    apart = loader_over(
        store, make_split(store, 3), 4, form, transform=lambda batch: batch, topology=cpus(3)
    )
    dataset = Ragged(NUM_ROWS)
    for one, other in zip(whole, apart, strict=True):
        for a, b in zip(one.batches, other.batches, strict=True):
            assert a["text"] == b["text"]
            rows = [dataset[row] for row in a["row"].tolist()]
            for name in ("sound", "image"):
                if form.startswith("pad"):
                    assert torch.equal(a[name].values, b[name].values)
                    assert torch.equal(a[name].lengths, b[name].lengths)
                    widths = {batch[name].values.shape[1] for batch in one.batches}
                    assert len(widths) == 1
                else:
                    expected = [torch.as_tensor(row[name]) for row in rows]
                    assert all(map(torch.equal, a[name], expected))
                    assert all(map(torch.equal, b[name], expected))


def test_transform_sees_the_form_that_is_declared(store: Store) -> None:
    seen = []

    def double(batch: Any) -> Any:
        seen.append(type(batch["sound"]).__name__)
        sound = batch["sound"]
        return {**batch, "sound": sound._replace(values=sound.values * 2)}

    for transform in (double, OnSuperBatch(double)):
        found = [
            step.to("cpu")
            for step in loader_over(
                store, make_split(store, 2), 4, transform=transform, topology=cpus(2)
            )
        ]
        plain = [
            step.to("cpu") for step in loader_over(store, make_split(store, 2), 4, topology=cpus(2))
        ]
        for one, other in zip(found, plain, strict=True):
            assert torch.equal(one["sound"].values, other["sound"].values * 2)
    assert set(seen) == {"Padded"}


@pytest.mark.parametrize("change", ["narrowed", "transposed", "longer"])
def test_jagged_rows_that_a_transform_cuts_or_turns_are_assembled_whole(
    store: Store, change: str
) -> None:
    def changed(batch: Any) -> Any:
        rows = batch["ids"]
        if change == "transposed":
            return {"ids": torch.stack([rows, -rows], dim=2).transpose(1, 2)}
        lengths = rows.offsets().diff()
        if change == "longer":
            # With items behind those of the last row.
            values = torch.cat([rows.values(), rows.values().new_full((3,), -1)])
            return {"ids": torch.nested.nested_tensor_from_jagged(values, rows.offsets())}
        padded = rows.to_padded_tensor(0)
        kept = torch.minimum(lengths, torch.tensor(2))
        starts = lengths - kept
        return {"ids": torch.nested.narrow(padded, 1, starts, kept, layout=torch.jagged)}

    def rows_with(num_devices: int) -> list[list[int]]:
        split = make_split(store, num_devices)
        loader = loader_over(
            store, split, 12 // num_devices, "jagged", transform=changed, topology=cpus(num_devices)
        )
        found = [step.to("cpu")["ids"] for step in loader]
        if change == "longer":
            # Torch does not divide all items that there are.
            pairs = [(rows, edge) for rows in found for edge in pairwise(rows.offsets())]
            return [rows.values()[first:last].tolist() for rows, (first, last) in pairs]
        return [row.tolist() for rows in found for row in rows.unbind()]

    expected = rows_with(1)
    assert any(map(len, expected))
    assert rows_with(2) == rows_with(3) == expected


def test_per_sample_transform_of_a_jagged_tensor_is_refused(store: Store) -> None:
    transform = PerSample(lambda sample: sample)
    loader = loader_over(store, make_split(store), 4, "jagged", transform=transform)
    with pytest.raises(TypeError, match=r"rows at batch\['sound'\] are a jagged tensor"):
        next(iter(loader)).to("cpu")


def test_memory_of_padded_rows_is_used_again_once_it_is_dropped(store: Store) -> None:
    loader = loader_over(store, make_split(store), 20)
    addresses = {
        step.to("cpu")["sound"].values.untyped_storage().data_ptr()
        for _ in range(3)
        for step in loader
    }
    assert len(addresses) < 3
    kept = [step.to("cpu") for step in loader]
    assert len({batch["sound"].values.data_ptr() for batch in kept}) == len(kept)
    rows = order_rows(loader.order, 0, 0, NUM_ROWS)
    for batch in kept:
        assert_ragged(batch, [Ragged(NUM_ROWS)[row] for row in rows[: len(batch["row"])]])
        del rows[: len(batch["row"])]


def test_index_that_changes_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    store = build_store(Ragged(NUM_ROWS), tmp_path / "s", num_shards=12, progress=False)
    rows = make_split(store)
    index = np.memmap(store.files / "sound.index", np.int64, "r+")
    index[:] = 2**40
    index.flush()
    with pytest.raises(StoreError, match="'sound': the index of its rows is damaged"):
        for _ in loader_over(store, rows, 4):
            pass
    with pytest.raises(StoreError, match="'sound': the index of its rows is damaged"):
        make_split(open_store(store.path), residency="device")


@pytest.mark.parametrize(
    ("layouts", "words"),
    [
        ({"sounds": Pad()}, r"there is no field 'sounds', among \['row', 'sound'"),
        ({"row": Pad()}, r"all rows of field 'row' have the shape \(\)"),
        ({"image": Jagged()}, "'image' varies in 2 dimensions"),
        ({"image": Pad(value=-1)}, "'image' is uint8.*value=-1"),
        ({"ids": Pad(value=0.5)}, "'ids' is int64.*value=0.5"),
    ],
)
def test_layout_that_a_field_cannot_have_is_refused(
    store: Store, layouts: dict[str, Layout], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        LayoutCollate(store.schema, layouts)


lengths = st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=12)


@given(lengths, st.integers(1, 3), st.integers(1, 5), st.data())
def test_rows_of_any_sizes_are_padded_packed_and_divided(
    shapes: list[list[int]], num_variable: int, multiple: int, data: Any
) -> None:
    shape = (None,) * num_variable + (2,) * (3 - num_variable)
    field = Field("x", torch.int32, shape)
    tensors = []
    for sizes in shapes:
        full = (*sizes[:num_variable], *shape[num_variable:], 3)
        tensors.append(torch.randint(1, 99, full, dtype=torch.int32))
    field = Field("x", torch.int32, (*shape, 3))
    rows = make_variable_rows(field, tensors)
    order = data.draw(st.lists(st.integers(0, len(shapes) - 1), min_size=1, max_size=9))
    chosen = rows[np.array(order, np.int64)]
    expected = [tensors[index] for index in order]
    assert torch.equal(
        chosen.concatenated(), torch.cat([row.view(-1, *field.item_shape) for row in expected])
    )
    (part,) = chosen.split_with_sizes([len(order)])
    assert isinstance(part, VariableRows)
    for one in (chosen, part):
        found = replace(one, widths=part.widths).padded(-5, multiple).values
        assert torch.equal(found, padded(expected, -5, multiple, num_variable))


@pytest.mark.parametrize("most_bytes", [1, 40, 2**22])
@pytest.mark.parametrize("inference", [False, True])
def test_steps_concatenated_with_neighbours_have_their_own_rows(
    monkeypatch: pytest.MonkeyPatch, most_bytes: int, inference: bool
) -> None:
    monkeypatch.setattr(variable_rows, "_TOGETHER_BYTES", most_bytes)
    tensors = [torch.full((size,), float(row)) for row, size in enumerate([3, 0, 2, 5, 1, 0, 4, 2])]
    rows = make_variable_rows(Field("x", torch.float32, (None,)), tensors)
    asked: list[int] = []

    def allocate(num_bytes: int) -> Tensor:
        asked.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    sizes = [2, 1, 0, 3, 2]
    steps = list(zip(rows.split_with_sizes(sizes), torch.arange(8).split(sizes), strict=True))
    # In order, and not.
    for step, numbers in [*steps, *reversed(steps)]:
        with torch.inference_mode(inference):
            packed = replace(step, allocate=allocate).concatenated_with_neighbours()
        assert torch.equal(packed, torch.cat([packed[:0], *(tensors[n] for n in numbers)]))
        assert not packed.is_inference()
    assert (len(asked) == 1) == (most_bytes == 2**22)


@pytest.mark.parametrize("most_bytes", [1, 2**22])
@pytest.mark.parametrize(
    ("longest", "num_variable", "value"),
    [(9, 1, 0), (9, 1, 7), (400, 1, 7), (3000, 1, 7), (9, 2, 7)],
)
def test_steps_padded_together_are_padded_as_wide_as_each_needs(
    monkeypatch: pytest.MonkeyPatch, longest: int, num_variable: int, value: int, most_bytes: int
) -> None:
    monkeypatch.setattr(variable_rows, "_TOGETHER_BYTES", most_bytes)
    random = np.random.default_rng(longest)
    shapes = random.integers(0, longest, (60, num_variable))
    tensors = [torch.from_numpy(random.integers(1, 2**40, (*shape, 2))) for shape in shapes]
    field = Field("x", torch.int64, (*[None] * num_variable, 2))
    rows = make_variable_rows(field, tensors)
    sizes = [20, 1, 0, 19, 20]
    steps = list(zip(rows.split_with_sizes(sizes), torch.arange(60).split(sizes), strict=True))
    for step, numbers in [*steps, *reversed(steps)]:
        found = step.padded(value, 4).values
        expected = [tensors[number] for number in numbers]
        if expected:
            assert torch.equal(found, padded(expected, value, 4, num_variable))
        else:
            assert len(found) == 0
    # As some of a step whose other rows are longer.
    wide = replace(steps[0][0], widths=(longest,) * num_variable)
    assert wide.padded(value, 1).values.shape[1] == longest


@pytest.mark.parametrize("num_variable", [1, 2])
def test_padding_that_no_memory_can_hold_is_refused(num_variable: int) -> None:
    field = Field("x", torch.float32, (None,) * num_variable)
    (step,) = make_variable_rows(field, [torch.ones((3,) * num_variable)]).split_with_sizes([1])
    with pytest.raises(ValueError, match=r"1 rows of field 'x', .* multiple than 4611"):
        step.padded(0, 2**62)


def test_form_of_a_user_needs_nothing_but_its_class(store: Store) -> None:
    @dataclass(frozen=True)
    class Longest(Layout):
        name = "longest"

        def batch(self, rows: FetchedRows) -> Any:
            return torch.tensor([max(len(row) for row in rows.listed())])

    collate = LayoutCollate(store.schema, {"ids": Longest()})
    rows = make_split(store)
    loader = SuperBatchLoader(rows, cpus(1), SequentialSampler(rows.pool), 5, collate=collate)
    dataset = Ragged(NUM_ROWS)
    for step, batch in enumerate(loader):
        expected = max(len(dataset[row]["ids"]) for row in range(5 * step, 5 * step + 5))
        assert batch.to("cpu")["ids"].item() == expected
