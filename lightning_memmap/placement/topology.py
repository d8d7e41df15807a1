"""The data topology: which devices hold the data, how much of it, and where batches go."""

from dataclasses import dataclass
from typing import Any

import torch

from lightning_memmap.errors import check_number
from lightning_memmap.host_memory import available_bytes


@dataclass(frozen=True)
class DataTopology:
    """The devices that hold the data of this process, and the device its batches go to.

    The data devices of all processes are numbered. Rank ``r`` of ``R`` with ``D`` data devices has
    the numbers ``r, r + R, r + 2R ..``, of ``W = R * D`` in total, and data device ``w`` owns the
    shards ``c`` with ``c % W == w``. With 2 ranks of 2 devices each, and 8 shards::

        rank 0    device 0: shards 0 4    device 1: shards 2 6
        rank 1    device 0: shards 1 5    device 1: shards 3 7

    Args:
        data_devices: The data devices of this process. A device listed several times counts as
            several logical data devices.
        rank: Data-parallel rank of this process.
        data_parallel_size: Number of data-parallel ranks.
        assemble_on: The device that receives the super-batch; None if the batches of the data
            devices stay apart.
        num_local_processes: Processes that share the host memory of this machine.
        processes_per_device: Processes that share the memory of each data device but the CPU.
    """

    data_devices: tuple[torch.device, ...]
    rank: int = 0
    data_parallel_size: int = 1
    assemble_on: torch.device | None = None
    num_local_processes: int = 1
    processes_per_device: int = 1

    def __post_init__(self) -> None:
        if not self.data_devices:
            raise ValueError("data_devices=(): at least one device must hold the data")

    @property
    def num_global_data_devices(self) -> int:
        """Data devices of all processes, ``W``."""
        return self.data_parallel_size * len(self.data_devices)

    def shards_of_process(self, num_shards: int) -> range:
        """Return which of ``num_shards`` shards this process owns."""
        return range(self.rank, num_shards, self.data_parallel_size)

    def owner(self, shard: int) -> int | None:
        """Return the index of the data device of this process that owns a shard, or None."""
        if shard % self.data_parallel_size != self.rank:
            return None
        return shard // self.data_parallel_size % len(self.data_devices)


def find_topology(strategy: Any) -> DataTopology:
    """Return the data topology of a strategy: what it declares, or one data device per process."""
    if strategy is None:
        cpu = torch.device("cpu")
        return DataTopology((cpu,), assemble_on=cpu)
    declared: DataTopology | None = getattr(strategy, "data_topology", None)
    return topology_of(strategy, (strategy.root_device,)) if declared is None else declared


def topology_of(strategy: Any, data_devices: tuple[torch.device, ...]) -> DataTopology:
    """Return the topology of a strategy whose batches are assembled on its root device."""
    rank, size = find_data_parallel_rank(strategy)
    return DataTopology(
        data_devices,
        rank,
        size,
        assemble_on=strategy.root_device,
        num_local_processes=count_local_processes(strategy),
        processes_per_device=getattr(strategy, "processes_per_device", 1),
    )


def find_data_parallel_rank(strategy: Any) -> tuple[int, int]:
    """Return the data-parallel rank and size of this process under any Lightning strategy."""
    sharding = getattr(strategy, "distributed_sampler_kwargs", None) or {}
    return sharding.get("rank", 0), sharding.get("num_replicas", 1)


def count_local_processes(strategy: Any) -> int:
    """Return the number of processes of a run on this machine, under any Lightning strategy."""
    return int(getattr(strategy, "num_processes", 1))


def compute_budgets(topology: DataTopology, fraction: float) -> dict[torch.device, int]:
    """Compute the bytes of each device, of those free now, that this process may use for shards."""
    sharing = {"cpu": topology.num_local_processes}
    return {
        device: int(measure_free_bytes(device) * fraction)
        // sharing.get(device.type, topology.processes_per_device)
        for device in dict.fromkeys((*topology.data_devices, torch.device("cpu")))
    }


def check_memory_fraction(fraction: float) -> float:
    """Check the fraction of free memory that shards may use."""
    number = check_number("memory_fraction", fraction)
    if not 0 < number <= 1:
        raise ValueError(f"memory_fraction={number}: must be above 0 and at most 1")
    return number


def measure_free_bytes(device: torch.device) -> int:
    """Return the free memory of a device in bytes, including what torch has cached."""
    if device.type == "cpu":
        return available_bytes()
    check_device(device)
    module = torch.get_device_module(device)
    if device.type == "mps":
        return int(module.recommended_max_memory() - module.driver_allocated_memory())
    if not hasattr(module, "mem_get_info"):
        raise ValueError(f"data device {device}: torch can't tell its free memory")
    # torch caches freed memory, such as the shards of the previous stage, for later allocations.
    cached = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0] + cached)


def check_device(device: torch.device) -> None:
    """Check that a device exists on this machine."""
    if device.type == "cpu":
        return
    try:
        count = int(torch.get_device_module(device).device_count())
    except RuntimeError:  # torch has no module of this type, as for "meta".
        count = 0
    if (device.index or 0) >= count:
        devices = ", ".join(["cpu", *(f"{device.type}:{index}" for index in range(count))])
        raise ValueError(f"device {device} does not exist here; choose one of {devices}")
