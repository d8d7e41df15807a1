"""The worked examples at the head of the files in loading/, and of store/joined.py, hold."""

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_memmap.loading.fetch import Fetcher
from lightning_memmap.loading.memory import SeriesSlots, SlotMap, copy_rows
from lightning_memmap.loading.row_source import Steps
from lightning_memmap.loading.split import SplitRows
from lightning_memmap.loading.stream import Stream, merge_into_runs
from lightning_memmap.placement.topology import DataTopology
from lightning_memmap.sampling import Pool, SequentialSampler
from lightning_memmap.sampling.identity import FrozenArray
from lightning_memmap.sampling.rows import Shards, StoreRows, WindowedRows
from lightning_memmap.sampling.schedule import Blocks
from lightning_memmap.store import Store, build_store
from lightning_memmap.store.joined import JoinedStore
from tests.support.rows import pool_of

CPU = torch.device("cpu")


def seven_rows(path: Path, num_shards: int) -> Store:
    rows = [{"row": row} for row in range(7)]
    return build_store(rows, path / "s", num_shards=num_shards, progress=False)


def split_columns(store: Store) -> list[Any]:
    return [*zip(store.schema.fields, store.mapped_columns, strict=True)]


def test_memory_of_a_device_holds_its_shards(tmp_path: Path) -> None:
    store = seven_rows(tmp_path, 3)
    pool = pool_of(7, 3)
    order = SequentialSampler(pool)
    mapped = SlotMap.in_store(store, pool)
    assert store.mapped_columns[0].tensor.tolist() == [0, 3, 6, 1, 4, 2, 5]
    assert mapped.locate(order, 0, range(7)).tolist() == [0, 3, 5, 1, 4, 6, 2]
    memory = copy_rows(split_columns(store), mapped, [0, 2], CPU)
    (rows,) = memory.take(torch.arange(5))
    assert rows.tolist() == [0, 3, 6, 2, 5]
    slots = memory.locate(order, 0, range(7))
    held = np.array([0, 2, 3, 5, 6])
    assert slots[held].tolist() == [0, 3, 1, 4, 2]


def test_files_of_several_stores_start_on_pages(tmp_path: Path) -> None:
    row = torch.zeros(mmap.ALLOCATIONGRANULARITY // 4, dtype=torch.uint8)
    stores = {
        name: build_store([{"x": row}] * count, tmp_path / name, num_shards=1, progress=False)
        for name, count in (("a", 3), ("b", 2))
    }
    joined = JoinedStore(tmp_path, stores)
    assert joined.memory_rows(np.arange(5)).tolist() == [0, 1, 2, 4, 5]
    assert [
        store.path.name for store, _, rows in joined.split_by_store(np.arange(5)) for _ in rows
    ] == [*"aaabb"]


def test_windows_start_at_their_slots() -> None:
    windows = WindowedRows(StoreRows(Shards(2, 1)), ("x",), FrozenArray(np.array([5, 4])), 3, 2)
    begins = np.array([0, 5])
    series = SeriesSlots(windows, begins, begins, np.arange(2), CPU)
    assert series.slots(np.arange(3)).tolist() == [0, 2, 5]
    assert series.rows_of(torch.tensor([0, 2, 5])).tolist() == [0, 0, 1]
    assert series.num_slots == 9 + 1


def test_block_is_read_into_one_buffer(tmp_path: Path) -> None:
    store = seven_rows(tmp_path, 3)
    pool = pool_of(7, 3)
    order = SequentialSampler(pool, shuffle_block=2)
    blocks = Blocks(order)
    stream = Stream(
        split_columns(store), [None], SlotMap.in_store(store, pool), 7, held=[0, 2], blocks=blocks
    )
    starts, stops = merge_into_runs(stream.locate_block(blocks, 0, 0))
    assert list(zip(starts.tolist(), stops.tolist(), strict=True)) == [(0, 2), (5, 7)]
    starts, stops = merge_into_runs(stream.locate_block(blocks, 0, 1))
    assert list(zip(starts.tolist(), stops.tolist(), strict=True)) == [(2, 3)]
    slots = stream.locate(order, 0, range(7))
    assert slots[[0, 2, 3, 5, 6]].tolist() == [0, 5, 1, 6, 2 + 1 * 7]


def test_sources_are_requested_rows_by_receiver(tmp_path: Path) -> None:
    store = seven_rows(tmp_path, 4)
    pool = Pool.of(StoreRows(Shards(7, 4)), 4)
    mapped = SlotMap.in_store(store, pool)
    sources = tuple(
        copy_rows(split_columns(store), mapped, shards, CPU) for shards in ([0, 1], [2, 3])
    )
    fields = store.schema.fields
    rows = SplitRows(pool, sources, np.array([0, 0, 1, 1]), fields)
    fetcher = Fetcher(rows, DataTopology((CPU, CPU)), SequentialSampler(pool), None)
    steps = Steps(0, 0, range(7), [4, 3], [4, 3])
    bounds = np.array([0, 4, 7])
    requested = [
        [(indices.tolist(), sizes) for _, indices, sizes in fetcher._requests(s, steps, 0, bounds)]
        for s in range(2)
    ]
    assert requested[0] == [([0, 1], [1, 1]), ([4, 5], [1, 1])]
    assert requested[1] == [([2, 3], [1, 1]), ([6], [1, 0])]
    (fetched,) = fetcher.fetch([source.take for source in sources], steps)
    first, second = [[leaf[0].tolist() for leaf in step] for step in fetched.by_step()[::-1]]
    assert first == [[0, 2], [1, 3]]
    assert second == [[4, 6], [5]]
