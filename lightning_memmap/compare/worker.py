"""One run in a fresh process: ``python -m lightning_memmap.compare.worker SPEC``.

Under a strategy with several processes, each of them runs this file again.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_memmap.compare.config import RunSpec, parse_variants
from lightning_memmap.compare.loaders import (
    MappedLoader,
    batch_size_of,
    loaded_data,
    normalized_datamodule,
    replayed,
)
from lightning_memmap.compare.measure import HAS_TRAINED, IS_READY, CheckCallback, TimedCallback
from lightning_memmap.compare.parity import HashedTransform, hash_batch
from lightning_memmap.compare.prepare import RunCLI
from lightning_memmap.data.module import MemmapDataModule
from lightning_memmap.errors import MemmapError

#: Errors by which a strategy, a store or the Trainer says that it cannot do what it is asked for.
REFUSALS = (MemmapError, ValueError, TypeError, ModuleNotFoundError, MisconfigurationException)
_DROPOUTS = tuple(getattr(nn, name) for name in nn.modules.dropout.__all__)


def main() -> None:
    """Do the run, and write what came out, or what went wrong, into its folder."""
    spec = RunSpec.read(sys.argv[1])
    wait_for_parent(Path(spec.out) / IS_READY)
    try:
        train(spec)
    except BaseException as error:
        write_error(Path(spec.out), error)
        raise


def wait_for_parent(ready: Path) -> None:
    """In the first process of a run, say that it has imported all, and wait to be told to go on."""
    if ready.exists():
        return
    ready.touch()
    if not sys.stdin.read():
        sys.exit("the comparison has ended")


def write_error(out: Path, error: BaseException) -> None:
    """Say why this process failed. Of several, the parent believes the first."""
    refused = isinstance(error, REFUSALS) and not (out / HAS_TRAINED).exists()
    found = {"message": f"{type(error).__name__}: {error}", "refused": refused}
    (out / f"error-{os.getpid()}.json").write_text(json.dumps(found), encoding="utf-8")


def trainer_options(spec: RunSpec) -> dict[str, Any]:
    """All options of the Trainer of a run."""
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
    """Train a variant and write what each process measured. Every rank runs it."""
    cli = RunCLI({**spec.config, "trainer": trainer_options(spec)})
    train_variant(spec, cli.trainer, cli.model, normalized_datamodule(cli.datamodule))


def train_variant(
    spec: RunSpec, trainer: Any, model: L.LightningModule, data: MemmapDataModule
) -> None:
    """Train and measure with the objects of the config, which are changed for this run."""
    (variant,) = parse_variants(spec.variant)
    batch_size = batch_size_of(trainer, spec.global_batch, spec.devices)
    # Of any number of devices, all have the order of that of the comparison.
    data = data.with_options(batch_size=batch_size, num_shards=spec.num_shards)
    is_check = spec.kind == "check"
    if variant.loader == "ideal":
        _map_loader(trainer.strategy, replayed)
    hashes = list[int]()
    if is_check:
        _turn_dropout_off(model)
        if spec.transform_is_random:
            data = data.with_options(transform=data.eval_transform)
        if data.transform is None:

            def noted(batch: Any) -> Any:
                hashes.append(hash_batch(batch))
                return batch

            _map_loader(trainer.strategy, lambda loader: MappedLoader(loader, noted))
        else:
            data = data.with_options(transform=HashedTransform(data.transform, hashes))
    loaded = loaded_data(data, variant, spec.global_batch, spec.out, transform_here=is_check)
    # A run that builds a store of its own has a data module of its own, too.
    used = loaded if isinstance(loaded, MemmapDataModule) else data
    trainer.callbacks.append(
        CheckCallback(spec, used, hashes) if is_check else TimedCallback(spec, used, trainer)
    )
    trainer.fit(model, datamodule=loaded)


def _turn_dropout_off(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0


def _map_loader(strategy: Any, function: Callable[[Any], Any]) -> None:
    """Have a function change whatever a strategy makes of a loader."""
    process = strategy.process_dataloader
    strategy.process_dataloader = lambda loader: function(process(loader))


if __name__ == "__main__":
    main()
