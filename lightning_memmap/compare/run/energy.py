"""Energy of CUDA devices, by NVML: other kinds of devices have no part in it."""

from typing import Any

import torch


class EnergyMeter:
    """Energy of CUDA devices in joules, from NVML, where ``nvidia-ml-py`` is installed.

    Experimental: it has run with a stand-in for NVML alone.

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
