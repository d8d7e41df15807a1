"""Loaders over stores, as the data module makes them."""

from collections.abc import Sequence
from typing import Any

import torch

from lightning_memmap.loading import SuperBatchLoader, load_split
from lightning_memmap.placement import DataTopology, SplitSize, plan_placement
from lightning_memmap.sampling import BlockShuffledSampler, Sampler, ShuffledSampler
from lightning_memmap.store import Store


def make_loader(
    store: Store,
    devices: Sequence[torch.device],
    batch_size: int,
    residency: str,
    window: int | None = None,
    **options: Any,
) -> SuperBatchLoader:
    """A shuffled loader, once its rows are where they belong.

    Args:
        store: The store.
        devices: The data devices.
        batch_size: Rows per data device and step.
        residency: Where the rows live, with memory for all of them.
        window: Rows of a shard that are shuffled together; all of them by default.
        **options: As for `SuperBatchLoader`.
    """
    topology = DataTopology(tuple(devices))
    size = SplitSize.of("train", store.manifest, topology, window=window)
    placement = plan_placement(
        {"train": size},
        topology,
        residency,
        budget_bytes=dict.fromkeys((*devices, torch.device("cpu")), 2**60),
    )
    rows = load_split(store, topology, placement.splits["train"])
    order: Sampler = ShuffledSampler(rows.shards)
    if window is not None or residency == "stream":
        order = BlockShuffledSampler(rows.shards, 0, size.window)
    options = {"collate": store.schema.builder(), **options}
    return SuperBatchLoader(rows, order, batch_size, **options)
