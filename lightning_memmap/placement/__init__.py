"""Placement: where each shard lives, and whether it fits.

topology  the data devices, and where batches are assembled
budgets   how much memory shards may take
plan      which shard lives where
table     the plan for people
"""

from lightning_memmap.placement.budgets import (
    check_device,
    check_memory_fraction,
    device_budgets,
    free_bytes,
)
from lightning_memmap.placement.plan import (
    HeldShards,
    Placement,
    Residency,
    SplitPlacement,
    SplitSize,
    check_residency,
    plan_placement,
)
from lightning_memmap.placement.table import placement_table
from lightning_memmap.placement.topology import (
    DataTopology,
    data_parallel_rank,
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
    "free_bytes",
    "local_processes",
    "placement_table",
    "plan_placement",
    "topology_of",
]
