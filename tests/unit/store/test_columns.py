"""Columns: another kind comes in by its own class alone, and everything that a store does goes
through it."""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_memmap.errors import DatasetError, StoreError
from lightning_memmap.sampling import Shards
from lightning_memmap.schema import Schema
from lightning_memmap.store import Store, build_store, open_store, range_writer, verify_store
from lightning_memmap.store.columns import registered
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.plan import StorePlan
from lightning_memmap.store.row_file import open_row_files
from lightning_memmap.store.table import TableBuild, TableWriter
from tests.datasets import Counting, Replaced
from tests.rows import make_loader
from tests.unit.store.other_columns import Bits, Compressed
from tests.unit.store.signing import sign_manifest

#: Of several ranges; see `kinds`.
NUM_ROWS = 300


class Mixed:
    """Row ``i`` has bools, integers that compress well or badly, and floats."""

    def __init__(self, num_rows: int = NUM_ROWS) -> None:
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < self.num_rows:
            raise IndexError(row)
        generator = torch.Generator().manual_seed(row)
        few = torch.full((8,), row)
        return {
            "mask": torch.rand(3, 5, generator=generator) < 0.5,
            "number": few if row % 2 else torch.randint(2**60, (8,), generator=generator),
            "plain": torch.rand(2, generator=generator),
        }


@pytest.fixture(autouse=True)
def kinds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(range_writer, "_MAX_RANGE_ROWS", 100)
    with registered(Bits), registered(Compressed):
        yield


@given(st.integers(1, 200), st.integers(1, 40))
def test_shards_locate_each_row_in_its_shard_and_back(num_rows: int, num_shards: int) -> None:
    shards = Shards(num_rows, num_shards)
    expected = [row for shard in range(num_shards) for row in range(shard, num_rows, num_shards)]
    assert shards.rows_at(np.arange(num_rows)).tolist() == expected
    assert shards.locate(np.array(expected)).tolist() == list(range(num_rows))
    ends = shards.starts + shards.sizes
    assert [*ends[:-1].tolist(), num_rows] == [*shards.starts[1:].tolist(), int(ends[-1])]


def build(path: Path, dataset: Any = None, **options: Any) -> Store:
    options = {"num_shards": 7, "progress": False, **options}
    return build_store(Mixed() if dataset is None else dataset, path, **options)


def assert_holds(store: Store) -> None:
    expected = [Mixed(store.num_rows)[row] for row in range(store.num_rows)]
    rows = np.random.default_rng(0).permutation(store.num_rows)
    for field, column in zip(store.schema.fields, store.columns, strict=True):
        found = column.fetch(rows)
        assert torch.equal(found, torch.stack([expected[row][field.name] for row in rows]))
    for row in (0, 1, store.num_rows - 1):
        sample = store[row]
        assert all(torch.equal(sample[name], expected[row][name]) for name in sample)


FILES = ["manifest.json", "mask.memmap", "number.ends", "number.values", "plain.memmap"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_other_columns_are_built_verified_and_read(tmp_path: Path, num_workers: int) -> None:
    store = build(tmp_path / "s", num_workers=num_workers)
    assert_holds(store)
    assert sorted(os.listdir(store.path)) == FILES
    assert sorted(os.listdir(tmp_path)) == [".s.lock", "s"]
    assert (store.path / "mask.memmap").stat().st_size == 2 * NUM_ROWS
    assert verify_store(store.path) == []
    assert_holds(build(tmp_path / "s", check="full", num_workers=num_workers))


def test_other_columns_hold_the_same_rows_as_the_usual_ones(tmp_path: Path) -> None:
    store = build(tmp_path / "s", Mixed(50))
    again = build(tmp_path / "again", store)
    for name in FILES[1:]:
        assert (store.path / name).read_bytes() == (again.path / name).read_bytes()
    assert again.manifest.probes == store.manifest.probes


@pytest.mark.parametrize("num_workers", [0, 2])
def test_other_columns_are_resumed(tmp_path: Path, num_workers: int) -> None:
    broken = Replaced(Mixed(), {290: ValueError("broken")})
    with pytest.raises(DatasetError, match="row 290"):
        build(tmp_path / "s", broken, num_workers=num_workers, fingerprint="one")
    dataset = Counting(Mixed())
    store = build(tmp_path / "s", dataset, fingerprint="one")
    assert len(dataset.rows) < NUM_ROWS
    assert_holds(store)
    assert sorted(os.listdir(store.path)) == FILES
    assert verify_store(store.path) == []


def test_other_columns_that_fail_while_they_are_finished_are_finished_by_the_next_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> Any:
        raise OSError("the disk")

    with monkeypatch.context() as patch:
        patch.setattr(np, "fromfile", fail)
        with pytest.raises(OSError, match="the disk"):
            build(tmp_path / "s", fingerprint="one")
    dataset = Counting(Mixed())
    assert_holds(build(tmp_path / "s", dataset, fingerprint="one"))
    assert len(dataset.rows) == 16  # The probe rows, twice.


def test_damage_of_other_columns_names_field_and_shard(tmp_path: Path) -> None:
    store = build(tmp_path / "s")
    starts = Shards(NUM_ROWS, 7).starts
    for name, field, byte, shard in (
        ("mask.memmap", "mask", 2 * int(starts[3]), 3),
        ("number.ends", "number", 8 * int(starts[5]) - 1, 4),
        ("number.values", "number", 0, 0),
    ):
        data = bytearray((store.path / name).read_bytes())
        data[byte] ^= 1
        (store.path / name).write_bytes(data)
        (damage,) = verify_store(store.path)
        assert (damage.field, damage.shard) == (field, shard)
        data[byte] ^= 1
        (store.path / name).write_bytes(data)
    os.truncate(store.path / "number.ends", 8)
    with pytest.raises(StoreError, match=rf"number\.ends has 8 bytes, expected {8 * NUM_ROWS}"):
        open_store(store.path)


def test_bytes_of_shards_are_those_of_their_rows(tmp_path: Path) -> None:
    manifest = build(tmp_path / "s").manifest
    sizes = [
        sum(len(zlib.compress(Mixed()[row]["number"].numpy().tobytes())) for row in rows)
        for rows in (range(shard, NUM_ROWS, 7) for shard in range(7))
    ]
    rest = Shards(NUM_ROWS, 7).sizes * (2 + 8)
    assert manifest.shard_bytes().tolist() == (np.array(sizes) + rest).tolist()
    assert manifest.num_bytes == manifest.shard_bytes().sum()
    quarters = manifest.shard_bytes(Shards(NUM_ROWS, 4))
    assert (quarters >= manifest.num_bytes // 4 - 1000).all()


def test_table_of_other_columns_is_written_in_any_order(tmp_path: Path) -> None:
    samples = [Mixed(40)[row] for row in range(40)]
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    plan = StorePlan(tmp_path / "t", 40, 3, Schema.from_batch(batch))
    build = TableBuild(plan)
    writer = TableWriter(plan, build.token)
    for rows in torch.randperm(40).split(9):
        writer.write(rows.numpy(), [leaf[rows] for leaf in batch.values()])
    writer.close()
    table = build.finish(40)
    assert_holds(table)
    assert sorted(os.listdir(table.path)) == FILES
    assert verify_store(table.path) == []


@pytest.mark.parametrize("transform", [None, lambda batch: batch])
@pytest.mark.parametrize("num_devices", [1, 3])
def test_loader_serves_rows_of_other_columns(
    tmp_path: Path, num_devices: int, transform: Any
) -> None:
    dataset = Mixed(100)
    store = build(tmp_path / "s", dataset, num_shards=6)
    loader = make_loader(store, num_devices, 4, shuffle=True, transform=transform)
    order = loader.order.dataset_rows(0, range(100)).tolist()
    batches = [super_batch.to("cpu") for super_batch in loader]
    assert len(batches) > 5
    for name in dataset[0]:
        expected = torch.stack([dataset[row][name] for row in order])
        assert torch.equal(torch.cat([batch[name] for batch in batches]), expected)
    with pytest.raises(StoreError, match="residency='mmap'"):
        make_loader(store, residency="device")


def test_store_of_an_unknown_kind_of_column_is_refused(tmp_path: Path) -> None:
    path = build(tmp_path / "s").path
    for kind in ("another", "", 3, None, [], "fixed"):
        sign_manifest(path, lambda body, kind=kind: body["columns"]["mask"].update(kind=kind))
        with pytest.raises(
            StoreError, match=rf"'mask' is kept in a way|mask\.memmap has {2 * NUM_ROWS} bytes"
        ):
            open_store(path)


@pytest.mark.parametrize(
    "columns",
    [
        [],
        None,
        "bits",
        {"other": {"kind": "bits"}},
        {"mask": "bits"},
        {"number": {"kind": "compressed", "shard_bytes": [1]}},
        {"number": {"kind": "compressed"}},
    ],
)
def test_store_whose_columns_are_a_lie_is_refused(tmp_path: Path, columns: Any) -> None:
    path = build(tmp_path / "s", Mixed(20)).path
    sign_manifest(path, lambda body: body.update(columns=columns))
    with pytest.raises(StoreError, match="cannot be trusted"):
        open_store(path)


def test_rows_that_do_not_lie_in_one_tensor_are_refused_where_one_is_asked_for(
    tmp_path: Path,
) -> None:
    store = build(tmp_path / "s", Mixed(20))
    for ask in (lambda: store.tensors, lambda: store.shard(0), store.as_tensordict):
        with pytest.raises(StoreError, match="does not lie in one tensor"):
            ask()
    with pytest.raises(StoreError, match=r"kept as 'bits' columns, .* another residency"):
        open_row_files(store, store.manifest.columns)


def test_manifest_of_fixed_columns_says_nothing_of_them(tmp_path: Path) -> None:
    build(tmp_path / "s", [torch.rand(3) for _ in range(5)])
    assert "columns" not in (tmp_path / "s" / "manifest.json").read_text()
    assert {column.kind for column in Manifest.read(tmp_path / "s").columns} == {"fixed"}
