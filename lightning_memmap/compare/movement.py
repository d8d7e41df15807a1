"""Bytes that move in a step: between processes by collectives, and between devices by copies."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_memmap._compat.tensors import TorchDispatchMode, process_group_size

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


@dataclass(frozen=True)
class Movement:
    """Bytes of one kind in one step.

    Args:
        kind: ``allreduce``, ``broadcast``, ..., or ``copy``.
        source: Where from: a device, or ``process`` for what a process sends.
        target: Where to: a device, or ``processes`` and their number.
        num_bytes: Bytes that leave the source in a step.
        num_calls: Calls in a step.
    """

    kind: str
    source: str
    target: str
    num_bytes: int
    num_calls: int


class MovementRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """Counts what operators move while it is active, in this thread and its backward pass.

    Logical devices on one physical device move nothing that could be seen here, and what is
    copied in other threads of the process is not seen either.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])

    @property
    def movements(self) -> list[Movement]:
        """What was seen, the most bytes first."""
        found = [Movement(*key, *counts) for key, counts in self._counts.items()]
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
        counts = self._counts[kind, source, target]
        counts[0] += num_bytes
        counts[1] += 1


def sent_bytes(kind: str, size: int, payload: int) -> int:
    """Bytes that each process sends in a collective, on average.

    The least that ring algorithms need, as in the "bus bandwidth" factors of NVIDIA's nccl-tests
    (PERFORMANCE.md).

    Args:
        kind: ``allreduce``, ``broadcast``, ``allgather``, ``reduce_scatter``, ``send``, ...
        size: Processes that take part.
        payload: Bytes of the tensor; where something is gathered or scattered, of the whole.
    """
    if kind == "send":
        return payload
    factor = 2 if kind == "allreduce" else 1
    return factor * payload * (size - 1) // size


def _num_bytes(value: Any) -> int:
    """Bytes of the tensors in nested lists."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, (list, tuple)):
        return sum(_num_bytes(item) for item in value)
    return 0
