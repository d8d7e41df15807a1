"""Rows that tell their own index, and loaders over them, for one process or for several."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_memmap.loading import (
    DeviceLoader,
    ResidentSplit,
    SuperBatch,
    SuperBatchLoader,
    load_split,
)
from lightning_memmap.placement import DataTopology, plan_placement
from lightning_memmap.sampling import RowSubset, Stream
from lightning_memmap.store import Store

CPU = torch.device("cpu")

Loader: TypeAlias = SuperBatchLoader | DeviceLoader


class NumberedRows(Dataset[dict[str, Any]]):
    """Row ``i`` holds ``i``, and a small image that is made of it.

    Args:
        num_rows: Rows.
        pad_bytes: What else is in a row. With much of it, few rows are taken at once.
    """

    def __init__(self, num_rows: int, pad_bytes: int = 0) -> None:
        self.num_rows = num_rows
        self.pad = torch.zeros(pad_bytes, dtype=torch.uint8)

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.num_rows:
            raise IndexError(index)
        sample = {"row": index, "image": image_of(torch.tensor(index))}
        return {**sample, "pad": self.pad} if len(self.pad) else sample


def image_of(rows: Tensor) -> Tensor:
    """The images of rows: uint8 of shape (*shape of rows, 1, 2, 3)."""
    pixels = rows[..., None, None, None] * 7 + torch.arange(6).view(1, 2, 3)
    return (pixels % 251).to(torch.uint8)


def make_split(
    store: Store,
    num_devices: int = 1,
    *,
    residency: str = "mmap",
    rank: int = 0,
    size: int = 1,
    window: int | None = None,
    subset: RowSubset | None = None,
) -> ResidentSplit:
    """The shards of one process on logical CPU devices."""
    topology = DataTopology((CPU,) * num_devices, rank, size)
    with warnings.catch_warnings():
        # Which device counts are warned of is a matter of test_placement.
        warnings.filterwarnings("ignore", "the train store has .* shards, which")
        # Nor how much is read for rows that lie apart.
        warnings.filterwarnings("ignore", "residency='stream': .* bytes of the train store")
        placement = plan_placement(
            {"train": Part(store, subset)},
            topology,
            residency,
            budget_bytes={CPU: 2**40},
            pinned_budget_bytes=0,
            window=window,
        )
        return load_split(store, topology, placement.splits["train"], subset)


class Part:
    """What a plan needs to know of some rows of a store, or of all."""

    def __init__(self, store: Store, subset: RowSubset | None) -> None:
        self.num_rows = store.num_rows if subset is None else subset.num_rows(store.num_rows)
        self.num_shards = store.num_shards
        self.row_bytes = store.manifest.row_bytes


def make_loader(
    store: Store,
    num_devices: int = 1,
    batch_size: int = 4,
    *,
    residency: str = "mmap",
    rank: int = 0,
    size: int = 1,
    window: int | None = None,
    subset: RowSubset | None = None,
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
    )
    if options.get("shuffle"):
        options.setdefault("shuffle_window", window)
    return SuperBatchLoader(split, batch_size, build=store.schema.builder(), **options)


def rows_of(batch: Any) -> list[int]:
    """The rows in a batch, once their images are seen to be theirs."""
    assert torch.equal(batch["image"], image_of(batch["row"]))
    rows: list[int] = batch["row"].tolist()
    return rows


def epoch_rows(loader: Loader) -> list[list[int]]:
    """The rows of each step that is left of an epoch, in the order of the assembled batch."""
    return [rows_of(batch.to(CPU) if isinstance(batch, SuperBatch) else batch) for batch in loader]


def joined(steps: Iterable[list[int]]) -> list[int]:
    """The rows of all steps, one after the other."""
    return list(chain.from_iterable(steps))


def stream_rows(stream: Stream, epoch: int, first: int, last: int) -> list[int]:
    """The rows that the positions ``first .. last - 1`` of an epoch stand for."""
    shards, offsets = stream.at(epoch, range(first, last))
    rows: list[int] = (np.asarray(offsets) * stream.num_shards + shards).tolist()
    return rows


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
            are then cut otherwise, and only the stream of rows must be the same.
    """
    saved = make()
    saved.set_epoch(epoch)
    whole = epoch_rows(saved)
    for count in range(1, len(whole) + 1):
        saved = make()
        saved.set_epoch(epoch)
        for _ in take_steps(saved, count):
            pass
        loader = (resumed or make)()
        loader.load_state_dict(saved.state_dict())
        loader.set_epoch(epoch)
        num_steps = len(loader)
        left = epoch_rows(loader)
        assert joined(left) == joined(whole[count:])
        assert num_steps == count + len(left)
        if resumed is None:
            assert left == whole[count:]
        # The epoch after a resumed one is whole again.
        loader.set_epoch(epoch + 1)
        saved.set_epoch(epoch + 1)
        assert sorted(joined(epoch_rows(loader))) == sorted(joined(epoch_rows(saved)))
