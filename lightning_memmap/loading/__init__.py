"""From resident shards to super-batches: take, transform, zip, assemble."""

from lightning_memmap.loading.batches import BatchLoader
from lightning_memmap.loading.loader import DeviceLoader, SuperBatchLoader
from lightning_memmap.loading.shard import ResidentShards, ResidentSplit, load_split
from lightning_memmap.loading.streams import has_streams
from lightning_memmap.loading.super_batch import SuperBatch
from lightning_memmap.loading.transform import OnSuperBatch

__all__ = [
    "BatchLoader",
    "DeviceLoader",
    "OnSuperBatch",
    "ResidentShards",
    "ResidentSplit",
    "SuperBatch",
    "SuperBatchLoader",
    "has_streams",
    "load_split",
]
