"""Where the rows of a split lie in a store, by table and worked out row by row."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memmap.integers import Integers
from lightning_memmap.loading import memory
from lightning_memmap.loading.memory import SlotMap
from lightning_memmap.sampling import Pool, Sampler, ShuffledSampler, Weighted
from lightning_memmap.sampling.rows import JoinedRows, Rows, Shards, StoreRows
from tests.support.rows import StridedRows


def moved(locations: Integers) -> Integers:
    """As if a second store began behind row 20, after a gap of 2**32 rows."""
    return locations + np.where(locations < 20, 0, 2**32)


@st.composite
def cases(draw: st.DrawFn) -> tuple[SlotMap, Sampler]:
    num_rows, num_shards = draw(st.integers(12, 90)), draw(st.integers(1, 6))
    stored = StoreRows(Shards(num_rows, num_shards))
    kind = draw(st.sampled_from(["chosen", "strided", "striped", "joined", "weighted"]))
    seed = draw(st.integers(0, 99))
    rows: Rows = stored
    if kind == "joined":
        parts = (StoreRows(Shards(7, num_shards)), StoreRows(Shards(num_rows - 7, 2)))
        rows = JoinedRows(("a", "b"), parts)
    if kind == "chosen":
        chosen = np.random.default_rng(seed).permutation(num_rows)[: num_rows // 2]
        rows = StoreRows.of(stored.shards, chosen)
    if kind == "strided":
        rows = StridedRows(1, 3, excluded=True).among(stored)
    pool = Pool.of(rows, num_shards + (kind == "striped"))
    sampler: Sampler = ShuffledSampler(pool, seed)
    if kind == "weighted":
        weights = np.random.default_rng(seed).integers(0, 3, num_rows).astype(np.float64)
        weights[:3] = 1, 0, 4
        fields: Any = SimpleNamespace(num_rows=num_rows)
        sampler = Weighted(weights, 50).make(pool, seed, fields)
    pool = sampler.pool
    if kind == "joined":
        return SlotMap(pool, None, moved), sampler
    return SlotMap(pool, pool.file_starts), sampler


@given(cases(), st.integers(0, 3), st.data())
@settings(max_examples=25)
def test_rows_are_found_where_they_lie_with_a_table_or_without(
    case: tuple[SlotMap, Sampler], epoch: int, data: st.DataObject
) -> None:
    found_at, sampler = case
    begin = data.draw(st.integers(0, sampler.num_positions))
    positions = range(begin, sampler.num_positions)
    rows = sampler.dataset_rows(epoch, positions)
    every = found_at.pool.rows
    expected = (StoreRows(every.shards) if isinstance(every, StoreRows) else every).file_rows(rows)
    if found_at.to_slots is not None:
        expected = found_at.to_slots(expected)
    found = found_at.locate(sampler, epoch, positions)
    assert found.dtype == np.int64
    assert found.tolist() == expected.tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "TABLE_ROWS", 0)
        assert found_at.locate(sampler, epoch, positions).tolist() == expected.tolist()
