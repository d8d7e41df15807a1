"""Whatever rows are, and wherever they lie, batches are those of the mapping on one device."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_memmap.loading import row_file
from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.loading.variable_batch import LayoutCollate
from lightning_memmap.loading.variable_rows import Padded
from lightning_memmap.placement.plan import Residency
from lightning_memmap.placement.topology import DataTopology
from lightning_memmap.sampling import Bucketed, SamplerFactory, Weighted
from lightning_memmap.sampling.rows import round_up_shards
from lightning_memmap.schema import Windows
from lightning_memmap.schema.fields import DTYPES
from lightning_memmap.schema.forms import read_layouts
from lightning_memmap.store import Store, build_store
from tests.loading.test_stream_items import VARIABLE, plain, sample
from tests.support.datasets import DECODE, EncodedImages, Series
from tests.support.rows import (
    CPU,
    NumberedRows,
    StridedRows,
    loader_over,
    make_loader,
    make_window_loader,
    read_in_blocks,
    split_with,
)

KINDS = ["rows", "items", "images", "windows"]
NUM_ROWS, LENGTH = 97, 8
#: Of series, of which some are shorter than a window.
LENGTHS = [3 + row * 7 % 30 for row in range(40)]
LAYOUTS_OF: dict[str, dict[str, Any]] = {
    "items": {"boxes": "pad", "wide": "list"},
    "dtypes": {f"{name} jagged": "jagged" for name in DTYPES},
}
#: What a batch has for rows that differ in length.
LAYOUTS_OF_ITEMS: list[dict[str, Any]] = [
    {},
    {"sound": "jagged", "boxes": "jagged"},
    {"sound": "list", "boxes": "list"},
]
#: What draws windows.
FACTORIES = [None, Weighted("row"), Weighted("row", 40), Bucketed("name", 12, 2)]

pytestmark = [
    pytest.mark.filterwarnings("ignore:the train rows are in .* shards"),
]


def of_every_dtype(row: int) -> dict[str, Any]:
    """A sample with a number and two sequences of every dtype."""
    sample: dict[str, Any] = {"row": row}
    for name, dtype in DTYPES.items():
        sample[name] = torch.tensor(row).to(dtype)
        sample[f"{name} padded"] = sample[f"{name} jagged"] = torch.arange(row % 4).to(dtype)
    return sample


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Store]:
    path = tmp_path_factory.mktemp("kinds")
    datasets: dict[str, Any] = {
        "rows": NumberedRows(NUM_ROWS),
        "items": [sample(row) for row in range(NUM_ROWS)],
        "images": EncodedImages(NUM_ROWS),
        "windows": Series(LENGTHS),
    }
    return {
        kind: build_store(
            dataset,
            path / kind,
            num_shards=12,
            variable=VARIABLE if kind == "items" else None,
            progress=False,
        )
        for kind, dataset in datasets.items()
    }


def make(
    stores: dict[str, Store],
    kind: str,
    residency: str,
    *,
    stride: int = 3,
    layout: Any = None,
    factory: SamplerFactory | None = None,
    **options: Any,
) -> SuperBatchLoader:
    store = stores[kind]
    options = {"num_devices": 1, "batch_size": 6, "shuffle": True, **options}
    options.setdefault("window", 5 if residency == "stream" else None)
    if kind == "windows":
        if factory is not None:
            options |= {"factory": factory, "subset": None}
        return make_window_loader(
            store, Windows(("value", "time"), LENGTH, stride), residency=residency, **options
        )
    given = {**LAYOUTS_OF.get(kind, {}), **((layout or {}) if kind == "items" else {})}
    decode = DECODE if kind == "images" else None
    options["collate"] = LayoutCollate(store.schema, read_layouts(given), decode)
    if residency != "mixed":
        return make_loader(store, residency=residency, decode=decode, **options)
    topology = DataTopology((CPU,) * options.pop("num_devices"), options.pop("rank", 0))
    shards = round_up_shards(12, topology.num_global_data_devices)
    kinds = Residency.DEVICE, Residency.MMAP, Residency.HOST
    where = tuple(kinds[shard % 5 % 3] for shard in range(shards))
    split = split_with(store, topology, where, options.pop("subset", None), None, decode)
    assert len(split.sources) > 1
    options.pop("window")
    return loader_over(store, split, options.pop("batch_size"), topology, **options)


def batches(loader: SuperBatchLoader) -> list[Any]:
    return [plain(super_batch.to(CPU)) for super_batch in loader]


def both(stores: dict[str, Store], kind: str, **options: Any) -> list[list[Any]]:
    """The batches of a stream, and those of the mapping."""
    return [batches(make(stores, kind, each, **options)) for each in ("stream", "mmap")]


@st.composite
def setups(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "batch_size": draw(st.integers(3, 9)),
        "window": draw(st.sampled_from([1, 2, 5, 1000])),
        "num_devices": draw(st.sampled_from([1, 2, 3, 4, 8])),
        "subset": draw(
            st.sampled_from([None, StridedRows(1, 3), StridedRows(0, 4, excluded=True)])
        ),
        "shuffle": draw(st.booleans()),
        "transform": draw(st.sampled_from([None, lambda batch: batch])),
        "stride": draw(st.sampled_from([1, 3, 8, 11])),
        "layout": draw(st.sampled_from(LAYOUTS_OF_ITEMS)),
    }


@pytest.mark.parametrize(
    ("kind", "residency"),
    [*product(KINDS, ["mmap", "host", "device"]), *product(KINDS[:3], ["mixed"])],
)
@given(setup=setups())
@settings(deadline=None, max_examples=10)
def test_batches_do_not_depend_on_devices_and_places(
    stores: dict[str, Store], kind: str, residency: str, setup: dict[str, Any]
) -> None:
    num_devices = setup.pop("num_devices")
    assume(12 % num_devices == 0)
    setup = {**setup, "window": None, "batch_size": 24}
    expected = batches(make(stores, kind, "mmap", **setup))
    setup = {**setup, "num_devices": num_devices, "batch_size": 24 // num_devices}
    assert batches(make(stores, kind, residency, **setup)) == expected


@pytest.mark.parametrize("transform", [None, lambda batch: batch])
@pytest.mark.parametrize("residency", ["mmap", "host", "device", "mixed", "stream"])
def test_numbers_of_every_dtype_come_as_they_are(
    tmp_path: Path, residency: str, transform: Any
) -> None:
    dataset = [of_every_dtype(row) for row in range(NUM_ROWS)]
    store = build_store(dataset, tmp_path / "store", num_shards=12, progress=False)
    for super_batch in make(
        {"dtypes": store}, "dtypes", residency, num_devices=3, transform=transform
    ):
        batch = super_batch.to(CPU)
        rows = [dataset[row] for row in batch["row"].tolist()]
        for name, leaf in batch.items():
            found = leaf.rows() if isinstance(leaf, Padded) else leaf.unbind()
            assert plain([*found]) == plain([torch.as_tensor(row[name]) for row in rows]), name


@pytest.mark.parametrize("kind", KINDS)
@given(setup=setups(), size=st.integers(1, 2), factory=st.sampled_from(FACTORIES))
@settings(deadline=None, max_examples=10)
def test_batches_are_those_of_the_mapping(
    stores: dict[str, Store], kind: str, setup: dict[str, Any], size: int, factory: Any
) -> None:
    assume(setup["num_devices"] * size <= 12)
    for rank in range(size):
        options = {**setup, "rank": rank, "size": size, "factory": factory}
        # Two epochs of one loader: memory is used again.
        streamed, mapped = (make(stores, kind, each, **options) for each in ("stream", "mmap"))
        for epoch in (2, 3):
            streamed.set_epoch(epoch)
            mapped.set_epoch(epoch)
            assert batches(streamed) == batches(mapped)


@pytest.mark.parametrize("transform", [None, lambda batch: batch])
@pytest.mark.parametrize("kind", KINDS)
def test_resume_after_any_step_goes_on_with_the_next_row(
    stores: dict[str, Store], kind: str, transform: Any
) -> None:
    def loader(residency: str = "stream", devices: int = 2) -> SuperBatchLoader:
        batch = {"batch_size": 12 // devices, "num_devices": devices}
        made = make(stores, kind, residency, window=2, transform=transform, **batch)
        made.set_epoch(1)
        return made

    whole = batches(loader())
    for count in range(1, len(whole), 3):
        saved = loader()
        for _, _ in zip(range(count), saved, strict=False):
            pass
        for residency, devices in (("stream", 3), ("mmap", 2), ("device", 4)):
            resumed = loader(residency, devices)
            resumed.load_state_dict(saved.state_dict())
            assert batches(resumed) == whole[count:]


@pytest.mark.parametrize("transform", [None, lambda batch: batch])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_that_are_kept_are_never_overwritten(
    stores: dict[str, Store], kind: str, transform: Any
) -> None:
    # Raw super-batches: their rows are not put together before they are asked for.
    options: dict[str, Any] = {"batch_size": 3, "window": 2, "transform": transform}
    kept = list(make(stores, kind, "stream", **options))
    assert [plain(each.to(CPU)) for each in kept] == batches(make(stores, kind, "mmap", **options))


@pytest.mark.parametrize("block_bytes", [1, 512, 4096])
@pytest.mark.parametrize("kind", KINDS)
def test_runs_are_read_to_their_places_wherever_their_blocks_begin(
    stores: dict[str, Store], monkeypatch: pytest.MonkeyPatch, kind: str, block_bytes: int
) -> None:
    # Several reads a run.
    read_in_blocks(monkeypatch, block_bytes, 2 * 4096)
    for window, size in ((20, 1), (3, 1), (1000, 3)):
        streamed, mapped = both(stores, kind, window=window, rank=size - 1, size=size)
        assert streamed == mapped


@pytest.mark.parametrize("read_bytes", [pytest.param(1, marks=pytest.mark.slow), 50, 3000])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_lie_apart_are_read_in_pieces(
    stores: dict[str, Store], monkeypatch: pytest.MonkeyPatch, kind: str, read_bytes: int
) -> None:
    monkeypatch.setattr(row_file, "_READ_BYTES", read_bytes)
    monkeypatch.setattr(row_file, "_GAP_BYTES", read_bytes // 2)
    for num_devices in (1, 5):
        streamed, mapped = both(
            stores, kind, num_devices=num_devices, window=4, subset=StridedRows(1, 3, excluded=True)
        )
        assert streamed == mapped
