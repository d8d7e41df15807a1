"""Prepares what all runs share: the objects of the config, the store and its rows."""

import os
import platform
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn
from typing_extensions import override

from lightning_memmap.arguments import training_parser
from lightning_memmap.compare.parity import hash_batch
from lightning_memmap.compare.variant_data import (
    CPU,
    PlainCollate,
    StoredRows,
    comparable_datamodule,
)
from lightning_memmap.data.module import MemmapDataModule
from lightning_memmap.loading.row_random import RowRandom
from lightning_memmap.loading.transform import BatchTransform, DeviceTransform
from lightning_memmap.placement.topology import DataTopology
from lightning_memmap.sampling.sampler import Sampler
from lightning_memmap.sampling.schedule import BatchSchedule
from lightning_memmap.schema.forms import Decode, Layout
from lightning_memmap.store import Store

_PROBE_ROWS = 8
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_PACKAGES = (
    "lightning_memmap", "torch", "lightning", "tensordict", "torchmetrics", "numpy", "jsonargparse",
)  # fmt: skip


class RunCLI(LightningCLI):
    """A LightningCLI that takes its config as a dict and runs no subcommand."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(
            args=config,
            run=False,
            save_config_callback=None,
            seed_everything_default=False,
            parser_kwargs={"exit_on_error": False},
        )

    @override
    def init_parser(self, **kwargs: Any) -> Any:
        return training_parser(**kwargs)

    @override
    def parse_arguments(self, parser: Any, args: Any) -> None:
        # Lightning's own would warn that this process has arguments too.
        # A copy: values of dicts and lists are parsed in place.
        self.config = parser.parse_config(deepcopy(args))


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
    data, expected = prepare_store(comparable_datamodule(cli.datamodule), devices, num_steps)
    norms = {
        type(module).__name__ for module in cli.model.modules() if isinstance(module, _BATCH_NORMS)
    }
    model = {
        "model_class": f"{type(cli.model).__module__}.{type(cli.model).__qualname__}",
        "num_parameters": sum(parameter.numel() for parameter in cli.model.parameters()),
        "batch_norms": sorted(norms),
    }
    return {"environment": environment, "data": data, "model": model, "expected": expected}


def prepare_store(
    data: MemmapDataModule, devices: int, num_steps: int
) -> tuple[dict[str, Any], list[int]]:
    """Build the training store. Return its description, and the hash of each global batch."""
    started_s = perf_counter()
    data.prepare_data()
    store_s = perf_counter() - started_s
    store = data.open_train_store()
    global_batch = data.batch_size * devices
    order = data.make_train_order(store, DataTopology((CPU,) * devices))
    schedule = BatchSchedule(order.num_positions, global_batch, order.num_shards, drop_last=True)
    if not len(schedule):
        raise ValueError(
            f"batch_size={data.batch_size} on {devices} devices needs {global_batch} rows per"
            f" step, and an epoch has {order.num_positions} training rows. Choose smaller ones"
        )
    read = stored_batches(store, order, data.layout, data.decode)
    probes = range(min(_PROBE_ROWS, order.num_positions))
    steps = (divmod(index, len(schedule)) for index in range(num_steps))
    return {
        "store_path": str(data.store_directory / "train"),
        "num_rows": store.num_rows,
        "num_shards": order.num_shards,
        "row_bytes": store.manifest.row_bytes,
        "num_bytes": store.manifest.num_bytes,
        "store_s": store_s,
        "steps_per_epoch": len(schedule),
        "batch_size": data.batch_size,
        "transform_is_random": _is_random(data.transform, partial(read, 0, probes), len(probes)),
    }, [hash_batch(read(epoch, range(*schedule.bounds(step)))) for epoch, step in steps]


def _is_random(transform: BatchTransform | None, read: Callable[[], Any], num_rows: int) -> bool:
    """Check whether a transform returns different results for two seeds and the same rows."""
    if transform is None:
        return False
    on_cpu = DeviceTransform(transform, CPU)
    random = RowRandom(range(num_rows))
    return len({hash_batch(on_cpu(read(), seed, random)) for seed in (1, 2)}) > 1


def stored_batches(
    store: Store,
    order: Sampler,
    layout: Mapping[str, Layout] | None,
    decode: Mapping[str, Decode] | None,
) -> Callable[[int, range], Any]:
    """Make a function that reads rows at positions of an epoch from a store, one by one."""
    rows = StoredRows(store, order.pool.rows)
    collate = PlainCollate(store, order.pool.rows, layout, decode, stored=True)
    return lambda epoch, positions: collate(
        [rows[row] for row in order.dataset_rows(epoch, positions).tolist()]
    )


def describe_environment() -> dict[str, Any]:
    """Describe this machine, and the versions of what is installed."""
    cpus = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in cpus if line.startswith("model name")]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {
            package.name: package.version
            for package in distributions()
            if package.name in _PACKAGES
        },
        "processor": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "load_before": os.getloadavg()[0],
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "cuda": torch.version.cuda,
        "devices": [],
    }


def describe_devices() -> list[dict[str, Any]]:
    """Describe the accelerators. This may allocate memory on them: call it after the last run."""
    module = torch.get_device_module()
    has_devices = hasattr(module, "get_device_properties")
    count = torch.accelerator.device_count() if has_devices else 0
    devices = [module.get_device_properties(index) for index in range(count)]
    return [{"name": device.name, "memory_bytes": device.total_memory} for device in devices]
