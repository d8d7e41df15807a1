"""Placement: where each shard lives, and whether it fits.

topology  the data devices, how much memory shards may take, where batches are assembled
plan      which shard lives where, decided and as a table
"""

from lightning_memmap.placement.plan import (
    HeldShards,
    Placement,
    Residency,
    SplitPlacement,
    SplitSize,
    check_residency,
    divided,
    placement_table,
    plan_placement,
)
from lightning_memmap.placement.topology import (
    DataTopology,
    check_device,
    check_memory_fraction,
    data_parallel_rank,
    device_budgets,
    free_bytes,
    local_processes,
    topology_of,
)

__all__ = [
    "DataTopology",
    "HeldShards",
    "Placement",
    "Residency",
    "SplitPlacement",
    "SplitSize",
    "check_device",
    "check_memory_fraction",
    "check_residency",
    "data_parallel_rank",
    "device_budgets",
    "divided",
    "free_bytes",
    "local_processes",
    "placement_table",
    "plan_placement",
    "topology_of",
]
