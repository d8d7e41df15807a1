"""What a comparison finds out about its data beforehand: the store, and the rows of each step."""

from collections.abc import Mapping
from time import perf_counter
from typing import Any

import lightning as L
import torch

from lightning_memmap.compare.report.report import Data
from lightning_memmap.compare.run.plain_rows import PlainCollate, PlainRows, stored_leaves
from lightning_memmap.compare.run.rows import hash_batch, hash_rows
from lightning_memmap.data.module import MemmapDataModule
from lightning_memmap.data.splits import named_datasets
from lightning_memmap.errors import with_article
from lightning_memmap.loading.transform import DeviceTransform
from lightning_memmap.placement import topology_of
from lightning_memmap.sampling import BatchSchedule, Sampler
from lightning_memmap.schema import Form, read_forms
from lightning_memmap.store import Store
from lightning_memmap.store.directory import is_store
from lightning_memmap.store.places import StoreUrl

_CPU = torch.device("cpu")
_PROBE_ROWS = 8


def comparable(data: Any) -> MemmapDataModule:
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
) -> tuple[Data, tuple[int, ...]]:
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
    return Data(
        data_class=f"{type(data).__module__}.{type(data).__qualname__}",
        store_path=str(path),
        num_rows=store.num_rows,
        num_shards=store.num_shards,
        row_bytes=store.manifest.row_bytes,
        num_bytes=store.manifest.num_bytes,
        fields={field.name: str(field) for field in store.schema.fields},
        store_s=None if was_built else built_s,
        check_store_s=built_s if was_built else None,
        steps_per_epoch=len(schedule),
        batch_size=data.batch_size,
        has_transform=data.transform is not None,
        transform_is_random=_is_random(data, store, order),
        has_eval_transform=data.eval_transform is not None,
    ), expected_hashes(store, order, schedule, num_steps, read_forms(data.variable))


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
) -> tuple[int, ...]:
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

    return tuple(map(expected, range(num_steps)))
