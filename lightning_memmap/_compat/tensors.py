"""Private names of torch: the memory of tensors, process groups."""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def storage_use_count(tensor: Tensor) -> int:
    """Count the tensors and storages, in Python and in C++, that share the memory of a tensor."""
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    # All references to the storage itself share one Python object, which C++ counts once.
    return count + sys.getrefcount(storage)


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """The dense tensors that hold the memory of a tensor."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor] if tensor.layout is torch.strided else []


def process_group_size(argument: Any) -> int | None:
    """The size of a process group in an argument of an operator."""
    if not isinstance(argument, torch._C.ScriptObject):
        return None
    try:
        return int(torch.distributed.ProcessGroup.unbox(argument).size())
    except RuntimeError:  # Another kind of script object, such as the reduce operation.
        return None


def empty_caches(devices: Iterable[torch.device]) -> None:
    """Give back memory that torch's allocators keep without using it, pinned memory included."""
    modules = {torch.get_device_module(device) for device in devices if device.type != "cpu"}
    for module in modules:
        module.empty_cache()
    if modules:
        # The public name came later than the private one, which the CPU build lacks.
        public = hasattr(torch.accelerator, "empty_host_cache")
        empty = torch.accelerator.empty_host_cache if public else torch._C._host_emptyCache
        empty()
