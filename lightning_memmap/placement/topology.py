"""The data topology: which devices hold the data, and where batches go."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class DataTopology:
    """Where the data of this process lives, and where its batches go."""

    # The data devices of all processes are numbered: rank r of R with D data devices has r, r + R,
    # r + 2R ..., W = R * D in all. Data device w owns the shards c with c % W == w. One device may
    # be named more than once: these are logical data devices. ``assemble_on`` is None where the
    # batches of the data devices stay apart. ``num_local_processes`` share the memory of this
    # machine.

    data_devices: tuple[torch.device, ...]
    rank: int = 0
    size: int = 1
    assemble_on: torch.device | None = None
    prefetch: int = 0
    num_local_processes: int = 1

    def __post_init__(self) -> None:
        if not self.data_devices:
            raise ValueError("data_devices=(): at least one device must hold the data")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank={self.rank}: outside the {self.size} processes")
        if self.prefetch < 0:
            raise ValueError(f"prefetch={self.prefetch}: the steps made ready ahead, 0 for none")
        if self.num_local_processes < 1:
            raise ValueError(
                f"num_local_processes={self.num_local_processes}: at least 1, for this process"
            )

    @property
    def num_data_devices(self) -> int:
        """Data devices of all processes, ``W``."""
        return self.size * len(self.data_devices)

    def owner(self, shard: int) -> int | None:
        """The data device of this process that owns a shard."""
        if shard % self.size != self.rank:
            return None
        return shard // self.size % len(self.data_devices)


def topology_of(strategy: Any) -> DataTopology:
    """The data topology under a strategy: what it declares, or else one data device per process."""
    if strategy is None:
        cpu = torch.device("cpu")
        return DataTopology((cpu,), assemble_on=cpu)
    declared: DataTopology | None = getattr(strategy, "data_topology", None)
    if declared is not None:
        return declared
    rank, size = data_parallel_rank(strategy)
    return DataTopology(
        (strategy.root_device,),
        rank,
        size,
        assemble_on=strategy.root_device,
        num_local_processes=local_processes(strategy),
    )


def data_parallel_rank(strategy: Any) -> tuple[int, int]:
    """Data-parallel rank and size of this process under any Lightning strategy."""
    sharding = getattr(strategy, "distributed_sampler_kwargs", None) or {}
    return sharding.get("rank", 0), sharding.get("num_replicas", 1)


def local_processes(strategy: Any) -> int:
    """Processes that a run has on this machine, under any Lightning strategy."""
    return int(getattr(strategy, "num_processes", 1))
