"""The loaders of a variant: the store, a ``DataLoader``, or one batch replayed."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, default_collate
from torch.utils.data import Sampler as TorchSampler
from typing_extensions import override

from lightning_memmap.compare.config import Variant
from lightning_memmap.data.module import MemmapDataModule
from lightning_memmap.data.splits import has_several
from lightning_memmap.errors import with_article
from lightning_memmap.integers import strided
from lightning_memmap.loading.device_streams import has_streams
from lightning_memmap.loading.row_random import RowRandom
from lightning_memmap.loading.super_batch import Collate
from lightning_memmap.loading.transform import DeviceTransform
from lightning_memmap.loading.variable_batch import LayoutCollate
from lightning_memmap.loading.variable_rows import VariableRows, make_variable_rows
from lightning_memmap.placement.topology import DataTopology, find_data_parallel_rank, find_topology
from lightning_memmap.sampling.rows import Rows, WindowedRows
from lightning_memmap.sampling.sampler import Sampler
from lightning_memmap.sampling.schedule import BatchSchedule
from lightning_memmap.schema.fields import Field
from lightning_memmap.schema.forms import Decode, Layout
from lightning_memmap.store import Store
from lightning_memmap.store.sources.iterable import is_iterable_only

CPU = torch.device("cpu")
#: Folder, in the folder of a run, of stores that the run builds itself.
STORES = "stores"


class StoredRows:
    """The rows of an order one by one, read from the store: the values of their fields."""

    def __init__(self, store: Store, rows: Rows) -> None:
        self._store = store
        self._windows = rows if isinstance(rows, WindowedRows) else None

    def __getitem__(self, row: int) -> list[Tensor]:
        store = self._store
        windows = self._windows
        if windows is None:
            return store.read_row(row)
        series, first = (int(indices[0]) for indices in windows.find(np.array([row])))
        steps = slice(first * windows.stride, first * windows.stride + windows.length)
        return [
            values[steps] if field.name in windows.fields else values
            for field, values in zip(store.schema.fields, store.read_row(series), strict=True)
        ]


def plain_rows(data: MemmapDataModule, store: Store, rows: Rows) -> Any:
    """Return the training dataset; for windows and datasets without indices, `StoredRows`."""
    train = data.datasets["train"]
    datasets = [*train.values()] if has_several(train) else [train]
    has_no_indices = any(dataset is None or is_iterable_only(dataset) for dataset in datasets)
    if isinstance(rows, WindowedRows) or has_no_indices:
        return StoredRows(store, rows)
    return ConcatDataset(datasets) if has_several(train) else train


class PlainCollate:
    """Collates like ``default_collate``, and applies the batch transform if there is one."""

    def __init__(
        self,
        store: Store,
        rows: Rows,
        layout: Mapping[str, Layout] | None,
        decode: Mapping[str, Decode] | None,
        *,
        stored: bool,
        transform: Callable[..., Any] | None = None,
    ) -> None:
        self._schema = store.schema
        if isinstance(rows, WindowedRows):
            self._schema = self._schema.windowed(rows.fields, rows.length)
        self._layout = layout
        self._decode = decode
        self._stored = stored
        self._is_plain = not stored and not any(f.num_variable for f in self._schema.fields)
        self._build: Collate | None = None
        self._transform = None if transform is None else DeviceTransform(transform, CPU)

    def __call__(self, rows: list[Any]) -> Any:
        """Make a batch, on the CPU, of samples or of items of `StoredRows`."""
        batch = self._collate(rows)
        if self._transform is None:
            return batch
        seed = int(torch.randint(2**62, ()))
        # A worker process does not know which rows these are.
        return self._transform(batch, seed, RowRandom(range(len(rows)), seed=seed))

    def _collate(self, rows: list[Any]) -> Any:
        if self._build is None and self._is_plain:
            with suppress(TypeError):
                return default_collate(rows)
        if self._build is None:
            # Only now, from a sample that a worker has read: reading one before the workers are
            # forked would make them share the files that it opens.
            sample = None if self._stored else rows[0]
            self._build = LayoutCollate(self._schema, self._layout, self._decode, sample)
        leaves = rows if self._stored else map(self._schema.flatten, rows)
        columns = zip(self._schema.fields, zip(*leaves, strict=True), strict=True)
        return self._build([_stack(field, column) for field, column in columns])


def _stack(field: Field, rows: tuple[Any, ...]) -> Tensor | VariableRows:
    if field.num_variable:
        tensors = (row if isinstance(row, Tensor) else torch.from_numpy(row.copy()) for row in rows)
        return make_variable_rows(field, list(tensors))
    if isinstance(rows[0], Tensor):
        return torch.stack(rows)
    return torch.from_numpy(np.stack(rows))


class MappedLoader:
    """A loader whose batches pass through a function, with items of further iterators."""

    def __init__(
        self, loader: Any, function: Callable[..., Any], *iterators: Callable[[], Iterator[Any]]
    ) -> None:
        self._loader = loader
        self._function = function
        self._iterators = iterators

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return map(self._function, self._loader, *(make() for make in self._iterators))

    def __getattr__(self, name: str) -> Any:
        # Lightning looks for the sampler, whose epoch it sets, and for the state.
        return getattr(self._loader, name)


class RowBatches(TorchSampler[list[int]]):
    """The dataset rows of each step of one of ``size`` processes, in the order of a sampler."""

    def __init__(self, order: Sampler, schedule: BatchSchedule, rank: int, size: int) -> None:
        self._order = order
        self._schedule = schedule
        self._rank = rank
        self._size = size
        # Lightning looks for `batch_sampler.sampler.set_epoch`.
        self.sampler = self
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._schedule)

    @override
    def __iter__(self) -> Iterator[list[int]]:
        for positions in self._positions():
            yield self._order.dataset_rows(self._epoch, positions).tolist()

    def randoms(self, seed: int) -> Iterator[RowRandom]:
        """Yield the random numbers of the rows of each step, as a `SuperBatchLoader` draws them."""
        for positions in self._positions():
            yield RowRandom.at(self._order, self._epoch, positions, seed)

    def _positions(self) -> Iterator[range]:
        for step in range(len(self._schedule)):
            yield strided(*self._schedule.bounds(step), self._rank, self._size)


class PlainData(L.LightningDataModule):
    """The plain dataset of a `MemmapDataModule` through `torch.utils.data.DataLoader`."""

    def __init__(
        self, data: MemmapDataModule, global_batch: int, num_workers: int, transform_here: bool
    ) -> None:
        super().__init__()
        self._data = data
        self._global_batch = global_batch
        self._num_workers = num_workers
        self._transform_here = transform_here

    @override
    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        rank, size = find_data_parallel_rank(self.trainer.strategy)
        store = self._data.open_train_store()
        order = self._data.make_train_order(store, DataTopology((CPU,), rank, size))
        schedule = BatchSchedule(
            order.num_positions, self._global_batch, order.num_shards, drop_last=True
        )
        transform = self._data.transform
        here = self._transform_here
        rows = plain_rows(self._data, store, order.pool.rows)
        collate = PlainCollate(
            store,
            order.pool.rows,
            self._data.layout,
            self._data.decode,
            stored=isinstance(rows, StoredRows),
            transform=None if here else transform,
        )
        batches = RowBatches(order, schedule, rank, size)
        loader: DataLoader[Any] = DataLoader(
            rows,
            batch_sampler=batches,
            num_workers=self._num_workers,
            collate_fn=collate,
            persistent_workers=self._num_workers > 0,
            pin_memory=has_streams(self.trainer.strategy.root_device),
        )
        if here and transform is not None:
            on_cpu = DeviceTransform(transform, CPU)
            return MappedLoader(
                loader,
                lambda batch, random: on_cpu(batch, 0, random),
                partial(batches.randoms, self._data.seed),
            )
        return loader


def make_replayed(loader: Any) -> MappedLoader:
    """Make a loader that yields the first batch of another one in every step."""
    first = cache(lambda: next(iter(loader)))
    return MappedLoader(range(len(loader)), lambda _: first())


def variant_datamodule(
    data: MemmapDataModule, variant: Variant, global_batch: int, out: str, *, transform_here: bool
) -> L.LightningDataModule:
    """Make the data module of a variant, according to the variant's loader."""
    data.read_training_loaders()
    if variant.loader == "first_epoch":
        if data.datasets["train"] is None:
            raise ValueError(f"{variant.name}: train_dataset=None: there is nothing to build")
        as_stored = data.with_options(num_shards=None)
        built = as_stored.make_train_order(as_stored.open_train_store()).num_shards
        if built != data.num_shards:
            raise ValueError(
                f"{variant.name}: a store that is built while training has {built} shards. Choose"
                " --devices that divide them"
            )
        return data.with_options(
            store_dir=Path(out) / STORES,
            num_workers=data.num_workers or 2,
            val_dataset=None,
            build="while_training",
        )
    if variant.loader.startswith("workers"):
        num_workers = int(variant.loader.removeprefix("workers"))
        return PlainData(data, global_batch, num_workers, transform_here)
    return data


def comparable_datamodule(data: Any) -> MemmapDataModule:
    """Copy the data module of a config in a form that all variants can use."""
    if not isinstance(data, MemmapDataModule):
        raise ValueError(
            f"config: data is {with_article(type(data).__name__)}; a comparison needs a"
            " MemmapDataModule, whose datasets and stores supply the rows of all variants"
        )
    # Steps of one size: in an uneven one, DDP weights processes equally, and not rows.
    return data.with_options(
        drop_last=True, overwrite=False, test_dataset=None, predict_dataset=None, build="first"
    )


def batch_size_of(trainer: L.Trainer, global_batch: int, devices: int) -> int:
    """Compute the rows per data device and step, before the Trainer has started any process."""
    try:
        num_devices = find_topology(trainer.strategy).num_global_data_devices
    except RuntimeError:
        # A strategy with a mesh makes it later. In a comparison all devices are data parallel.
        num_devices = devices
    return global_batch // num_devices
