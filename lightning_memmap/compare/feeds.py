"""Feeds that are not the `MemmapDataModule` itself: a plain DataLoader, and a batch replayed."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data import Sampler as TorchSampler
from typing_extensions import override

from lightning_memmap.compare.arms import Feed
from lightning_memmap.datamodule import MemmapDataModule
from lightning_memmap.loading.transform import DeviceTransform
from lightning_memmap.placement import DataTopology, data_parallel_rank
from lightning_memmap.sampling import BatchSchedule, Sampler
from lightning_memmap.schema import Schema
from lightning_memmap.store import open_store

_CPU = torch.device("cpu")


class RowBatches(TorchSampler[list[int]]):
    """The dataset rows of each step of one process, in the order of `lightning_memmap.sampling`.

    Args:
        order: The order of rows.
        plan: How it is cut into steps.
        rank: Data-parallel rank of this process.
        size: Data-parallel processes.
    """

    def __init__(self, order: Sampler, plan: BatchSchedule, rank: int, size: int) -> None:
        self.order = order
        self.plan = plan
        self.rank = rank
        self.size = size
        # Lightning looks for `batch_sampler.sampler.set_epoch`.
        self.sampler = self
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration has."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self.plan)

    @override
    def __iter__(self) -> Iterator[list[int]]:
        for step in range(len(self.plan)):
            first, last = self.plan.bounds(step)
            mine = range(first + (self.rank - first) % self.size, last, self.size)
            yield self.order.dataset_rows(self._epoch, mine).tolist()


class _Collate:
    """``default_collate``, and then the batch transform, where a worker process does both.

    Samples that ``default_collate`` does not take, such as PIL images and dataclasses, become the
    tensors that the store has of them.
    """

    def __init__(self, schema: Schema, transform: Callable[..., Any] | None) -> None:
        self._schema = schema
        self._build: Callable[[Sequence[Tensor]], Any] | None = None
        self._transform = None if transform is None else DeviceTransform(transform, _CPU)

    def __call__(self, samples: list[Any]) -> Any:
        batch = self._collate(samples)
        if self._transform is None:
            return batch
        return self._transform(batch, int(torch.randint(2**62, ())))

    def _collate(self, samples: list[Any]) -> Any:
        if self._build is None:
            try:
                return default_collate(samples)
            except TypeError:
                # Found out here, where a sample is at hand: to read one before the workers are
                # forked would have them share the files that it opens.
                self._build = self._schema.builder(samples[0])
        columns = zip(*map(self._schema.flatten, samples), strict=True)
        return self._build([_stack(column) for column in columns])


def _stack(rows: tuple[Any, ...]) -> Tensor:
    if isinstance(rows[0], Tensor):
        return torch.stack(rows)
    return torch.from_numpy(np.stack(rows))


class _Transformed:
    """A loader whose batches are transformed in this process, where the transform can note them."""

    def __init__(self, loader: DataLoader[Any], transform: Callable[..., Any]) -> None:
        self.batch_sampler = loader.batch_sampler
        self._loader = loader
        self._collate = DeviceTransform(transform, _CPU)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield self._collate(batch, 0)


class PlainData(L.LightningDataModule):
    """The plain dataset of a `MemmapDataModule` through `torch.utils.data.DataLoader`.

    It gives the same rows in the same order. The batch transform runs on the CPU, after
    ``default_collate``, in the worker processes where there are any. What ``default_collate`` does
    not take is converted as the store does it.

    Args:
        data: Whose dataset, store, transform, order and batch size are used. Without a dataset,
            its store is read as one.
        global_batch: Rows of a step over all processes.
        num_workers: Worker processes of each training process.
        transform_here: Transform in the training process instead.
    """

    def __init__(
        self,
        data: MemmapDataModule,
        global_batch: int,
        num_workers: int,
        transform_here: bool = False,
    ) -> None:
        super().__init__()
        self.data = data
        self.global_batch = global_batch
        self.num_workers = num_workers
        self.transform_here = transform_here

    @override
    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        rank, size = data_parallel_rank(self.trainer.strategy)
        store = open_store(self.data.store_dir / "train")
        sampler = self.data.train_sampler(store.manifest, DataTopology((_CPU,), rank, size))
        plan = BatchSchedule(
            sampler.num_positions, self.global_batch, sampler.num_shards, drop_last=True
        )
        dataset: Dataset[Any] | None = self.data.datasets["train"]
        transform = self.data.transform
        loader: DataLoader[Any] = DataLoader(
            dataset if dataset is not None else store,  # type: ignore[arg-type]  # is map-style
            batch_sampler=RowBatches(sampler, plan, rank, size),
            num_workers=self.num_workers,
            collate_fn=_Collate(store.schema, None if self.transform_here else transform),
            persistent_workers=self.num_workers > 0,
            pin_memory=self.trainer.strategy.root_device.type == "cuda",
        )
        if self.transform_here and transform is not None:
            return _Transformed(loader, transform)
        return loader


class _Replay:
    """Takes the first batch of a loader, and gives it in every step."""

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
    """One batch of a `MemmapDataModule`, taken once, brought to where the strategy wants it, and
    replayed in every step.

    A model that changes its batch in place is given the changed one in the next step.

    Args:
        data: Whose first batch is taken.
    """

    def __init__(self, data: MemmapDataModule) -> None:
        super().__init__()
        self.data = data

    @override
    def setup(self, stage: str) -> None:
        self.data.trainer = self.trainer
        self.data.setup(stage)

    @override
    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        loader = self.data.train_dataloader()
        # Now, not at the first step: whatever the strategy makes of a loader is done once.
        return _Replay(self.trainer.strategy.process_dataloader(loader), loader.num_steps)

    @override
    def teardown(self, stage: str) -> None:
        self.data.teardown(stage)


def feed_data(
    data: MemmapDataModule, feed: Feed, global_batch: int, *, transform_here: bool
) -> L.LightningDataModule:
    """The data module of an arm.

    Args:
        data: The one of the config.
        feed: Where the arm's batches come from.
        global_batch: Rows of a step over all processes.
        transform_here: Whether a ``DataLoader`` leaves the transform to the training process.
    """
    if feed.kind == "dataloader":
        return PlainData(data, global_batch, feed.num_workers, transform_here)
    return IdealData(data) if feed.kind == "ideal" else data
