"""Many rows over many processes: what a process sets up does not grow with the rows."""

import tracemalloc

import numpy as np
import pytest
import torch

from lightning_memmap.placement.plan import plan_placement
from lightning_memmap.placement.topology import DataTopology
from lightning_memmap.sampling import Pool, Sampler, SequentialSampler, ShuffledSampler
from lightning_memmap.sampling.rows import Shards
from lightning_memmap.sampling.schedule import BatchSchedule
from lightning_memmap.schema.fields import Field
from lightning_memmap.store.columns import FixedColumn
from tests.support.rows import size_of

CPU = torch.device("cpu")
ROWS, RANKS, GLOBAL_BATCH = 10**10, 1024, 2**20


class ManyRows:
    """The sizes of a store that is not there."""

    num_rows, num_shards, row_bytes = ROWS, RANKS, 8
    shards = Shards(ROWS, RANKS)
    columns = (FixedColumn(Field("x", torch.int64, ()), shards),)


def order_of(kind: str, pool: Pool) -> Sampler:
    if kind == "sequential":
        return SequentialSampler(pool)
    return ShuffledSampler(pool, 7, None if kind == "shuffled" else 1000)


@pytest.mark.parametrize("kind", ["shuffled", "sequential", "block-shuffled"])
def test_set_up_of_a_rank_is_small(kind: str) -> None:
    tracemalloc.start()
    try:
        topology = DataTopology((CPU,), rank=511, data_parallel_size=RANKS)
        size = size_of(ManyRows(), topology)
        placement = plan_placement({"train": size}, topology, "mmap", budget_bytes={CPU: 0})
        sampler = order_of(kind, size.pool)
        plan = BatchSchedule(sampler.num_positions, GLOBAL_BATCH, RANKS)
        found = []
        for step in (0, len(plan) // 2, len(plan) - 1):
            first, last = plan.bounds(step)
            found.append(sampler.dataset_rows(3, range(first + 511, last, RANKS)))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    rows = np.concatenate(found)
    assert len(np.unique(rows)) == len(rows) > 2 * GLOBAL_BATCH // RANKS
    assert (rows % RANKS == 511).all()
    assert rows.max() < ROWS
    held = [shard for shard, where in enumerate(placement.splits["train"].residencies) if where]
    assert held == [511]
    assert peak_bytes < 100e6
