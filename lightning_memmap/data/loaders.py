"""Makes the loader of a split that is set up."""

from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from lightning_memmap._compat.progress import TrainerProgress
from lightning_memmap.data.options import DataOptions
from lightning_memmap.data.set_up import SetUp
from lightning_memmap.data.split_stores import SplitStores
from lightning_memmap.loading.batches import BatchLoader
from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.loading.packed_batch import PackedCollate
from lightning_memmap.loading.split import SplitRows
from lightning_memmap.loading.step_weight import make_item_counter
from lightning_memmap.loading.super_batch import Collate
from lightning_memmap.loading.variable_batch import LayoutCollate
from lightning_memmap.placement.topology import find_data_parallel_rank
from lightning_memmap.sampling.packed_sampler import PackedSampler
from lightning_memmap.sampling.sampler import Sampler
from lightning_memmap.sampling.schedule import SkippedSteps, steps_to_skip
from lightning_memmap.schema.forms import read_declared
from lightning_memmap.store.samples import read_first_sample
from lightning_memmap.store.series import make_fields
from lightning_memmap.store.sources.iterable import is_iterable_only, is_read_once, iterate_samples


def make_loader(
    split: str,
    set_up: SetUp,
    stores: SplitStores,
    trainer: L.Trainer | None,
    strategy: Any,
    *,
    skipped: SkippedSteps,
    renew_rows: Callable[[], SplitRows | None],
) -> SuperBatchLoader | BatchLoader:
    """Make the loader of a split.

    Args:
        split: The split, whose rows are set up.
        set_up: The set-up.
        stores: The stores with the present options, some of which may differ from the set-up's.
        trainer: The Trainer, or None for a loader that is iterated over without one.
        strategy: The strategy of the Trainer, or of a Fabric; None without both.
        skipped: The steps that the run has skipped so far.
        renew_rows: Returns the rows for the next epoch, for stores that are still being built.
    """
    options = stores.options
    topology = set_up.placement.topology
    is_training = split == "train"
    is_overfitting = set_up.planner.is_overfitting
    order = set_up.placement.splits[split].order
    training_options: dict[str, Any] = {}
    if is_training:
        if is_overfitting and options.sampler is not None and not isinstance(order, PackedSampler):
            rank_zero_warn(
                "overfit_batches: rows are read in dataset order, and sampler= is ignored: to"
                " train on some rows in the sampler's order, use limit_train_batches or subset="
                " instead"
            )
        order = set_up.make_order(options)
        training_options = _counting_options(order, set_up, options, trainer, strategy)
        training_options["drop_last"] = options.drop_last
        training_options["trainer_progress"] = None if trainer is None else TrainerProgress(trainer)
        if not is_overfitting:
            training_options["skip_steps"] = steps_to_skip(options.skip_steps)
            training_options["skipped"] = skipped
    if trainer is not None:
        for column in order.epoch_columns:
            column.check_trainer(trainer)
    is_growing = any(store.pending is not None for store in set_up.stores.values())
    loader = SuperBatchLoader(
        set_up.rows[split],
        topology,
        order,
        options.batch_size_of(split),
        collate=_make_collate(split, set_up, stores),
        transform=options.transform if is_training else options.eval_transform,
        seed=options.seed,
        prefetch=options.prefetch,
        renew_rows=renew_rows if is_growing else None,
        **training_options,
    )
    if trainer is None:
        return BatchLoader(loader, topology.assemble_on or loader.data_devices[0])
    if is_growing and is_training:
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # Set in __init__.
        if not any(isinstance(callback, _ShowStored) for callback in callbacks):
            callbacks.append(_ShowStored())
    if not is_overfitting:
        loader.dataset = loader.batch_sizes
    return loader.on_device_of(topology)


def _counting_options(
    order: Sampler, set_up: SetUp, options: DataOptions, trainer: L.Trainer | None, strategy: Any
) -> dict[str, Any]:
    """Return the arguments of a loader that count the items of the loss; none if they are rows."""
    weight = options.weight
    if weight is None:
        return {"count_items": order.num_targets} if isinstance(order, PackedSampler) else {}
    is_weighting = hasattr(strategy, "add_training_loader")
    if trainer is not None and not is_weighting:
        num_processes = find_data_parallel_rank(strategy)[1]
        if num_processes > 1 or trainer.accumulate_grad_batches > 1:
            raise ValueError(
                f"weight={weight!r} under {type(strategy).__name__}: Lightning's own strategies"
                " average the losses of processes and micro-batches evenly: use"
                " memmap_superbatch_ddp, memmap_fsdp2 or another strategy of this package"
            )
    if isinstance(weight, str):
        fields = make_fields(set_up.stores["train"], order.pool.rows)
        return {"count_items": make_item_counter(weight, order, fields)}
    # Only strategies of this package and a Fabric weight losses.
    is_needed = is_weighting or (trainer is None and strategy is not None)
    return {"count_in_batch": weight} if is_needed else {}


def _make_collate(split: str, set_up: SetUp, stores: SplitStores) -> Collate:
    """Make the function that builds batches of a split, and check its schema."""
    # The options of the set-up, for which its rows were loaded.
    options = set_up.options
    dataset = stores.datasets[stores.parts(stores.stored_split(split))[0]]
    schema = set_up.stores[split].schema
    schema.check_declared(read_declared(options.variable, options.nullable))
    if options.windows is not None:
        schema = schema.windowed(options.windows.fields, options.windows.length)
    sample = _read_class_sample(dataset, stores.options.num_workers) if schema.has_classes else None
    order = set_up.placement.splits[split].order
    if isinstance(order, PackedSampler):
        lengths = set_up.stores[split].lengths
        return PackedCollate(
            schema, order, options.layout, lengths, sample, options.with_row_numbers
        )
    return LayoutCollate(schema, options.layout, options.decode, sample, options.with_row_numbers)


def _read_class_sample(dataset: Any, num_workers: int) -> Any:
    """Read the first sample for its classes; return None if it cannot be read again."""
    if dataset is None or is_read_once(dataset):
        return None
    if is_iterable_only(dataset):
        return next(iterate_samples(dataset))
    return read_first_sample(dataset, num_workers)


class _ShowStored(L.Callback):
    """Shows in the Trainer's progress bar which fraction of the training rows is stored."""

    @override
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        store = getattr(trainer.datamodule, "stores", {}).get("train")  # type: ignore[attr-defined]
        if store is not None and store.pending is not None:
            trainer.progress_bar_metrics["stored"] = store.pending.progress

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.progress_bar_metrics.pop("stored", None)
