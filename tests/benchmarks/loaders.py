"""Loaders over stores, as the data module makes them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_memmap.loading import SuperBatchLoader, load_split
from lightning_memmap.placement import DataTopology, SplitSize, plan_placement
from lightning_memmap.sampling import Pool, Sampler, ShuffledSampler
from lightning_memmap.schema import Windows
from lightning_memmap.store import Store
from lightning_memmap.store.series import windowed


def make_loader(
    store: Store,
    devices: Sequence[torch.device],
    batch_size: int,
    residency: str,
    window: int | None = None,
    windows: Mapping[str, Windows] | None = None,
    **options: Any,
) -> SuperBatchLoader:
    """A shuffled loader, once its rows are where they belong.

    Args:
        store: The store.
        devices: The data devices.
        batch_size: Rows per data device and step.
        residency: Where the rows live, with memory for all of them.
        window: Rows of a shard that are shuffled together; all of them by default.
        windows: How fields are cut into windows, by name.
        **options: As for `SuperBatchLoader`.
    """
    topology = DataTopology(tuple(devices))

    def order(pool: Pool, rows: int) -> Sampler:
        is_whole = window is None and residency != "stream"
        return ShuffledSampler(pool, 0, None if is_whole else rows)

    chosen = windowed(store, store.rows(), windows or {})
    size = SplitSize.of("train", store.manifest, topology, chosen, window, order)
    placement = plan_placement(
        {"train": size},
        topology,
        residency,
        budget_bytes=dict.fromkeys((*devices, torch.device("cpu")), 2**60),
    )
    rows = load_split(store, topology, placement.splits["train"])
    options = {"collate": store.schema.builder(), **options}
    return SuperBatchLoader(rows, size.order, batch_size, **options)
