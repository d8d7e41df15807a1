"""One run in a new process: ``python -m lightning_memmap.compare.worker SPEC``.

Under a strategy with several processes, each of them runs this file again.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
from torch import nn

from lightning_memmap.callbacks import StepSeeder
from lightning_memmap.compare.config import parse_variants
from lightning_memmap.compare.measure import CheckCallback, TimedCallback
from lightning_memmap.compare.parity import HashedTransform, hash_batch
from lightning_memmap.compare.prepare import RunCLI
from lightning_memmap.compare.run_files import RunSpec, write_error
from lightning_memmap.compare.variant_data import (
    MappedLoader,
    batch_size_of,
    comparable_datamodule,
    make_replayed,
    variant_datamodule,
)
from lightning_memmap.data.module import MemmapDataModule
from lightning_memmap.schema.forms import use_center_crops
from lightning_memmap.strategies.common.seeded_steps import SeededSteps

_DROPOUTS = tuple(getattr(nn, name) for name in nn.modules.dropout.__all__)


def main() -> None:
    """Run a variant, and write the records or the error into its folder."""
    spec = RunSpec.read(sys.argv[1])
    try:
        train(spec)
    except BaseException as error:
        write_error(Path(spec.out), error)
        raise


def all_trainer_options(spec: RunSpec) -> dict[str, Any]:
    """Return all options of the Trainer of a run."""
    return {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "max_epochs": -1,
        "max_steps": spec.warmup_steps + spec.steps,
        "default_root_dir": spec.out,
        **spec.trainer,
    }


def train(spec: RunSpec) -> None:
    """Train a variant and write the record of this process. Every rank runs it."""
    cli = RunCLI({**spec.config, "trainer": all_trainer_options(spec)})
    train_variant(spec, cli.trainer, cli.model, comparable_datamodule(cli.datamodule))


def train_variant(
    spec: RunSpec, trainer: Any, model: L.LightningModule, data: MemmapDataModule
) -> None:
    """Train and measure. The Trainer and the model are changed for this run."""
    (variant,) = parse_variants(spec.variant)
    # Every variant has the order of the comparison's number of devices.
    data = data.with_options(
        batch_size=batch_size_of(trainer, spec.global_batch, spec.devices),
        num_shards=spec.num_shards,
    )
    if variant.loader == "ideal":
        _map_loader(trainer.strategy, make_replayed)
    is_check = spec.kind == "check"
    hashes: list[int] = []
    if is_check:
        _turn_dropout_off(model)
        if not isinstance(trainer.strategy, SeededSteps):
            # The module then draws the same numbers as under our strategies.
            trainer.callbacks.append(StepSeeder())
        data = _record_hashes(spec, trainer, data, hashes)
    trained = variant_datamodule(
        data, variant, spec.global_batch, spec.out, transform_here=is_check
    )
    # A variant that builds its own store also has its own data module.
    datamodule_to_measure = trained if isinstance(trained, MemmapDataModule) else data
    trainer.callbacks.append(
        CheckCallback(spec, datamodule_to_measure, hashes)
        if is_check
        else TimedCallback(spec, trainer)
    )
    trainer.fit(model, datamodule=trained)


def _record_hashes(
    spec: RunSpec, trainer: Any, data: MemmapDataModule, hashes: list[int]
) -> MemmapDataModule:
    """Append the hash of each batch to a list, before the transform changes the batch."""
    # The hashes of the store's rows, which are read one by one, are of center crops.
    if data.decode:
        data = data.with_options(decode=use_center_crops(data.decode))
    if spec.transform_is_random:
        data = data.with_options(transform=data.eval_transform)
    if data.transform is not None:
        return data.with_options(transform=HashedTransform(data.transform, hashes))

    def record(batch: Any) -> Any:
        hashes.append(hash_batch(batch))
        return batch

    _map_loader(trainer.strategy, lambda loader: MappedLoader(loader, record))
    return data


def _turn_dropout_off(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0


def _map_loader(strategy: Any, function: Callable[[Any], Any]) -> None:
    """Apply a function to each loader that a strategy returns from ``process_dataloader``."""
    process = strategy.process_dataloader
    strategy.process_dataloader = lambda loader: function(process(loader))


if __name__ == "__main__":
    main()
