"""The loaders of a run: what supplies the rows of a variant."""

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader
from torch.utils.data import Sampler as TorchSampler
from typing_extensions import override

from lightning_memmap.compare.run.plain_rows import PlainCollate, PlainRows
from lightning_memmap.compare.run.rows import MappedLoader
from lightning_memmap.compare.run.variants import Variant
from lightning_memmap.data.module import MemmapDataModule
from lightning_memmap.loading import has_streams
from lightning_memmap.loading.transform import DeviceTransform
from lightning_memmap.placement import DataTopology, data_parallel_rank
from lightning_memmap.sampling import BatchSchedule, Sampler
from lightning_memmap.schema import read_forms

_CPU = torch.device("cpu")


class RowBatches(TorchSampler[list[int]]):
    """The dataset rows of each step of one process, in the order of a sampler.

    Args:
        order: The order of rows.
        schedule: How it is divided into steps.
        rank: Data-parallel rank of this process.
        size: Data-parallel processes.
    """

    def __init__(self, order: Sampler, schedule: BatchSchedule, rank: int, size: int) -> None:
        self._order = order
        self._schedule = schedule
        self._rank = rank
        self._size = size
        # Lightning looks for `batch_sampler.sampler.set_epoch`.
        self.sampler = self
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration has.

        Args:
            epoch: The epoch, counted from 0.
        """
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._schedule)

    @override
    def __iter__(self) -> Iterator[list[int]]:
        for step in range(len(self._schedule)):
            first, last = self._schedule.bounds(step)
            mine = range(first + (self._rank - first) % self._size, last, self._size)
            yield self._order.dataset_rows(self._epoch, mine).tolist()


class PlainData(L.LightningDataModule):
    """The plain dataset of a `MemmapDataModule` through `torch.utils.data.DataLoader`.

    It gives the same rows in the same order. The batch transform runs on the CPU, after
    ``default_collate``, in the worker processes where there are any. What ``default_collate`` does
    not take is converted as the store does it.

    Args:
        data: Whose dataset, store, transform and order are used; see `PlainRows`.
        global_batch: Rows of a step over all processes.
        num_workers: Worker processes of each training process.
        transform_here: Transform in the training process instead.
    """

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
        rank, size = data_parallel_rank(self.trainer.strategy)
        store = self._data.open_train_store()
        order = self._data.train_sampler(store, DataTopology((_CPU,), rank, size))
        schedule = BatchSchedule(
            order.num_positions, self._global_batch, order.num_shards, drop_last=True
        )
        transform = self._data.transform
        rows: Any = PlainRows(self._data, store, order.pool.rows)
        loader: DataLoader[Any] = DataLoader(
            rows,
            batch_sampler=RowBatches(order, schedule, rank, size),
            num_workers=self._num_workers,
            collate_fn=PlainCollate(
                store,
                order.pool.rows,
                read_forms(self._data.variable),
                None if self._transform_here else transform,
            ),
            persistent_workers=self._num_workers > 0,
            pin_memory=has_streams(self.trainer.strategy.root_device),
        )
        if self._transform_here and transform is not None:
            here = DeviceTransform(transform, _CPU)
            return MappedLoader(loader, lambda batch: here(batch, 0))
        return loader


class _Replay:
    """Fetches the first batch of a loader, and yields it in every step."""

    def __init__(self, loader: Any, num_steps: int) -> None:
        self._loader = loader
        self._num_steps = num_steps
        self._batch: Any = None

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Iterator[Any]:
        if self._batch is None:
            self._batch = next(iter(self._loader))
        for _ in range(self._num_steps):
            yield self._batch


class IdealData(L.LightningDataModule):
    """One batch of a `MemmapDataModule`, replayed in every step.

    It is fetched once and brought to where the strategy wants it. A model that changes its batch in
    place is given the changed one in the next step.

    Args:
        data: The data module whose first batch is used. This data module sets it up.
    """

    def __init__(self, data: MemmapDataModule) -> None:
        super().__init__()
        self._data = data

    @override
    def setup(self, stage: str) -> None:
        self._data.trainer = self.trainer
        self._data.setup(stage)

    @override
    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        loader = self._data.train_dataloader()
        # Now, not at the first step: whatever the strategy makes of a loader is done once.
        return _Replay(self.trainer.strategy.process_dataloader(loader), loader.num_steps)

    @override
    def teardown(self, stage: str) -> None:
        self._data.teardown(stage)


def loaded_data(
    data: MemmapDataModule, variant: Variant, global_batch: int, *, transform_here: bool
) -> L.LightningDataModule:
    """Make the data module that the Trainer of a variant is given.

    Args:
        data: The data module of the config, with the options of the run.
        variant: The variant.
        global_batch: Rows of a step over all processes.
        transform_here: Whether a ``DataLoader`` leaves the transform to the training process.

    Returns:
        `PlainData`, `IdealData`, or ``data`` itself, as the variant's loader says.
    """
    if variant.loader == "dataloader":
        return PlainData(data, global_batch, variant.num_workers, transform_here)
    return IdealData(data) if variant.loader == "ideal" else data
