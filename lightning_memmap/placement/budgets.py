"""Budgets: how much memory of each device shards may take."""

from collections.abc import Sequence

import torch

from lightning_memmap.host_memory import available_bytes


def device_budgets(devices: Sequence[torch.device], fraction: float) -> dict[torch.device, int]:
    """The bytes that shards may take on each device: a share of what is free now.

    Args:
        devices: The data devices. One that is named more than once has one budget.
        fraction: The share, more than 0 and at most 1.

    Returns:
        Bytes by device, rounded down.

    Raises:
        ValueError: ``fraction`` is out of range, a device does not exist, or its free memory is not
            known; see `free_bytes`.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"memory_fraction={fraction}: choose more than 0 and at most 1")
    return {device: int(free_bytes(device) * fraction) for device in devices}


def free_bytes(device: torch.device) -> int:
    """Memory of a device that is free now, in bytes.

    Args:
        device: A CPU, CUDA or MPS device.

    Returns:
        For the CPU, the host memory that is available to this process; see
        `lightning_memmap.host_memory`. For CUDA, what no process uses, as
        ``torch.cuda.mem_get_info`` gives it. For MPS, what Metal recommends at most, less what its
        driver has allocated for this process.

    Raises:
        ValueError: The device does not exist here, or is of another type.
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

    Args:
        device: The device. Without an index it is the first one of its type.

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
