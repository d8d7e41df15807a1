"""Private names of torch: the memory of tensors, many tensors at once, process groups."""

import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

try:
    # Its public function takes several times as long.
    from torch.nested._internal.nested_tensor import NestedTensor as _NestedTensor
except ImportError:
    _NestedTensor = torch.nested.nested_tensor_from_jagged  # type: ignore[assignment, misc]


_COUNTS = count()
#: Functions of torch that draw random numbers.
PRIVATE_DRAWS = tuple(
    getattr(torch, name)
    for name in ("_standard_gamma", "_sample_dirichlet")
    if hasattr(torch, name)
)


def jagged_tensor(values: Tensor, offsets: Tensor) -> Tensor:
    """Make a nested tensor whose row ``i`` is ``values[offsets[i]:offsets[i + 1]]``."""
    return _NestedTensor(values, offsets)


def storage_use_count(tensor: Tensor) -> int:
    """Count the tensors and storages, in Python and in C++, that share the memory of a tensor."""
    storage = tensor.untyped_storage()
    if (use_count := getattr(torch._C, "_storage_Use_Count", None)) is None:
        # Unknown: each count is larger than the one before, so that no memory is reused.
        return next(_COUNTS)
    num_owners: int = use_count(storage._cdata)
    # All references to the storage itself share one Python object, which C++ counts once.
    return num_owners + sys.getrefcount(storage)


def storage_id(tensor: Tensor) -> int:
    """Return a number that is equal for tensors in the same storage."""
    return getattr(tensor.untyped_storage(), "_cdata", None) or tensor.untyped_storage().data_ptr()


def num_writes(tensor: Tensor) -> int:
    """Count the in-place operations on a tensor so far, but not those on its ``data``."""
    return tensor._version


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, in place."""
    _for_each("_foreach_copy_", Tensor.copy_, targets, sources)


def add_all(targets: Sequence[Tensor], terms: Sequence[Tensor]) -> None:
    """Add to each target its term, in place."""
    _for_each("_foreach_add_", Tensor.add_, targets, terms)


def _for_each(
    name: str, method: Callable[..., Any], targets: Sequence[Tensor], others: Sequence[Tensor]
) -> None:
    if (at_once := getattr(torch, name, None)) is not None:
        at_once(targets, others)
        return
    for target, other in zip(targets, others, strict=True):
        method(target, other)


def after_backward(function: Callable[[], Any]) -> None:
    """Call a function at the end of the backward pass that is running."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(function)


def local_part(value: Tensor, sharded: Any) -> Tensor:
    """Return the part of a whole value that this rank has of a DTensor."""
    try:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    except ImportError:
        from torch.distributed.tensor import distribute_tensor

        mesh = sharded.device_mesh
        # Each rank has the whole value: nothing is sent.
        parts: Any = distribute_tensor(
            value.to(mesh.device_type), mesh, sharded.placements, src_data_rank=None
        )
        part: Tensor = parts.to_local()
        return part
    sizes, starts = compute_local_shape_and_global_offset(
        value.shape, sharded.device_mesh, sharded.placements
    )
    return value[
        tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
    ]


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """Return the dense tensors that hold the memory of a tensor."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor] if tensor.layout is torch.strided else []


def empty_caches(devices: Iterable[torch.device]) -> None:
    """Free memory that torch's allocators keep without using it, pinned memory included."""
    modules = {torch.get_device_module(device) for device in devices if device.type != "cpu"}
    for module in modules:
        module.empty_cache()
    if modules:
        # The public name came later than the private one, which the CPU build lacks.
        public = hasattr(torch.accelerator, "empty_host_cache")
        owner = torch.accelerator if public else torch._C
        empty = getattr(owner, "empty_host_cache" if public else "_host_emptyCache", None)
        if empty is not None:
            empty()
