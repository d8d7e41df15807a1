"""What all runs of a comparison share: the objects of the config, the store, and the machine."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import psutil
import torch
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch.cli import LightningCLI
from torch import nn
from typing_extensions import override

from lightning_memmap.arguments import TrainingParser, first_reason
from lightning_memmap.compare.loaders import normalized_datamodule, prepare_store

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


class ModelAndData(RunCLI):
    """The model and the data module of a config, without a Trainer."""

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Any:
        return None


def prepare(config: dict[str, Any], devices: int, num_steps: int) -> dict[str, Any]:
    """Build the store, and describe the machine, the data, the model and the steps of a check."""
    environment = describe_environment()
    # A seed would be set here, in a process that trains nothing.
    cli = ModelAndData({key: value for key, value in config.items() if key != "seed_everything"})
    data, expected = prepare_store(normalized_datamodule(cli.datamodule), devices, num_steps)
    model, parameters = cli.model, list(cli.model.parameters())
    return {
        "environment": environment,
        "data": data,
        "model": {
            "model_class": f"{type(model).__module__}.{type(model).__qualname__}",
            "num_parameters": sum(parameter.numel() for parameter in parameters),
            "batch_norms": sorted(
                {type(each).__name__ for each in model.modules() if isinstance(each, _BATCH_NORMS)}
            ),
        },
        "expected": expected,
    }


def describe_environment() -> dict[str, Any]:
    """Describe this machine, and the versions of what is installed."""
    cpus = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in cpus if line.startswith("model name")]
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
        "devices": [],
    }


def describe_devices() -> list[dict[str, Any]]:
    """Describe the accelerators, of which this may take memory: not before the last run."""
    module = torch.get_device_module()
    has_devices = hasattr(module, "get_device_properties")
    count = torch.accelerator.device_count() if has_devices else 0
    devices = [module.get_device_properties(index) for index in range(count)]
    return [{"name": each.name, "memory_bytes": each.total_memory} for each in devices]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
