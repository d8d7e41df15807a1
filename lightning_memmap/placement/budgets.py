"""Budgets: how much memory of each device shards may take."""

from collections.abc import Sequence

import torch

from lightning_memmap.host_memory import available_bytes


def device_budgets(devices: Sequence[torch.device], fraction: float) -> dict[torch.device, int]:
    """The bytes that shards may take on each device: a share of what is free now.

    Raises:
        ValueError: ``fraction`` is not in (0, 1], or a device does not exist.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"memory_fraction={fraction}: choose more than 0 and at most 1")
    return {device: int(free_bytes(device) * fraction) for device in devices}


def free_bytes(device: torch.device) -> int:
    """Memory of a device that is free now, in bytes.

    Raises:
        ValueError: The device does not exist here.
    """
    if device.type == "cpu":
        return available_bytes()
    if device.type == "cuda":
        check_device(device)
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps" and torch.backends.mps.is_available():
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    raise ValueError(f"data device {device}: its free memory is not known; use CPU, CUDA or MPS")


def check_device(device: torch.device) -> None:
    """Check that a device exists on this machine.

    Raises:
        ValueError: It does not; the message says which devices do.
    """
    if device.type == "cpu":
        return
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "mps" and torch.backends.mps.is_available():
        count = 1
    if (device.index or 0) >= count:
        found = ", ".join(["cpu", *(f"{device.type}:{index}" for index in range(count))])
        raise ValueError(f"device {device} does not exist here; there are: {found}")
