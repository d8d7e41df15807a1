"""Budgets: how much memory of each device shards may take."""

from collections.abc import Sequence

import torch

from lightning_memmap.errors import check_number
from lightning_memmap.host_memory import available_bytes


def device_budgets(
    devices: Sequence[torch.device], fraction: float, num_local_processes: int = 1
) -> dict[torch.device, int]:
    """The bytes that shards may take on each device: a share of what is free now."""
    check_memory_fraction(fraction)
    cpu = torch.device("cpu")
    budgets = {device: int(free_bytes(device) * fraction) for device in (*devices, cpu)}
    return {
        device: budget // num_local_processes if device.type == "cpu" else budget
        for device, budget in budgets.items()
    }


def check_memory_fraction(fraction: float) -> float:
    """Check the share of free memory that shards may take."""
    share = check_number("memory_fraction", fraction)
    if not 0 < share <= 1:
        raise ValueError(f"memory_fraction={share}: choose more than 0 and at most 1")
    return share


def free_bytes(device: torch.device) -> int:
    """Memory of a device that is free now, in bytes."""
    if device.type == "cpu":
        return available_bytes()
    check_device(device)
    module = torch.get_device_module(device)
    if device.type == "mps":
        return int(module.recommended_max_memory() - module.driver_allocated_memory())
    if not hasattr(module, "mem_get_info"):
        raise ValueError(f"data device {device}: torch does not know its free memory")
    # What was freed is kept for the next allocation, such as the shards of the stage before.
    cached = module.memory_reserved(device) - module.memory_allocated(device)
    return int(module.mem_get_info(device)[0] + cached)


def check_device(device: torch.device) -> None:
    """Check that a device exists on this machine."""
    if device.type == "cpu":
        return
    try:
        count = int(torch.get_device_module(device).device_count())
    except RuntimeError:  # torch has no module of this type, as for "meta".
        count = 0
    if (device.index or 0) >= count:
        found = ", ".join(["cpu", *(f"{device.type}:{index}" for index in range(count))])
        raise ValueError(f"device {device} does not exist here; there are: {found}")
