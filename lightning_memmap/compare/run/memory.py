"""Memory of processes, devices and the model; energy of devices."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import psutil
import torch
from torch import Tensor

from lightning_memmap._compat.tensors import dense_parts, storage_key
from lightning_memmap.callbacks.memory_trace import live_parameters
from lightning_memmap.compare.report.records import DevicePeak, ModelBytes, ProcessMemory


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


def _uses_cuda() -> bool:
    # Asking for the figures of a device must not make a context on it.
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def reset_device_peaks() -> None:
    """Forget the peaks of all CUDA devices that this process has used."""
    if _uses_cuda():
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)


def device_peaks() -> dict[str, DevicePeak]:
    """Read the peaks of CUDA's allocator since `reset_device_peaks`.

    Returns:
        By CUDA device that this process uses, such as ``cuda:0``, its peak.
    """
    if not _uses_cuda():
        return {}
    peaks = {
        f"cuda:{index}": DevicePeak(
            torch.cuda.max_memory_allocated(index), torch.cuda.max_memory_reserved(index)
        )
        for index in range(torch.cuda.device_count())
    }
    return {device: peak for device, peak in peaks.items() if peak.reserved}


def model_bytes(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, ModelBytes]:
    """Measure parameters, gradients and optimizer state in this process.

    All living parameters count, including those of replicas of a model on other devices. Each
    storage counts once, and of a sharded tensor the part in this process. DDP's buckets, which are
    a second copy of the gradients, are not seen.

    Args:
        optimizers: The optimizers that train.

    Returns:
        Bytes by device.
    """
    parameters = live_parameters()
    gradients = [p.grad for p in parameters if p.grad is not None]
    state = [
        value
        for optimizer in optimizers
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, Tensor)
    ]
    sizes: dict[str, dict[str, int]] = defaultdict(dict)
    groups: dict[str, list[Any]] = {
        "parameters": parameters,
        "gradients": gradients,
        "optimizer": state,
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


class EnergyMeter:
    """Energy of CUDA devices in joules, from NVML, where ``nvidia-ml-py`` is installed.

    Args:
        num_devices: How many of the devices that this process sees are read, from the first on.
    """

    def __init__(self, num_devices: int) -> None:
        self._handles: list[Any] = []
        self._nvml: Any = None
        if not num_devices:
            return
        try:
            import pynvml
        except ModuleNotFoundError:
            return
        try:
            pynvml.nvmlInit()
            for index in range(num_devices):
                uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
                handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
                pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
                self._handles.append(handle)
        except pynvml.NVMLError:  # A device older than Volta, or one that forbids it.
            self._handles = []
        self._nvml = pynvml

    def read_joules(self) -> float | None:
        """Read the energy that the devices have used since their driver was loaded.

        Returns:
            Joules over all devices; None if that is not known.
        """
        if not self._handles:
            return None
        read = self._nvml.nvmlDeviceGetTotalEnergyConsumption
        return sum(float(read(handle)) for handle in self._handles) / 1000
