"""Rows that differ in length, read window by window: those of the mapping, in bounded memory."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_memmap.errors import PlacementError
from lightning_memmap.loading.memory import SlotMap
from lightning_memmap.loading.split import max_block_bytes
from lightning_memmap.loading.stream import LOOKUP_BYTES, Stream, StreamMemory, max_block_items
from lightning_memmap.placement.plan import plan_placement
from lightning_memmap.placement.topology import DataTopology
from lightning_memmap.sampling import Pool, ShuffledSampler
from lightning_memmap.sampling.rows import Rows, Shards, StoreRows
from lightning_memmap.sampling.schedule import Blocks
from lightning_memmap.schema.fields import Field
from lightning_memmap.store import Store, build_store
from lightning_memmap.store.open_columns import IndexedItems
from tests.support.rows import CPU, StridedRows, chosen_of, make_split, size_of

VARIABLE = ["grid", "boxes", "wide", "empty"]


def sample(row: int) -> dict[str, Any]:
    """All that differs in length, with empty rows among it, and a number."""
    sizes = np.random.default_rng(row)
    length = int(sizes.integers(0, 40))
    return {
        "row": row,
        "sound": torch.arange(length, dtype=torch.int16) + row,
        "text": f"row {row} " + "é" * (row % 11),
        "grid": torch.full((row % 3, 1 + row % 5, 3), row, dtype=torch.float64),
        "boxes": [{"box": torch.full((4,), row + n), "label": n} for n in range(row % 4)],
        "wide": torch.full((row % 4, 1001), row % 251, dtype=torch.uint8),
        "empty": torch.zeros(0, dtype=torch.uint8),
    }


def plain(value: Any) -> Any:
    """What can be compared of a batch."""
    if isinstance(value, Tensor):
        if value.is_nested:
            return [plain(each) for each in value.unbind()]
        # numpy has no bfloat16.
        return value.dtype, value.shape, value.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value


class TestMemory:
    @given(
        num_rows=st.integers(1, 60),
        num_shards=st.integers(1, 5),
        window=st.integers(1, 70),
        seed=st.integers(0, 99),
        is_subset=st.booleans(),
    )
    @settings(deadline=None, max_examples=25)
    def test_no_window_has_more_items_than_the_largest_one(
        self, num_rows: int, num_shards: int, window: int, seed: int, is_subset: bool
    ) -> None:
        lengths = np.random.default_rng(seed).pareto(0.8, num_rows).astype(np.int64) % 5000
        stored = Shards(num_rows, num_shards)
        every: Rows = StoreRows(stored)
        ends = np.cumsum(lengths[every.subset_index_at(np.arange(num_rows))])
        items = torch.empty(int(ends[-1]), dtype=torch.uint8)
        rows = IndexedItems(
            Field("x", torch.uint8, (None,)), stored.file_rows, items, ends[:, None]
        )
        if is_subset and num_rows > 1:
            every = StridedRows(0, 2).among(every)
        pool = Pool.of(every, num_shards)
        held = list(range(0, num_shards, 2))
        places = SlotMap(pool, pool.file_starts)
        sampler, found = ShuffledSampler(pool, seed, window), [0]
        most = max_block_items(rows, places, held, Blocks(sampler))
        for epoch in range(4):
            for number in range(-(-pool.longest // window)):
                runs = sampler.block_runs(epoch, number) or []
                here = [
                    lengths[pool.shard_dataset_rows(shard)[run.start : run.stop]]
                    for run in runs
                    for shard in held
                ]
                found.append(int(np.concatenate(here).sum()))
        assert max(found) <= most <= int(lengths.sum())

    def test_memory_and_plan_are_of_the_largest_block(self, tmp_path: Path) -> None:
        # A few long rows among many short ones: one window is far larger than the mean.
        rows = [
            {"x": torch.zeros(2**16 if 500 < row < 520 else 10, dtype=torch.uint8)}
            for row in range(4000)
        ]
        path, variable = tmp_path / "s", ["x"]
        store = build_store(rows, path, num_shards=4, variable=variable, progress=False)
        pool = make_split(store).pool
        column = store.column("x")
        assert isinstance(column, IndexedItems)
        windows = Blocks(ShuffledSampler(pool, 0, 100))
        largest = max_block_items(column, SlotMap.in_store(store, pool), range(4), windows)
        assert 19 * 2**16 < largest < 20 * 2**16
        split = make_split(store, residency="stream", window=100)
        (source,) = split.sources
        assert isinstance(source, Stream)
        assert StreamMemory(source).variable[0][1].memory[0].nbytes == largest
        topology = DataTopology((CPU,) * 2)

        def plan(window: int) -> int:
            measure = partial(max_block_bytes, store)
            size = size_of(store.manifest, topology, window=window, measure=measure)
            plan_placement({"train": size}, topology, "stream", budget_bytes={CPU: 2_530_000})
            return size.block_bytes

        # All long rows are in one window, however short it is, and twice they fit.
        assert 19 * 2**16 < plan(20) < 1_300_000
        with pytest.raises(PlacementError, match=r"Use shuffle_block=(\d+) "):
            plan(900)

    @pytest.mark.parametrize("is_looked_up", [False, True])
    def test_rows_that_lie_together_need_no_table(
        self, numbered_store: Callable[..., Store], is_looked_up: bool
    ) -> None:
        store = numbered_store(97, 24)
        subset = StridedRows(0, 2) if is_looked_up else None
        order = ShuffledSampler(Pool.of(chosen_of(store, subset), 24), 0, 2)
        found = max_block_bytes(store, Blocks(order), range(24))
        row_bytes = store.manifest.row_bytes + is_looked_up * LOOKUP_BYTES
        assert found == 24 * 2 * row_bytes
