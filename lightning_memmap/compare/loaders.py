"""The data of a run: the store, the rows of each step, and what supplies them to a variant."""

from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader
from torch.utils.data import Sampler as TorchSampler
from typing_extensions import override

from lightning_memmap.compare.rows import (
    PlainCollate,
    PlainRows,
    hash_batch,
    hash_rows,
    stored_leaves,
)
from lightning_memmap.compare.variants import Variant
from lightning_memmap.data.module import MemmapDataModule
from lightning_memmap.data.splits import named_datasets
from lightning_memmap.errors import with_article
from lightning_memmap.loading import has_streams
from lightning_memmap.loading.transform import DeviceTransform
from lightning_memmap.placement import DataTopology, data_parallel_rank, topology_of
from lightning_memmap.sampling import BatchSchedule, Sampler
from lightning_memmap.schema import Form, read_forms
from lightning_memmap.store import Store
from lightning_memmap.store.directory import is_store
from lightning_memmap.store.places import StoreUrl

_CPU = torch.device("cpu")
_PROBE_ROWS = 8


class MappedLoader:
    """A loader whose batches pass through a function.

    Args:
        loader: What gives the batches.
        function: Given a batch, returns the batch to yield.
    """

    def __init__(self, loader: Any, function: Callable[[Any], Any]) -> None:
        self._loader = loader
        self._function = function

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return map(self._function, self._loader)

    def __getattr__(self, name: str) -> Any:
        # Lightning looks for the sampler, whose epoch it sets, and for the state.
        return getattr(self._loader, name)


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


def normalized_datamodule(data: Any) -> MemmapDataModule:
    """Copy the data module of a config in a form that all variants can use.

    The copy drops incomplete steps, replaces no store, and has no test and prediction datasets.

    Args:
        data: The object that the config describes.

    Returns:
        The copy; the original stays as it is.

    Raises:
        ValueError: It is not a `MemmapDataModule`.
    """
    if not isinstance(data, MemmapDataModule):
        raise ValueError(
            f"config: data is {with_article(type(data).__name__)}; a comparison needs a"
            " MemmapDataModule, whose datasets and stores supply the rows of all variants"
        )
    # Steps of one size: in an uneven one, DDP weights processes equally, and not rows.
    copied = data.with_options(drop_last=True, overwrite=False)
    copied.datasets.update(test=None, predict=None)
    return copied


def batch_size_of(trainer: L.Trainer, global_batch: int, devices: int) -> int:
    """Return the rows of a step for each data device, before the Trainer has started any process.

    Args:
        trainer: The Trainer of a variant.
        global_batch: Rows of a step over all processes.
        devices: Devices of the comparison.

    Returns:
        Rows of a step for each data device, of which the comparison's global batch is made.

    Raises:
        ValueError: The number of data devices does not divide the global batch.
    """
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
    """Build the training store, and look at what is in it.

    Args:
        data: The data module.
        devices: Devices of the comparison.
        num_steps: Steps of a check run.

    Returns:
        The description of the data, and the hash of each global batch of a check run.

    Raises:
        ValueError: There are fewer rows than a step takes.
    """
    path = data.store_directory / "train"
    was_built = all(
        isinstance(data.store_directory, StoreUrl) or is_store(data.store_directory / split)
        for split, dataset in named_datasets("train", data.datasets["train"]).items()
        if dataset is not None
    )
    started_s = perf_counter()
    data.prepare_data()
    built_s = perf_counter() - started_s
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
        "data_class": f"{type(data).__module__}.{type(data).__qualname__}",
        "store_path": str(path),
        "num_rows": store.num_rows,
        "num_shards": store.num_shards,
        "row_bytes": store.manifest.row_bytes,
        "num_bytes": store.manifest.num_bytes,
        "fields": {field.name: str(field) for field in store.schema.fields},
        "store_s": None if was_built else built_s,
        "check_store_s": built_s if was_built else None,
        "steps_per_epoch": len(schedule),
        "batch_size": data.batch_size,
        "has_transform": data.transform is not None,
        "transform_is_random": _is_random(data, store, order),
        "has_eval_transform": data.eval_transform is not None,
    }, expected_hashes(store, order, schedule, num_steps, read_forms(data.variable))


def _is_random(data: MemmapDataModule, store: Store, order: Sampler) -> bool:
    """Whether two seeds make the training transform give two results for the same rows."""
    if data.transform is None:
        return False
    rows = PlainRows(data, store, order.pool.rows)
    probes = order.dataset_rows(0, range(min(_PROBE_ROWS, order.num_positions))).tolist()
    collate = PlainCollate(store, order.pool.rows, read_forms(data.variable), None)
    results = []
    for seed in (1, 2):
        transform = DeviceTransform(data.transform, _CPU)
        results.append(hash_batch(transform(collate([rows[row] for row in probes]), seed)))
    return results[0] != results[1]


def expected_hashes(
    store: Store,
    sampler: Sampler,
    schedule: BatchSchedule,
    num_steps: int,
    forms: Mapping[str, Form],
) -> list[int]:
    """Compute the hash of each global batch from the first epoch on.

    The rows are read from the store in the order of the sampler, without a loader: this is what
    every variant must match.

    Args:
        store: The training store.
        sampler: Its order.
        schedule: How an epoch is divided into steps.
        num_steps: Steps of a check run. If an epoch has fewer, further epochs follow.
        forms: How batches give fields, by name: encoded images are decoded.

    Returns:
        `hash_rows` of each step.
    """
    read = stored_leaves(store, sampler.pool.rows, forms)

    def expected(index: int) -> int:
        epoch, step = divmod(index, len(schedule))
        return hash_rows(read(sampler.dataset_rows(epoch, range(*schedule.bounds(step)))))

    return [expected(index) for index in range(num_steps)]
