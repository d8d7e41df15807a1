"""Bytes: of processes, of accelerators, of the model, and what moves in a step."""

import gc
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_memmap._compat.tensors import dense_parts, process_group_size, storage_key
from lightning_memmap.loading import SuperBatch
from lightning_memmap.strategies.microbatch import MicroBatches

#: Operations in which a process sends something, the longer names first.
_KINDS = (
    "allreduce", "broadcast", "allgather", "reduce_scatter", "alltoall", "gather", "scatter",
    "reduce", "send",
)  # fmt: skip
_SKIPPED = ("barrier", "recv", "wait", "check")


def process_memory() -> dict[str, list[int | None]]:
    """By process id the private and shared bytes of this process and all that it has started."""
    me = psutil.Process()
    found = dict[str, list[int | None]]()
    for process in (me, *me.children(recursive=True)):
        try:
            sizes = process.memory_full_info()
        except psutil.Error:
            continue
        private = getattr(sizes, "uss", None)
        found[str(process.pid)] = [private, None if private is None else sizes.rss - private]
    return found


def _counted_devices() -> tuple[Any, range]:
    """torch's module of the accelerator, and its devices if this process uses them."""
    module = torch.get_device_module()
    # Asking for the figures of a device must not make a context on it.
    counts = hasattr(module, "memory_reserved") and module.is_initialized()
    return module, range(module.device_count() if counts else 0)


def reset_device_peaks() -> None:
    """Forget the peaks of all accelerators that this process has used."""
    module, devices = _counted_devices()
    for index in devices:
        module.reset_peak_memory_stats(index)


def device_peaks() -> dict[str, list[int]]:
    """By accelerator that this process uses, the peaks of allocated and of reserved bytes."""
    module, devices = _counted_devices()
    peaks = {
        str(index): [module.max_memory_allocated(index), module.max_memory_reserved(index)]
        for index in devices
    }
    return {device: peak for device, peak in peaks.items() if peak[1]}


def batches_of(batch: Any) -> list[Any]:
    """The batches in what a callback receives as a batch."""
    if isinstance(batch, SuperBatch):
        return batch.batches
    return batch.parts if isinstance(batch, MicroBatches) else [batch]


def model_bytes(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, dict[str, int]]:
    """By device the bytes of parameters, gradients and optimizer state in this process."""
    # All that are alive, so that replicas count. By type: reading an object's __class__ may run
    # arbitrary code.
    parameters = [each for each in gc.get_objects() if issubclass(type(each), nn.Parameter)]
    parameters = [each for each in parameters if not nn.parameter.is_lazy(each)]
    states = (state for optimizer in optimizers for state in optimizer.state.values())
    groups: dict[str, list[Any]] = {
        "parameters": parameters,
        "gradients": [each.grad for each in parameters if each.grad is not None],
        "optimizer": [each for state in states for each in state.values()],
    }
    sizes: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(groups, 0))
    for name, tensors in groups.items():
        seen = set[tuple[torch.device, int]]()
        for tensor in tensors:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            for part in dense_parts(local) if isinstance(local, Tensor) else ():
                memory = part.device, storage_key(part)
                if part.device.type != "meta" and memory[1] and memory not in seen:
                    seen.add(memory)
                    sizes[str(part.device)][name] += part.untyped_storage().nbytes()
    return dict(sizes)


class MovementRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """Counts the bytes that operators move while it is active, in this thread and its backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self.num_bytes += _sent_by(func.name(), args, result)
        elif func.namespace == "aten" and func.name() in ("aten::_to_copy", "aten::copy_"):
            source, target = (args[0], result) if "_to_" in func.name() else (args[1], args[0])
            if isinstance(source, Tensor) and source.device != target.device:
                self.num_bytes += target.nbytes
        return result


def _sent_by(name: str, args: tuple[Any, ...], result: Any) -> int:
    """Bytes that this process sends in a collective."""
    operation = name.split("::")[1].strip("_").replace("all_", "all")
    kind = next((kind for kind in _KINDS if operation.startswith(kind)), None)
    if kind is None or operation.startswith(_SKIPPED):
        return 0
    sizes = [size for arg in args if (size := process_group_size(arg)) is not None]
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    tensors = [[leaf for leaf in tree_leaves(each) if isinstance(leaf, Tensor)] for each in
               (*args, result)]  # fmt: skip
    payload = max(sum(leaf.nbytes for leaf in leaves) for leaves in tensors)
    return sent_bytes(kind, sizes[0] if sizes else world, payload)


def sent_bytes(kind: str, size: int, payload: int) -> int:
    """Bytes that each of ``size`` processes sends in a collective, on average."""
    if kind == "send":
        return payload if size > 1 else 0
    factor = 2 if kind == "allreduce" else 1
    return factor * payload * (size - 1) // size
