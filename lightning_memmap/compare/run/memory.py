"""Memory of processes, devices, the model and the data."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import psutil
import torch

from lightning_memmap._compat.tensors import dense_parts, storage_key
from lightning_memmap.callbacks.memory_trace import live_parameters, optimizer_tensors
from lightning_memmap.compare.report.records import DevicePeak, ModelBytes, ProcessMemory
from lightning_memmap.placement import Placement


def process_memory() -> tuple[ProcessMemory, ...]:
    """Measure the memory of this process and of all its descendants.

    Returns:
        This process first; without those that have just ended or may not be looked into.
    """
    me = psutil.Process()
    found = []
    for process in (me, *me.children(recursive=True)):
        try:
            memory = process.memory_full_info()
            found.append(
                ProcessMemory(process.pid, process.ppid(), memory.rss, getattr(memory, "uss", None))
            )
        except psutil.Error:  # It has just ended, or may not be looked into.
            continue
    return tuple(found)


def _counting_module() -> Any:
    """torch's module of the accelerator, where it counts memory and this process uses it."""
    module = torch.get_device_module()
    # Asking for the figures of a device must not make a context on it.
    return module if hasattr(module, "memory_reserved") and module.is_initialized() else None


def reset_device_peaks() -> None:
    """Forget the peaks of all accelerators that this process has used."""
    module = _counting_module()
    if module is not None:
        for index in range(module.device_count()):
            module.reset_peak_memory_stats(index)


def device_peaks() -> dict[str, DevicePeak]:
    """Read the peaks of the accelerators' allocators since `reset_device_peaks`.

    Returns:
        By accelerator that this process uses, such as ``cuda:0``, its peak.
    """
    module, accelerator = _counting_module(), torch.accelerator.current_accelerator()
    if module is None or accelerator is None:
        return {}
    peaks = {
        f"{accelerator.type}:{index}": DevicePeak(
            module.max_memory_allocated(index), module.max_memory_reserved(index)
        )
        for index in range(module.device_count())
    }
    return {device: peak for device, peak in peaks.items() if peak.reserved}


def model_bytes(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, ModelBytes]:
    """Measure parameters, gradients and optimizer state in this process, by device.

    All living parameters count, including those of replicas of a model on other devices. Each
    storage counts once, and of a sharded tensor the part in this process. DDP's buckets, which are
    a second copy of the gradients, are not seen.

    Args:
        optimizers: The optimizers that train.
    """
    parameters = live_parameters()
    gradients = [p.grad for p in parameters if p.grad is not None]
    sizes: dict[str, dict[str, int]] = defaultdict(dict)
    groups: dict[str, list[Any]] = {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer": optimizer_tensors(optimizers),
    }
    for name, tensors in groups.items():
        for device, num_bytes in _by_device(tensors).items():
            sizes[device][name] = num_bytes
    return {device: ModelBytes(**found) for device, found in sizes.items()}


def _by_device(tensors: Iterable[Any]) -> dict[str, int]:
    seen: dict[tuple[str, int], int] = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.device.type == "meta":
            continue
        for part in dense_parts(local):
            seen[str(part.device), storage_key(part)] = part.untyped_storage().nbytes()
    sizes: dict[str, int] = defaultdict(int)
    for (device, address), num_bytes in seen.items():
        sizes[device] += num_bytes if address else 0
    return sizes


def resident_bytes(placement: Placement | None) -> dict[str, dict[str, int]]:
    """Sum the bytes of the shards that this process keeps, over all splits.

    Args:
        placement: Where the shards are; None where no `MemmapDataModule` supplies the rows.

    Returns:
        By data device, such as ``1: cuda:1``, the bytes of each residency.
    """
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for shards in placement.held() if placement is not None else ():
        found[shards.device_name][shards.residency.value] += shards.num_bytes
    return {device: dict(sizes) for device, sizes in found.items()}
