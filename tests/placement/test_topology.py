"""Which data device owns a shard, and which rows each rank would have under strategies that do not
run on this machine, by the topology that is derived from what they tell Lightning's samplers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities import rank_zero_only

from lightning_memmap.placement.topology import DataTopology, find_topology
from lightning_memmap.sampling.schedule import BatchSchedule
from lightning_memmap.store import Store
from tests.support.rows import epoch_rows, joined, make_loader, order_rows

NUM_NODES, DEVICES = 2, 3
CPU = torch.device("cpu")


class TestTopology:
    @given(
        num_devices=st.integers(1, 8),
        size=st.integers(1, 6),
        num_shards=st.integers(1, 60),
    )
    def test_owner_over_all_ranks_is_one(
        self, num_devices: int, size: int, num_shards: int
    ) -> None:
        ranks = [DataTopology((CPU,) * num_devices, rank, size) for rank in range(size)]
        for shard in range(num_shards):
            owners = [
                rank + size * index
                for rank, topology in enumerate(ranks)
                if (index := topology.owner(shard)) is not None
            ]
            # Data device w owns the shards c with c % W == w.
            assert owners == [shard % (size * num_devices)]

    def test_topology_without_device_raises(self) -> None:
        with pytest.raises(ValueError, match=r"data_devices=\(\): at least one device"):
            DataTopology(())


class Node(LightningEnvironment):
    """One process of one node."""

    def __init__(self, node_rank: int, local_rank: int) -> None:
        super().__init__()
        self._ranks = node_rank, local_rank

    def node_rank(self) -> int:
        return self._ranks[0]

    def local_rank(self) -> int:
        return self._ranks[1]


def deepspeed(**options: Any) -> DeepSpeedStrategy:
    """Lightning's strategy as far as it is made without the package: what it tells samplers needs
    nothing of the rest."""
    strategy = DeepSpeedStrategy.__new__(DeepSpeedStrategy)
    DDPStrategy.__init__(strategy, **options)
    return strategy


@pytest.mark.parametrize("make", [DDPStrategy, FSDPStrategy, deepspeed])
@pytest.mark.parametrize("num_rows", [100, 97])
def test_ranks_of_two_nodes_have_the_global_batches_of_one_process(
    monkeypatch: pytest.MonkeyPatch,
    numbered_store: Callable[..., Store],
    make: Callable[..., Any],
    num_rows: int,
) -> None:
    # Put back after the test: a strategy tells the whole process which rank it is.
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    store = numbered_store(num_rows, 24)
    loaders = []
    for node in range(NUM_NODES):
        for local_rank in range(DEVICES):
            strategy: Any = make(
                parallel_devices=[CPU] * DEVICES,
                cluster_environment=Node(node, local_rank),
            )
            strategy.num_nodes = NUM_NODES
            strategy.set_world_ranks()
            topology = find_topology(strategy)
            loaders.append(
                make_loader(
                    store, 1, 4, rank=topology.rank, size=topology.data_parallel_size, shuffle=True
                )
            )
    steps = [
        sorted(joined(parts))
        for parts in zip(*(epoch_rows(loader) for loader in loaders), strict=True)
    ]
    schedule = BatchSchedule(num_rows, 4 * NUM_NODES * DEVICES, 24)
    sampler = loaders[0].order
    bounds = [schedule.bounds(step) for step in range(len(schedule))]
    assert steps == [sorted(order_rows(sampler, 0, first, last)) for first, last in bounds]
