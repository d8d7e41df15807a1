"""Loaders over stores, as the data module makes them."""

from collections.abc import Sequence
from typing import Any

import torch

from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.loading.split import load_split
from lightning_memmap.placement.plan import SplitShards, make_pool, plan_placement
from lightning_memmap.placement.topology import DataTopology
from lightning_memmap.sampling import ShuffledSampler
from lightning_memmap.sampling.schedule import default_block
from lightning_memmap.schema import Windows
from lightning_memmap.store import Store
from lightning_memmap.store.series import cut_into_windows


def make_loader(
    store: Store,
    devices: Sequence[torch.device],
    batch_size: int,
    residency: str,
    window: int | None = None,
    windows: Windows | None = None,
    **options: Any,
) -> SuperBatchLoader:
    """A shuffled loader, once its rows are where they belong.

    Args:
        store: The store.
        devices: The data devices.
        batch_size: Rows per data device and step.
        residency: Where the rows live, with memory for all of them.
        window: Rows of a shard that are shuffled together; all of them by default.
        windows: The windows that fields are cut into, if any.
        **options: As for `SuperBatchLoader`.
    """
    topology = DataTopology(tuple(devices))
    chosen = cut_into_windows(store, store.rows(), windows)
    pool = make_pool("train", chosen, store.num_shards, topology)
    if window is None and residency == "stream":
        row_bytes = store.manifest.row_bytes * store.num_rows / chosen.num_rows
        window = default_block(pool.num_shards, row_bytes)
    size = SplitShards.of(ShuffledSampler(pool, 0, window), store.manifest, topology)
    placement = plan_placement(
        {"train": size},
        topology,
        residency,
        budget_bytes=dict.fromkeys((*devices, torch.device("cpu")), 2**60),
    )
    rows = load_split(store, topology, placement.splits["train"])
    options = {"collate": store.schema.make_builder(), **options}
    return SuperBatchLoader(rows, topology, size.order, batch_size, **options)
