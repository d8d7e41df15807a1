"""Bytes that move in a step: between processes in collectives, and between devices in copies."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_memmap._compat.tensors import TorchDispatchMode, process_group_size, tree_leaves
from lightning_memmap.compare.report.records import Movement

#: Operations in which a process sends something, the longer names first.
_KINDS = (
    "allreduce",
    "broadcast",
    "allgather",
    "reduce_scatter",
    "alltoall",
    "gather",
    "scatter",
    "reduce",
    "send",
)
_SKIPPED = ("barrier", "recv", "wait", "check")


class MovementRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """Counts what operators move while it is active, in this thread and its backward pass.

    Copies between logical devices of one physical device, and those that other threads make, are
    not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_bytes: dict[tuple[str, str, str], int] = defaultdict(int)

    @property
    def movements(self) -> list[Movement]:
        """What was seen, the largest first."""
        found = [Movement(*key, num_bytes) for key, num_bytes in self._num_bytes.items()]
        return sorted(found, key=lambda movement: -movement.num_bytes)

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note_collective(func.name(), args, result)
        elif func.namespace == "aten" and func.name() in ("aten::_to_copy", "aten::copy_"):
            source, target = (args[0], result) if "_to_" in func.name() else (args[1], args[0])
            if isinstance(source, Tensor) and source.device != target.device:
                self._count("copy", str(source.device), str(target.device), target.nbytes)
        return result

    def _note_collective(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        operation = name.split("::")[1].strip("_").replace("all_", "all")
        kind = next((kind for kind in _KINDS if operation.startswith(kind)), None)
        if kind is None or operation.startswith(_SKIPPED):
            return
        sizes = [size for arg in args if (size := process_group_size(arg)) is not None]
        world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        size = sizes[0] if sizes else world
        if size > 1:
            payload = max(_num_bytes(value) for value in (*args, result))
            self._count(kind, "process", f"{size} processes", sent_bytes(kind, size, payload))

    def _count(self, kind: str, source: str, target: str, num_bytes: int) -> None:
        self._num_bytes[kind, source, target] += num_bytes


def sent_bytes(kind: str, size: int, payload: int) -> int:
    """Bytes that each of ``size`` processes sends in a collective, on average.

    That is ``(size - 1) / size`` of the payload (of the whole, where something is gathered or
    scattered), twice that for ``allreduce``, and all of it for ``send``: the least that ring
    algorithms need, as in the "bus bandwidth" factors of NVIDIA's nccl-tests (PERFORMANCE.md).
    """
    if kind == "send":
        return payload
    factor = 2 if kind == "allreduce" else 1
    return factor * payload * (size - 1) // size


def _num_bytes(value: Any) -> int:
    """Bytes of the tensors in nested lists."""
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
