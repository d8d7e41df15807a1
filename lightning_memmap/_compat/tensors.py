"""Private names of torch: the memory of tensors, process groups."""

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor


def storage_use_count(tensor: Tensor) -> int:
    """Count the tensors and storages, in Python and in C++, that share the memory of a tensor.

    Views, tensors saved for backward, numpy arrays and DLPack capsules all count.

    Args:
        tensor: A tensor with a storage.

    Returns:
        The count. It is meaningful only in comparison with another one of the same memory: the
        call's own references are part of it.
    """
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    # All references to the storage itself share one Python object, which C++ counts once.
    return count + sys.getrefcount(storage)


def storage_key(tensor: Tensor) -> int:
    """A key that is equal for tensors that share memory, and valid while one of them is alive.

    Unlike the address of the data it exists for every tensor: after a compilation in the process,
    torch refuses to return the address of some.

    Args:
        tensor: A tensor with a storage.

    Returns:
        The address of the storage object.
    """
    key: int = tensor.untyped_storage()._cdata
    return key


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """The dense tensors that hold the memory of a tensor.

    Args:
        tensor: A dense tensor, or a sparse one in COO layout, such as the gradient of an embedding
            with ``sparse=True``.

    Returns:
        The tensor itself, or the indices and values of a sparse one; nothing for other layouts.
    """
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor] if tensor.layout is torch.strided else []


def jagged_tensor(values: Tensor, offsets: Tensor) -> Tensor:
    """A nested tensor with the layout ``torch.jagged``.

    `torch.nested.nested_tensor_from_jagged` gives the same for values that need no gradient, in
    several times the time.

    Args:
        values: The items of all rows, one row after the other, of shape (items, *item shape).
        offsets: Where each row begins, and where the last ends, int64 of shape (rows + 1,), on the
            same device.
    """
    made: Tensor = NestedTensor(values, offsets)
    return made


def process_group_size(argument: Any) -> int | None:
    """The size of a process group in an argument of an operator.

    Args:
        argument: Any argument. Operators of ``torch.distributed`` receive a group as a script
            object.

    Returns:
        Processes of the group; None if the argument is not a group.
    """
    if not isinstance(argument, torch._C.ScriptObject):
        return None
    try:
        return int(torch.distributed.ProcessGroup.unbox(argument).size())
    except RuntimeError:  # Another kind of script object, such as the reduce operation.
        return None


def empty_caches(devices: Iterable[torch.device]) -> None:
    """Give back memory that torch's allocators keep without using it, page-locked memory included.

    Args:
        devices: The devices whose memory it is. Nothing happens for CPUs.
    """
    modules = {torch.get_device_module(device) for device in devices if device.type != "cpu"}
    for module in modules:
        module.empty_cache()
    if modules:
        # The public name came later than the private one, which the CPU build lacks.
        public = hasattr(torch.accelerator, "empty_host_cache")
        empty = torch.accelerator.empty_host_cache if public else torch._C._host_emptyCache
        empty()
