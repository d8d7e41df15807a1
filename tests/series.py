"""Series that tell where each of their steps is, and the windows over them, made one by one."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from lightning_memmap.loading import SuperBatchLoader, load_split
from lightning_memmap.loading.split import largest_window_bytes
from lightning_memmap.loading.variable_batch import FormedCollate
from lightning_memmap.placement import DataTopology, SplitSize, plan_placement
from lightning_memmap.sampling import (
    Pool,
    RowSubset,
    Sampler,
    SamplerFactory,
    SequentialSampler,
    ShuffledSampler,
)
from lightning_memmap.sampling.factory import made_sampler
from lightning_memmap.schema import Windows
from lightning_memmap.store import Store
from lightning_memmap.store.series import fields_of, windowed

CPU = torch.device("cpu")
#: A step of series ``i`` is this many times ``i``, and its number within the series.
BASE = 1000


class Series(Dataset[dict[str, Any]]):
    """Series of numbers and of times, each with a number and a name.

    Args:
        lengths: Steps of each series.
    """

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> dict[str, Any]:
        steps = np.arange(self.lengths[row])
        return {
            "value": (row * BASE + steps).astype(np.int32),
            "row": row,
            "time": np.stack([steps, -steps], axis=1).astype(np.float32),
            "name": f"series {row}",
        }


def all_windows(lengths: list[int], length: int, stride: int) -> list[tuple[int, int]]:
    """The series and the first step of each window, in dataset order."""
    return [
        (row, step)
        for row, steps in enumerate(lengths)
        for step in range(0, steps - length + 1, stride)
    ]


def windows_in(batch: Any, length: int) -> list[tuple[int, int]]:
    """The windows in a batch of `Series`, once each of their fields is seen to be right."""
    found = []
    for value, time, row, name in zip(
        batch["value"].tolist(), batch["time"].tolist(), batch["row"], batch["name"], strict=True
    ):
        series, step = divmod(value[0], BASE)
        assert value == [value[0] + index for index in range(length)]
        assert time == [[step + index, -step - index] for index in range(length)]
        assert (int(row), name) == (series, f"series {series}")
        found.append((series, step))
    return found


def make_loader(
    store: Store,
    windows: Windows,
    num_devices: int = 1,
    batch_size: int = 12,
    *,
    shuffle: bool = True,
    rank: int = 0,
    size: int = 1,
    residency: str = "mmap",
    subset: RowSubset | None = None,
    factory: SamplerFactory | None = None,
    fields: tuple[str, ...] = ("value", "time"),
    window: int | None = None,
    memory: int = 2**40,
    **options: Any,
) -> SuperBatchLoader:
    """A loader of one process over windows, on logical data devices."""

    def order(pool: Pool, rows: int) -> Sampler:
        is_whole = window is None and residency != "stream"
        if factory is not None:
            fields = fields_of(store, pool.rows)
            return made_sampler(factory, pool, 5, fields, None if is_whole else rows)
        if not shuffle:
            return SequentialSampler(pool)
        return ShuffledSampler(pool, 5, None if is_whole else rows)

    forms: Any = dict.fromkeys(fields, windows)
    topology = DataTopology((CPU,) * num_devices, rank, size)
    chosen = windowed(store, store.rows(subset), forms)
    measure = partial(largest_window_bytes, store) if residency == "stream" else None
    sized = SplitSize.of("train", store.manifest, topology, chosen, window, order, measure)
    placement = plan_placement({"train": sized}, topology, residency, budget_bytes={CPU: memory})
    rows = load_split(store, topology, placement.splits["train"])
    return SuperBatchLoader(
        rows,
        order(Pool.of(sized.pool.rows, sized.pool.num_shards), sized.window),
        batch_size,
        collate=FormedCollate(store.schema, forms),
        seed=5,
        **options,
    )
