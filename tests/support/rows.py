"""Rows that tell their own index, and loaders over them, for one process or for several."""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_memmap.integers import Integers
from lightning_memmap.loading import row_file
from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.loading.row_file import RowFile
from lightning_memmap.loading.split import SplitRows, load_split, max_block_bytes
from lightning_memmap.loading.super_batch import SuperBatch
from lightning_memmap.loading.variable_batch import LayoutCollate
from lightning_memmap.placement.plan import (
    Residency,
    SplitShards,
    make_pool,
    plan_placement,
)
from lightning_memmap.placement.topology import DataTopology
from lightning_memmap.sampling import (
    Pool,
    Sampler,
    SamplerFactory,
    SequentialSampler,
    ShuffledSampler,
)
from lightning_memmap.sampling import factory as sampler_factory
from lightning_memmap.sampling.rows import Rows, Shards, StoreRows, WindowedRows
from lightning_memmap.sampling.schedule import Blocks, default_block
from lightning_memmap.schema import Decode, Windows
from lightning_memmap.store import Store
from lightning_memmap.store.series import cut_into_windows, make_fields
from tests.support.datasets import Made

CPU = torch.device("cpu")

Loader: TypeAlias = SuperBatchLoader


def at(sampler: Sampler, epoch: int, positions: range) -> tuple[Integers, Integers]:
    """The shard and the offset within it of the rows that supply positions."""
    shards = np.array(positions, np.int64) % sampler.num_shards
    return shards, sampler.locate(epoch, positions) - sampler.pool.starts[shards]


@dataclass(frozen=True)
class StridedRows:
    """Every ``count``-th row of a dataset from ``index`` on, or all rows but those."""

    index: int
    count: int
    excluded: bool = False

    def of(self, num_rows: int) -> Integers:
        """Their numbers in a dataset of so many rows."""
        return np.flatnonzero((np.arange(num_rows) % self.count == self.index) != self.excluded)

    def among(self, rows: StoreRows) -> StoreRows:
        """These of all rows of a store."""
        return StoreRows.of(rows.shards, self.of(rows.num_rows))


#: Some rows of a store, by their numbers.
Chosen: TypeAlias = StridedRows | Integers


def chosen_of(store: Store, subset: Chosen | None) -> Rows:
    """Some rows of a store; with None, all."""
    return store.rows(subset.of(store.num_rows) if isinstance(subset, StridedRows) else subset)


class NumberedRows(Made):
    """Row ``i`` holds ``i``, and a small image that is made of it.

    Args:
        num_rows: Rows.
        pad_bytes: What else is in a row. With much of it, few rows are taken at once.
    """

    def __init__(self, num_rows: int, pad_bytes: int = 0) -> None:
        super().__init__(num_rows)
        self.pad = torch.zeros(pad_bytes, dtype=torch.uint8)

    def sample(self, row: int) -> dict[str, Any]:
        sample = {"row": row, "image": image_of(torch.tensor(row))}
        return {**sample, "pad": self.pad} if len(self.pad) else sample


def image_of(rows: Tensor) -> Tensor:
    """The images of rows: uint8 of shape (*shape of rows, 1, 2, 3)."""
    pixels = rows[..., None, None, None] * 7 + torch.arange(6).view(1, 2, 3)
    return (pixels % 251).to(torch.uint8)


def size_of(
    store: Any,
    topology: DataTopology,
    rows: Rows | None = None,
    window: int | None = None,
    order: Callable[[Pool, int], Sampler] | None = None,
    measure: Callable[[Blocks, Sequence[int]], int] | None = None,
    split: str = "train",
) -> SplitShards:
    """The size of a split of a store, in dataset order unless it is said otherwise."""
    rows = StoreRows(Shards(store.num_rows, store.num_shards)) if rows is None else rows
    pool = make_pool(split, rows, store.num_shards, topology)
    stored = rows.series if isinstance(rows, WindowedRows) else rows
    row_bytes = store.row_bytes * stored.num_rows / rows.num_rows
    window = window or default_block(pool.num_shards, row_bytes)
    made = order(pool, window) if order else SequentialSampler(pool, shuffle_block=window)
    held = topology.shards_of_process(pool.num_shards)
    return SplitShards.of(made, store, topology, measure(Blocks(made), held) if measure else 0)


def cpus(count: int) -> DataTopology:
    """Several logical data devices on the CPU."""
    return DataTopology((CPU,) * count)


def make_split(
    store: Store,
    num_devices: int = 1,
    *,
    residency: str = "mmap",
    rank: int = 0,
    size: int = 1,
    window: int | None = None,
    subset: Chosen | None = None,
    decode: Mapping[str, Decode] | None = None,
) -> SplitRows:
    """The shards of one process on logical CPU devices."""
    topology = DataTopology((CPU,) * num_devices, rank, size)
    with warnings.catch_warnings():
        # Which device counts are warned of is a matter of test_placement.
        warnings.filterwarnings("ignore", "the train rows are in .* shards, which")
        rows = chosen_of(store, subset)
        size_of_split = size_of(store.manifest, topology, rows, window)
        placement = plan_placement(
            {"train": size_of_split},
            topology,
            residency,
            budget_bytes={CPU: 2**40},
        )
        return load_split(store, topology, placement.splits["train"], decode)


def split_with(
    store: Store,
    topology: DataTopology,
    residency: tuple[Residency | None, ...],
    subset: Chosen | None = None,
    window: int | None = None,
    decode: Mapping[str, Decode] | None = None,
) -> SplitRows:
    """The rows of a split of a store, whose shards live where it is said."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the train rows are in .* shards, which")
        rows = chosen_of(store, subset)
        size = size_of(store.manifest, topology, rows, window)
    return load_split(store, topology, replace(size, residencies=residency), decode)


def make_sampler(
    num_rows: int,
    num_shards: int,
    seed: int = 0,
    shuffle: bool = False,
    shuffle_block: int | None = None,
) -> Sampler:
    """The order that a data module has with these options."""
    return sampler_over(pool_of(num_rows, num_shards), seed, shuffle, shuffle_block)


def pool_of(num_rows: int, num_shards: int) -> Pool:
    """The rows of a store in as many shards as it has."""
    return Pool.of(StoreRows(Shards(num_rows, num_shards)), num_shards)


def sampler_over(
    pool: Pool, seed: int = 0, shuffle: bool = False, shuffle_block: int | None = None
) -> Sampler:
    """The order of a pool; see `make_sampler`."""
    if not shuffle:
        return SequentialSampler(pool, shuffle_block=shuffle_block)
    return ShuffledSampler(pool, seed, shuffle_block)


def make_loader(
    store: Store,
    num_devices: int = 1,
    batch_size: int = 4,
    *,
    residency: str = "mmap",
    rank: int = 0,
    size: int = 1,
    window: int | None = None,
    subset: Chosen | None = None,
    decode: Mapping[str, Decode] | None = None,
    **options: Any,
) -> SuperBatchLoader:
    """A loader of one process over logical CPU devices."""
    split = make_split(
        store,
        num_devices,
        residency=residency,
        rank=rank,
        size=size,
        window=window,
        subset=subset,
        decode=decode,
    )
    if residency == "stream" and window is None:
        window = default_block(split.pool.num_shards, store.manifest.row_bytes)
    topology = DataTopology((CPU,) * num_devices, rank, size)
    return loader_over(store, split, batch_size, topology, shuffle_block=window, **options)


def loader_over(
    store: Store,
    split: SplitRows,
    batch_size: int,
    topology: DataTopology | None = None,
    *,
    shuffle: bool = False,
    seed: int = 0,
    shuffle_block: int | None = None,
    **options: Any,
) -> SuperBatchLoader:
    """A loader over the rows of a split of a store; on one device where no topology is named."""
    topology = topology or DataTopology((CPU,))
    order = sampler_over(split.pool, seed, shuffle, shuffle_block)
    options = {"collate": store.schema.make_builder(), **options}
    return SuperBatchLoader(split, topology, order, batch_size, seed=seed, **options)


def assembled(
    loader: SuperBatchLoader,
    device: torch.device = CPU,
    prefetch: int = 0,
) -> SuperBatchLoader:
    """The batches of a loader, assembled on a device."""
    return loader.assembled(device, prefetch)


def noisy(batch: Any, generator: torch.Generator) -> Any:
    """A transform that adds random numbers to a batch, as ``noise``."""
    return {**batch, "noise": torch.rand(len(batch["row"]), generator=generator)}


def rows_of(batch: Any) -> list[int]:
    """The rows in a batch, once their images are seen to be theirs."""
    assert torch.equal(batch["image"], image_of(batch["row"]))
    rows: list[int] = batch["row"].tolist()
    return rows


def step_rows(batch: Any) -> list[int]:
    """The rows of a step, in the order of the assembled batch."""
    return rows_of(batch.to(CPU) if isinstance(batch, SuperBatch) else batch)


def epoch_rows(loader: Loader) -> list[list[int]]:
    """The rows of each step that is left of an epoch."""
    return [step_rows(batch) for batch in loader]


def rows_in(loader: Iterable[Any]) -> list[int]:
    """The field ``row`` of all batches, one after the other."""
    return joined(batch["row"].tolist() for batch in loader)


def joined(steps: Iterable[list[int]]) -> list[int]:
    """The rows of all steps, one after the other."""
    return list(chain.from_iterable(steps))


def order_rows(sampler: Sampler, epoch: int, first: int, last: int) -> list[int]:
    """The rows that the positions ``first .. last - 1`` of an epoch stand for."""
    rows: list[int] = sampler.dataset_rows(epoch, range(first, last)).tolist()
    return rows


def assert_gives_all_rows(
    loader: Loader, dataset: Any, check: Callable[[Any, list[Any]], None]
) -> None:
    """Each step has its rows of the order: a check of an assembled batch against samples."""
    rows = order_rows(loader.order, 0, 0, loader.order.num_positions)
    for step in loader:
        check(step.to("cpu"), [dataset[row] for row in rows[: len(step)]])
        del rows[: len(step)]
    assert not rows


def take_steps(loader: Loader, count: int) -> Iterator[Any]:
    """The first steps of an epoch, which is then left as it is."""
    steps = iter(loader)
    for _ in range(count):
        yield next(steps)


def check_save_and_resume(
    make: Callable[[], Loader],
    epoch: int,
    resumed: Callable[[], Loader] | None = None,
) -> None:
    """Save after every step of an epoch, and see that a fresh loader goes on with the next row.

    Args:
        make: Makes the loader that is saved.
        epoch: The epoch in which it is saved.
        resumed: Makes the loader that goes on, of another shape than the one saved. Its steps
            are then cut otherwise, and only the order of rows must be the same.
    """
    saved = make()
    saved.set_epoch(epoch)
    whole, states = [], []
    for batch in saved:
        whole.append(step_rows(batch))
        states.append(saved.state_dict())
    saved.set_epoch(epoch + 1)
    following = sorted(joined(epoch_rows(saved)))
    for count, state in enumerate(states, 1):
        loader = (resumed or make)()
        loader.load_state_dict(state)
        loader.set_epoch(epoch)
        num_steps = len(loader)
        left = epoch_rows(loader)
        assert joined(left) == joined(whole[count:])
        assert num_steps == count + len(left)
        if resumed is None:
            assert left == whole[count:]
        # The epoch after a resumed one is whole again.
        loader.set_epoch(epoch + 1)
        assert sorted(joined(epoch_rows(loader))) == following
    # So is the one after an epoch that was left, which is saved as inside of it.
    left_at = len(whole) // 2 + 1
    saved = make()
    saved.set_epoch(epoch)
    for _ in take_steps(saved, left_at):
        pass
    assert saved.state_dict() == states[left_at - 1]
    saved.set_epoch(epoch + 1)
    assert sorted(joined(epoch_rows(saved))) == following


def read_in_blocks(monkeypatch: pytest.MonkeyPatch, block_bytes: int, read_bytes: int) -> None:
    """Have windows read from a disk of some blocks, in short reads.

    Args:
        monkeypatch: Undoes it.
        block_bytes: Bytes of a block of the disk; with 1, there are no direct reads.
        read_bytes: The most bytes that are read at once.
    """

    monkeypatch.setattr(row_file, "_READ_BYTES", read_bytes)
    monkeypatch.setattr(RowFile, "_find_block_bytes", lambda *_: block_bytes)
    if block_bytes == 1:
        monkeypatch.delattr(os, "O_DIRECT")


def make_window_loader(
    store: Store,
    windows: Windows | None,
    num_devices: int = 1,
    batch_size: int = 12,
    *,
    shuffle: bool = True,
    rank: int = 0,
    size: int = 1,
    residency: str = "mmap",
    subset: Chosen | None = None,
    factory: SamplerFactory | None = None,
    window: int | None = None,
    memory: int = 2**40,
    **options: Any,
) -> SuperBatchLoader:
    """A loader of one process over windows, on logical data devices."""

    def order(pool: Pool, rows: int) -> Sampler:
        is_whole = window is None and residency != "stream"
        if factory is not None:
            pool = replace(pool, global_batch=batch_size * topology.num_global_data_devices)
            fields = make_fields(store, pool.rows)
            return sampler_factory.make_sampler(
                factory, pool, 5, fields, None if is_whole else rows
            )
        block = None if is_whole else rows
        if not shuffle:
            return SequentialSampler(pool, shuffle_block=block)
        return ShuffledSampler(pool, 5, block)

    topology = DataTopology((CPU,) * num_devices, rank, size)
    chosen = cut_into_windows(store, chosen_of(store, subset), windows)
    measure = partial(max_block_bytes, store) if residency == "stream" else None
    sized = size_of(store.manifest, topology, chosen, window, order, measure)
    placement = plan_placement({"train": sized}, topology, residency, budget_bytes={CPU: memory})
    rows = load_split(store, topology, placement.splits["train"])
    schema = store.schema
    if windows is not None:
        schema = schema.windowed(windows.fields, windows.length)
    return SuperBatchLoader(
        rows,
        topology,
        sized.order,
        batch_size,
        collate=LayoutCollate(schema),
        seed=5,
        **options,
    )
