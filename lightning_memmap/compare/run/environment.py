"""Where a comparison runs."""

import importlib.metadata
import os
import platform
from pathlib import Path

import psutil
import torch

from lightning_memmap.compare.report.report import Device, Environment

_PACKAGES = (
    "lightning_memmap", "torch", "lightning", "tensordict", "torchmetrics", "numpy", "jsonargparse",
)  # fmt: skip


def describe_environment() -> Environment:
    """Describe this machine, and the versions of what is installed.

    Returns:
        The description. Memory is in bytes; the load is the average of the last minute.
    """
    return Environment(
        python=platform.python_version(),
        platform=platform.platform(),
        packages={name: _version(name) for name in _PACKAGES},
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        load_before=os.getloadavg()[0],
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        cuda=torch.version.cuda,
        devices=_devices(),
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _devices() -> tuple[Device, ...]:
    """The accelerators of this machine, where torch can describe them."""
    accelerator, module = torch.accelerator.current_accelerator(), torch.get_device_module()
    if accelerator is None or not hasattr(module, "get_device_properties"):
        return ()
    found = (module.get_device_properties(index) for index in range(module.device_count()))
    return tuple(Device(properties.name, properties.total_memory) for properties in found)
