"""One run in a fresh process: ``python -m lightning_memmap.compare.worker SPEC PARENT``.

Under a strategy with several processes, each of them runs this file again.
"""

import importlib.metadata
import json
import os
import platform
import sys
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import Any

import lightning as L
import psutil
import torch
from jsonargparse import ArgumentError, ArgumentParser
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from typing_extensions import override

from lightning_memmap.arguments import TrainingParser, first_reason
from lightning_memmap.compare.config import RunSpec, parse_variants
from lightning_memmap.compare.loaders import (
    MappedLoader,
    batch_size_of,
    loaded_data,
    normalized_datamodule,
    prepare_store,
)
from lightning_memmap.compare.measure import CheckCallback, RunCallback, StepClock, TimedCallback
from lightning_memmap.compare.rows import HashedTransform, hash_batch
from lightning_memmap.data.module import MemmapDataModule
from lightning_memmap.errors import MemmapError

#: Errors by which a strategy, a store or the Trainer says that it cannot do what it is asked for.
REFUSALS = (MemmapError, ValueError, ModuleNotFoundError, MisconfigurationException)
_DROPOUTS = tuple(getattr(nn, name) for name in nn.modules.dropout.__all__)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


_PACKAGES = (
    "lightning_memmap", "torch", "lightning", "tensordict", "torchmetrics", "numpy", "jsonargparse",
)  # fmt: skip


class RunCLI(LightningCLI):
    """A LightningCLI that is given its config as a dict and runs nothing itself."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(
            args=config,
            run=False,
            save_config_callback=None,
            seed_everything_default=False,
            # No checkpoint is written.
            load_from_checkpoint_support=False,
            parser_class=TrainingParser,
            parser_kwargs={"exit_on_error": False},
        )

    @override
    def parse_arguments(self, parser: Any, args: Any) -> None:
        # Lightning's own would warn that this process has arguments too.
        assert isinstance(parser, ArgumentParser)
        try:
            self.config = parser.parse_object(args)
        except ArgumentError as error:
            raise ValueError(f"config: {first_reason(str(error))}") from error


class ConfigCheck(RunCLI):
    """Parses the config of a run as the run will, without making anything."""

    def __init__(self, spec: RunSpec) -> None:
        # A seed would be set here, in a process that trains nothing.
        config = {key: value for key, value in spec.config.items() if key != "seed_everything"}
        super().__init__({**config, "trainer": trainer_options(spec)})

    @override
    def instantiate_classes(self) -> None:
        """Leave that to the run."""


def main() -> None:
    """Do the run, and write what came out, or what went wrong, into its folder."""
    path, parent = Path(sys.argv[1]), int(sys.argv[2])
    while not path.exists():  # It was started ahead, by a process that may have ended.
        if not psutil.pid_exists(parent):
            return
        sleep(0.01)
    spec = RunSpec.read(path)
    try:
        prepare(spec) if spec.kind == "prepare" else train(spec)
    except BaseException as error:
        write_error(Path(spec.out), error)
        raise


def write_error(out: Path, error: BaseException) -> None:
    """Say why a run failed, unless another of its processes has done so."""
    refused = isinstance(error, REFUSALS) and not (out / "progress").exists()
    found = {"message": f"{type(error).__name__}: {error}", "refused": refused}
    mine = out / f"error-{os.getpid()}.json"
    mine.write_text(json.dumps(found), encoding="utf-8")
    with suppress(FileExistsError):
        os.link(mine, out / "error.json")
    mine.unlink()


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
        "max_steps": spec.total_steps,
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
    data = data.with_options(batch_size=batch_size)
    is_check = spec.kind == "check"
    callback: RunCallback
    if is_check:
        _turn_dropout_off(model)
        _ask_for_all_fields(model)
        if spec.transform_is_random and data.eval_transform is not None:
            data = data.with_options(transform=data.eval_transform)
        hashes: list[int] = []
        if data.transform is None:
            _hash_batches(trainer.strategy, hashes)
        else:
            data = data.with_options(transform=HashedTransform(data.transform, hashes))
        callback = CheckCallback(spec, data, hashes)
    else:
        trainer.profiler = clock = StepClock(trainer.strategy.root_device)
        callback = TimedCallback(spec, data, clock)
    trainer.callbacks.append(callback)
    loaded = loaded_data(data, variant, spec.global_batch, transform_here=is_check)
    trainer.fit(model, datamodule=loaded)


def _turn_dropout_off(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, _DROPOUTS):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0


def _ask_for_all_fields(model: L.LightningModule) -> None:
    """Every process notes whole rows, also those that hold only some fields otherwise."""
    for name in ("input_fields", "loss_fields"):
        if getattr(model, name, None) is not None:
            setattr(model, name, None)


def _hash_batches(strategy: Any, hashes: list[int]) -> None:
    """Record the hash of each batch as the loader of a strategy gives it."""
    process = strategy.process_dataloader

    def note(batch: Any) -> Any:
        hashes.append(hash_batch(batch))
        return batch

    strategy.process_dataloader = lambda loader: MappedLoader(process(loader), note)


def prepare(spec: RunSpec) -> None:
    """Build the store, and write the facts about model and data that all variants need."""
    cli = RunCLI({**spec.config, "trainer": trainer_options(spec)})
    data, expected = prepare_store(normalized_datamodule(cli.datamodule), spec.devices, spec.steps)
    model, parameters = cli.model, list(cli.model.parameters())
    facts = {
        "environment": describe_environment(),
        "data": data,
        "model": {
            "model_class": f"{type(model).__module__}.{type(model).__qualname__}",
            "configures_itself": is_overridden("configure_model", model, L.LightningModule),
            "num_parameters": sum(parameter.numel() for parameter in parameters),
            "parameter_bytes": sum(parameter.nbytes for parameter in parameters),
            "batch_norms": sorted(
                {type(each).__name__ for each in model.modules() if isinstance(each, _BATCH_NORMS)}
            ),
        },
        "expected": expected,
    }
    (Path(spec.out) / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def describe_environment() -> dict[str, Any]:
    """Describe this machine, and the versions of what is installed."""
    cpus = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in cpus if line.startswith("model name")]
    module = torch.get_device_module()
    has_devices = hasattr(module, "get_device_properties")
    count = torch.accelerator.device_count() if has_devices else 0
    devices = [module.get_device_properties(index) for index in range(count)]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "processor": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "load_before": os.getloadavg()[0],
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "cuda": torch.version.cuda,
        "devices": [{"name": d.name, "memory_bytes": d.total_memory} for d in devices],
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
