"""The data of a run: the store, the rows of each step, and what supplies them to a variant."""

from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader
from torch.utils.data import Sampler as TorchSampler
from typing_extensions import override

from lightning_memmap.compare.config import Variant
from lightning_memmap.compare.rows import (
    PlainCollate,
    PlainRows,
    expected_hashes,
    hash_batch,
    plain_samples,
)
from lightning_memmap.data.module import MemmapDataModule
from lightning_memmap.errors import with_article
from lightning_memmap.loading import has_streams
from lightning_memmap.loading.transform import DeviceTransform
from lightning_memmap.placement import DataTopology, data_parallel_rank, topology_of
from lightning_memmap.sampling import BatchSchedule, Sampler
from lightning_memmap.schema import read_forms
from lightning_memmap.store import Store

_CPU = torch.device("cpu")
_PROBE_ROWS = 8
#: Where a run builds stores of its own, in its folder.
STORES = "stores"


class MappedLoader:
    """A loader whose batches pass through a function."""

    def __init__(self, loader: Any, function: Callable[[Any], Any]) -> None:
        self._loader, self._function = loader, function

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return map(self._function, self._loader)

    def __getattr__(self, name: str) -> Any:
        # Lightning looks for the sampler, whose epoch it sets, and for the state.
        return getattr(self._loader, name)


class RowBatches(TorchSampler[list[int]]):
    """The dataset rows of each step of one of ``size`` processes, in the order of a sampler."""

    def __init__(self, order: Sampler, schedule: BatchSchedule, rank: int, size: int) -> None:
        self._order, self._schedule, self._rank, self._size = order, schedule, rank, size
        # Lightning looks for `batch_sampler.sampler.set_epoch`.
        self.sampler = self
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration has."""
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
    """The plain dataset of a `MemmapDataModule` through `torch.utils.data.DataLoader`."""

    def __init__(
        self, data: MemmapDataModule, global_batch: int, num_workers: int, transform_here: bool
    ) -> None:
        super().__init__()
        self._data, self._global_batch = data, global_batch
        self._num_workers, self._transform_here = num_workers, transform_here

    @override
    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        rank, size = data_parallel_rank(self.trainer.strategy)
        store = self._data.open_train_store()
        order = self._data.train_sampler(store, DataTopology((_CPU,), rank, size))
        schedule = BatchSchedule(
            order.num_positions, self._global_batch, order.num_shards, drop_last=True
        )
        transform, here = self._data.transform, self._transform_here
        rows: Any = PlainRows(plain_samples(self._data, store), store, order.pool.rows)
        forms = read_forms(self._data.variable)
        loader: DataLoader[Any] = DataLoader(
            rows,
            batch_sampler=RowBatches(order, schedule, rank, size),
            num_workers=self._num_workers,
            collate_fn=PlainCollate(store, order.pool.rows, forms, None if here else transform),
            persistent_workers=self._num_workers > 0,
            pin_memory=has_streams(self.trainer.strategy.root_device),
        )
        if here and transform is not None:
            on_cpu = DeviceTransform(transform, _CPU)
            return MappedLoader(loader, lambda batch: on_cpu(batch, 0))
        return loader


class _Replay:
    """Fetches the first batch of a loader, and yields it in every step."""

    def __init__(self, loader: Any, num_steps: int) -> None:
        self._loader, self._num_steps, self._batch = loader, num_steps, None

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Iterator[Any]:
        if self._batch is None:
            self._batch = next(iter(self._loader))
        return repeat(self._batch, self._num_steps)


class IdealData(L.LightningDataModule):
    """One batch of a `MemmapDataModule`, replayed in every step."""

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
    data: MemmapDataModule, variant: Variant, global_batch: int, out: str, *, transform_here: bool
) -> L.LightningDataModule:
    """The data module that the Trainer of a variant is given, as the variant's loader says."""
    if variant.loader == "first_epoch":
        if data.datasets["train"] is None:
            raise ValueError(f"{variant.name}: without a train_dataset there is nothing to build")
        return data.with_options(
            store_dir=Path(out) / STORES,
            num_shards=data.open_train_store().num_shards,
            num_workers=data.num_workers or 2,
            val_dataset=None,
            build="while_training",
        )
    if variant.loader.startswith("workers"):
        num_workers = int(variant.loader.removeprefix("workers"))
        return PlainData(data, global_batch, num_workers, transform_here)
    return IdealData(data) if variant.loader == "ideal" else data


def normalized_datamodule(data: Any) -> MemmapDataModule:
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
    """Rows of a step for each data device, before the Trainer has started any process."""
    try:
        count = topology_of(trainer.strategy).num_data_devices
    except RuntimeError:
        # A strategy with a mesh makes it later. In a comparison all devices are data parallel.
        count = devices
    if global_batch % count:
        raise ValueError(
            f"{count} data devices do not divide a global batch of {global_batch} rows: choose"
            " another batch_size or --devices"
        )
    return global_batch // count


def prepare_store(
    data: MemmapDataModule, devices: int, num_steps: int
) -> tuple[dict[str, Any], list[int]]:
    """Build the training store."""
    started_s = perf_counter()
    data.prepare_data()
    store_s = perf_counter() - started_s
    store = data.open_train_store()
    global_batch = data.batch_size * devices
    order = data.train_sampler(store)
    schedule = BatchSchedule(order.num_positions, global_batch, order.num_shards, drop_last=True)
    if not len(schedule):
        raise ValueError(
            f"batch_size={data.batch_size} on {devices} devices makes steps of {global_batch} rows,"
            f" and an epoch of the training split has {order.num_positions}: choose smaller ones"
        )
    return {
        "store_path": str(data.store_directory / "train"),
        "num_rows": store.num_rows,
        "num_shards": store.num_shards,
        "row_bytes": store.manifest.row_bytes,
        "num_bytes": store.manifest.num_bytes,
        "store_s": store_s,
        "steps_per_epoch": len(schedule),
        "batch_size": data.batch_size,
        "transform_is_random": _is_random(data, store, order),
        "has_eval_transform": data.eval_transform is not None,
    }, expected_hashes(store, order, schedule, num_steps, read_forms(data.variable))


def _is_random(data: MemmapDataModule, store: Store, order: Sampler) -> bool:
    """Whether two seeds make the training transform give two results for the same rows."""
    if data.transform is None:
        return False
    rows = PlainRows(plain_samples(data, store), store, order.pool.rows)
    probes = order.dataset_rows(0, range(min(_PROBE_ROWS, order.num_positions))).tolist()
    collate = PlainCollate(store, order.pool.rows, read_forms(data.variable), None)
    results = []
    for seed in (1, 2):
        transform = DeviceTransform(data.transform, _CPU)
        results.append(hash_batch(transform(collate([rows[row] for row in probes]), seed)))
    return results[0] != results[1]
