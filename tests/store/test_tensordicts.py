"""The rows of a store as TensorDicts: what they hold, what a write changes, how they are sent."""

import copy
import gc
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import MemoryMappedTensor, TensorDict
from torch import Tensor

from lightning_memmap import MemmapDataModule
from lightning_memmap.errors import StoreError
from lightning_memmap.sampling import Mixture
from lightning_memmap.schema.fields import DTYPES
from lightning_memmap.store import Store, append_store, build_store, open_store, push_store
from lightning_memmap.store.remote.files import RemoteFiles
from tests.support.datasets import Mixed, Numbered, Ragged, Scenes, column_files
from tests.support.models import set_up

NUM_ROWS, NUM_SHARDS = 100, 7


def build(path: Path, dataset: Any, **options: Any) -> Store:
    return build_store(dataset, path, **{"num_shards": NUM_SHARDS, "progress": False, **options})


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return build(tmp_path_factory.mktemp("built") / "s", Numbered(NUM_ROWS))


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return build(tmp_path_factory.mktemp("ragged") / "s", Ragged(NUM_ROWS))


def leaves_of(found: TensorDict) -> list[Tensor]:
    return list(found.values(include_nested=True, leaves_only=True))


def file_order(num_rows: int = NUM_ROWS) -> list[int]:
    return [row for shard in range(NUM_SHARDS) for row in range(shard, num_rows, NUM_SHARDS)]


def item_rows(items: Tensor, index: TensorDict) -> list[Tensor]:
    """The rows of a field that differ in length."""
    starts, stops = index["start"].tolist(), index["stop"].tolist()
    rows = [items[start:stop] for start, stop in zip(starts, stops, strict=True)]
    if "shape" in index:
        pairs = zip(rows, index["shape"].tolist(), strict=True)
        rows = [row.view(*shape, *row.shape[1:]) for row, shape in pairs]
    return rows


# What they hold


def test_rows_are_memory_mapped_tensors_in_the_order_of_the_files(built: Store) -> None:
    found, expected = built.as_tensordict(), Numbered(NUM_ROWS).expected()
    assert found.is_memmap()
    assert found.is_locked
    assert found.batch_size == (NUM_ROWS,)
    for name, rows in expected.items():
        assert isinstance(found[name], MemoryMappedTensor)
        assert Path(found[name].filename) == built.files / f"{name}.memmap"
        assert torch.equal(found[name], rows[file_order()])


def test_shard_has_every_cth_row(built: Store) -> None:
    shards = [built.shard(shard) for shard in range(NUM_SHARDS)]
    for shard, found in enumerate(shards):
        assert found.is_memmap()
        for name, rows in Numbered(NUM_ROWS).expected().items():
            assert isinstance(found[name], MemoryMappedTensor)
            assert torch.equal(found[name], rows[shard::NUM_SHARDS])
    assert torch.equal(torch.cat(shards)["x"], built.as_tensordict()["x"])


@pytest.mark.parametrize("shard", [-1, NUM_SHARDS, 1.5, True, "1"])
def test_shard_that_is_not_there_is_named(built: Store, shard: Any) -> None:
    is_number = type(shard) is int
    with pytest.raises(IndexError if is_number else TypeError, match=f"shard={shard!r}"):
        built.shard(shard)


@pytest.mark.parametrize("name", DTYPES)
def test_rows_of_every_dtype_are_mapped_and_pickled(tmp_path: Path, name: str) -> None:
    rows = torch.arange(120, dtype=torch.uint8).view(10, 12) % 2
    rows = rows.bool() if name == "bool" else rows.repeat(1, 4).view(DTYPES[name])
    found = build(tmp_path / "s", list(rows), num_shards=1).as_tensordict()
    for each in (found, pickle.loads(pickle.dumps(found))):
        assert each["value"].dtype == DTYPES[name]
        assert each["value"].view(torch.uint8).equal(rows.view(torch.uint8))


def test_nested_samples_are_nested(tmp_path: Path) -> None:
    rows = [{"a.b": row, "": (row, [row]), "empty": {}, 3: row} for row in range(10)]
    found = build(tmp_path / "s", rows, num_shards=1).as_tensordict()
    assert set(found.keys()) == {"a.b", "", "empty", "3"}
    assert found["", "1", "0"].tolist() == list(range(10))
    assert found["empty"].batch_size == (10,)


def test_tensordicts_keep_their_batch_size(tmp_path: Path) -> None:
    inner = TensorDict({"box": torch.randn(50, 5, 4)}, [50, 5])
    rows = TensorDict({"x": torch.randn(50, 3), "inner": inner}, [50])
    found = build(tmp_path / "s", rows, num_shards=1).as_tensordict()
    assert bool((found == rows).all())
    assert found["inner"].batch_size == (50, 5)
    assert found["inner"].is_memmap()


def test_rows_that_differ_in_length_have_starts_and_stops(ragged: Store) -> None:
    dataset = Ragged(NUM_ROWS)
    for found, rows in [
        (ragged.as_tensordict(), file_order()),
        (ragged.shard(3), range(3, NUM_ROWS, NUM_SHARDS)),
    ]:
        assert found.is_memmap()
        assert all(isinstance(leaf, MemoryMappedTensor) for leaf in leaves_of(found))
        samples = [dataset[row] for row in rows]
        for name in ("sound", "image", "ids"):
            expected = [torch.as_tensor(sample[name]) for sample in samples]
            stored = item_rows(ragged.items_of(name), found[name])
            assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(stored, expected, strict=True))
        texts = item_rows(ragged.items_of("text"), found["text"])
        assert [bytes(each.tolist()).decode() for each in texts] == [s["text"] for s in samples]


def test_batches_of_rows_that_differ_in_length(ragged: Store) -> None:
    found, rows = ragged.as_tensordict(), torch.tensor([5, 3, 99])
    order = file_order()
    stored = item_rows(ragged.items_of("sound"), found[rows]["sound"])
    for sound, place in zip(stored, rows.tolist(), strict=True):
        assert torch.equal(sound, Ragged(NUM_ROWS)[order[place]]["sound"])


def test_records_and_missing_values(tmp_path: Path) -> None:
    declared: Any = {"variable": {"objects.mask": 3}, "nullable": ["objects.score"]}
    store = build(tmp_path / "s", Scenes(NUM_ROWS), **declared)
    found, order = store.as_tensordict(), file_order()
    ages = zip(found["age", "values"].tolist(), found["age", "mask"].tolist(), strict=True)
    assert [age if mask else None for age, mask in ages] == [store[row]["age"] for row in order]
    boxes = item_rows(store.items_of("objects.box"), found["objects", "box"])
    for row, box in zip(order, boxes, strict=True):
        assert box.tolist() == [each["box"] for each in Scenes(NUM_ROWS)[row]["objects"]]
    assert found["objects", "score", "mask"].keys() == {"start", "stop"}


def test_items_of_a_field_of_one_shape_raises(built: Store) -> None:
    for name in ("x", "nothing"):
        with pytest.raises(ValueError, match=repr(name)):
            built.items_of(name)


def test_row_without_items_and_field_without_bytes(tmp_path: Path) -> None:
    rows = [{"ids": torch.zeros(0, 3), "none": torch.zeros(0)}] * 20
    store = build(tmp_path / "s", rows, variable=["ids"])
    found = pickle.loads(pickle.dumps(store.as_tensordict()))
    assert found["none"].shape == (20, 0)
    assert found["ids", "stop"].tolist() == [0] * 20
    assert store.items_of("ids").shape == (0, 3)


def test_damaged_index_raises(tmp_path: Path) -> None:
    store = build(tmp_path / "s", Ragged(NUM_ROWS))
    index = np.memmap(store.files / "sound.index", np.int64, "r+")
    index[50] = 2**60
    index.flush()
    with pytest.raises(StoreError, match="'sound'"):
        open_store(store.path).as_tensordict()


# Writing


def test_write_changes_no_file_and_no_loader(tmp_path: Path) -> None:
    store = build(tmp_path / "s", Numbered(NUM_ROWS))
    before, sample = column_files(store), store[0]["x"].clone()
    found = store.as_tensordict()
    sent = pickle.dumps(found)
    found["x"].fill_(-1)
    found[3:5].zero_()
    store.shard(0)["label"][0] = 7
    assert found["x"][0].tolist() == [-1] * 4
    assert found["label"][0] == 7
    assert column_files(store) == before
    assert torch.equal(store[0]["x"], sample)
    expected = Numbered(NUM_ROWS).expected()["x"][file_order()]
    assert torch.equal(open_store(store.path).as_tensordict()["x"], expected)
    assert torch.equal(pickle.loads(sent)["x"], expected)


def test_copies_have_memory_of_their_own(built: Store) -> None:
    found = built.as_tensordict()
    for other in (found.clone(), copy.deepcopy(found), found.to_dict()):
        values = other["x"].clone() if isinstance(other, dict) else other["x"]
        values.fill_(-1)
    assert found["x"].min() >= 0


def test_tensors_keep_the_mapping_alive(tmp_path: Path) -> None:
    values = build(tmp_path / "s", Numbered(NUM_ROWS)).as_tensordict()["x"]
    gc.collect()
    assert torch.equal(values, Numbered(NUM_ROWS).expected()["x"][file_order()])


# Sending


def test_pickle_has_the_place_of_the_tensors_and_no_rows(tmp_path: Path) -> None:
    rows = [{"x": torch.full((1000,), row), "n": {"y": row}} for row in range(NUM_ROWS)]
    found = build(tmp_path / "s", rows).as_tensordict()
    data = pickle.dumps(found)
    assert len(data) < 3000
    other = pickle.loads(data)
    assert other.is_memmap()
    assert other.is_locked
    assert isinstance(other["n", "y"], MemoryMappedTensor)
    assert bool((other == found).all())


def test_views_are_pickled_as_places(built: Store) -> None:
    found = built.as_tensordict()
    x = found["x"]
    views = [x[3], x[5:50:3, 1:], x[:, None], *x.unbind(1), *x.chunk(3), *x.split(30), x[2][1:][:2]]
    for view in [*views, *found[4:9].values(), *found[7].values()]:
        assert isinstance(view, MemoryMappedTensor)
        data = pickle.dumps(view)
        assert len(data) < 1500
        assert torch.equal(pickle.loads(data), view)


def test_ragged_rows_are_pickled_as_places(ragged: Store) -> None:
    for found in (ragged.as_tensordict(), ragged.shard(2), ragged.as_tensordict()[5:9]):
        other = pickle.loads(pickle.dumps(found))
        assert all(isinstance(leaf, MemoryMappedTensor) for leaf in leaves_of(other))
        assert bool((other == found).all())
    assert torch.equal(pickle.loads(pickle.dumps(ragged.items_of("ids"))), ragged.items_of("ids"))


def summed(found: TensorDict) -> tuple[bool, bool, int]:
    """Overwrite rows in this process, and say what was received."""
    found["x"].fill_(-1)
    is_mapped = isinstance(found["x"], MemoryMappedTensor)
    return is_mapped, found.is_memmap(), int(found["label"].sum())


@pytest.mark.slow
def test_sent_to_another_process_by_place(built: Store) -> None:
    sent = [built.as_tensordict(), built.shard(2)]
    pool = multiprocessing.get_context("spawn").Pool(1)
    try:
        received = pool.map(summed, sent)
    finally:
        pool.terminate()
        pool.join()
    assert received == [(True, True, int(found["label"].sum())) for found in sent]
    assert all(found["x"].min() >= 0 for found in sent)


def test_store_that_was_replaced_raises(tmp_path: Path) -> None:
    store = build(tmp_path / "s", Numbered(NUM_ROWS))
    found = store.as_tensordict()
    data = pickle.dumps(found)
    build(tmp_path / "s", Numbered(50), overwrite=True)
    assert torch.equal(found["x"], Numbered(NUM_ROWS).expected()["x"][file_order()])
    with pytest.raises(StoreError, match="replaced"):
        pickle.loads(data)


def test_store_with_appended_rows(tmp_path: Path) -> None:
    build(tmp_path / "s", Numbered(NUM_ROWS))
    store = append_store(Numbered(20), tmp_path / "s", progress=False)
    assert len(store.as_tensordict()) == NUM_ROWS + 20


# Other stores


def test_shard_of_a_url_is_fetched_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_MEMMAP_CACHE", str(tmp_path / "cache"))
    seen: list[int] = []
    read = RemoteFiles.read

    def noted(self: RemoteFiles, name: str, start: int, end: int, **options: Any) -> bytes:
        if name.endswith((".memmap", ".values", ".index")):
            seen.append(end - start)
        return read(self, name, start, end, **options)

    monkeypatch.setattr(RemoteFiles, "read", noted)
    whole = build(tmp_path / "s", Mixed(NUM_ROWS), **Mixed.declared)
    push_store(whole.path, (url := (tmp_path / "far").as_uri()), progress=False)
    store = open_store(url)
    found = store.shard(2)
    fetched, whole_bytes = sum(seen), sum(whole.manifest.file_bytes.values())
    assert 0 < fetched < whole_bytes / 3
    for each in (found, pickle.loads(pickle.dumps(found))):
        assert bool((each == whole.shard(2)).all())
    assert bool((store.as_tensordict() == whole.as_tensordict()).all())
    assert torch.equal(store.items_of("name"), whole.items_of("name"))


def test_several_stores_as_one_raise(tmp_path: Path) -> None:
    sets, shares = {"a": Numbered(50), "b": Numbered(60)}, Mixture({"a": 0.5, "b": 0.5})
    data = MemmapDataModule(sets, store_dir=tmp_path, batch_size=4, sampler=shares)
    set_up(data, "fit")
    with pytest.raises(StoreError, match="several stores"):
        data.stores["train"].as_tensordict()
