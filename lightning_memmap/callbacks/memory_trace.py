"""The memory of a few training steps over time: parameters, gradients, state, data, activations."""

import gc
import json
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_memmap._compat.tensors import (
    TorchDispatchMode,
    dump_cuda_memory_snapshot,
    record_cuda_memory_history,
    tree_leaves,
)
from lightning_memmap.loading import SuperBatch
from lightning_memmap.loading.collate import named_leaves
from lightning_memmap.strategies.in_parts.shares import Shares

#: What memory is for, from the bottom of a picture to its top.
KINDS = ("parameters", "gradients", "optimizer", "data", "activations")


def live_parameters() -> list[nn.Parameter]:
    """All parameters that are alive in this process, those of replicas of a model too.

    Those of lazy modules count once they have memory, which is after the module's first batch.
    """
    # By type first: an object may do anything when it is asked for its class.
    tensors = [found for found in gc.get_objects() if issubclass(type(found), Tensor)]
    return [
        tensor
        for tensor in tensors
        if isinstance(tensor, nn.Parameter) and not nn.parameter.is_lazy(tensor)
    ]


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch in the order of its containers."""
    return [leaf for _, leaf in named_leaves(batch) if isinstance(leaf, Tensor)]


def batches_of(batch: Any) -> list[Any]:
    """What a callback is given as a batch: one batch per device where the strategy leaves them
    apart, else the batch itself."""
    if isinstance(batch, SuperBatch):
        return batch.batches
    return batch.parts if isinstance(batch, Shares) else [batch]


@dataclass
class _Allocation:
    kind: str
    num_bytes: int
    began_s: float
    ended_s: float | None = None


class AllocationTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """Follows each memory that an operator of torch returns, until it is let go of.

    What operators allocate and free within themselves is not seen, nor is memory that no tensor
    of Python refers to, such as DDP's buckets, nor a storage that is resized, as FSDP does.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.start_s = perf_counter()
        self._allocations: list[_Allocation] = []
        self._live: dict[int, tuple[Any, _Allocation]] = {}

    def add(self, tensors: Iterable[Any], kind: str, *, from_start: bool = False) -> None:
        """Say what the memory of tensors is for.

        Args:
            tensors: Tensors, of which some may be followed already.
            kind: One of `KINDS`.
            from_start: Whether those that are not were there when the trace began.
        """
        for tensor in tensors:
            self._find(tensor, self.start_s if from_start else perf_counter()).kind = kind

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._find(leaf, perf_counter())
        return result

    def _find(self, tensor: Any, now_s: float) -> _Allocation:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.device.type == "meta" or local.layout is not torch.strided:
            return _Allocation("activations", 0, now_s)
        storage = local.untyped_storage()
        key = id(storage)
        if key in self._live:
            return self._live[key][1]
        allocation = _Allocation("activations", storage.nbytes(), now_s)

        def end(_: Any) -> None:
            allocation.ended_s = perf_counter()
            del self._live[key]

        self._live[key] = (weakref.ref(storage, end), allocation)
        self._allocations.append(allocation)
        return allocation

    def series(self, num_points: int = 400) -> dict[str, list[float]]:
        """Bytes of each kind over time.

        Args:
            num_points: At most so many moments, spread evenly over allocations and releases. Of
                those that fall together, the one with the most bytes stays.

        Returns:
            ``time_s`` from the start of the trace, and the bytes of each of `KINDS` at that time.
        """
        events: list[tuple[float, int, str]] = []
        for found in self._allocations:
            events.append((found.began_s - self.start_s, found.num_bytes, found.kind))
            if found.ended_s is not None:
                events.append((found.ended_s - self.start_s, -found.num_bytes, found.kind))
        events.sort(key=lambda event: event[0])
        held = dict.fromkeys(KINDS, 0)
        moments: dict[int, tuple[float, dict[str, int]]] = {}
        per_moment = max(1.0, len(events) / num_points)
        for index, (time_s, num_bytes, kind) in enumerate(events):
            held[kind] += num_bytes
            # What was there from the start is one moment.
            place = int(index / per_moment) if time_s > 0 else 0
            if place not in moments or sum(held.values()) >= sum(moments[place][1].values()):
                moments[place] = (time_s, dict(held))
        return {
            "time_s": [time_s for time_s, _ in moments.values()],
            **{kind: [float(sizes[kind]) for _, sizes in moments.values()] for kind in KINDS},
        }


class MemoryTrace(L.Callback):
    """Records the memory of a few training steps, by what it is for.

    Each process writes ``memory_trace_rank<r>.json``: ``time_s``, and the bytes of parameters,
    gradients, optimizer state, data and activations (everything else that operators return, with
    their temporaries) at these times, all devices of the process together. On CUDA devices it also
    keeps ``memory_snapshot_rank<r>.pickle`` for https://pytorch.org/memory_viz.

    The steps are slowed down while they are recorded; the others are not.

    Args:
        dirpath: Where to write.
        first_step: The first step that is recorded, from 0; from the second one on the optimizer
            has its state.
        num_steps: How many are.

    Raises:
        ValueError: A number is out of range.
    """

    def __init__(self, dirpath: str | Path, first_step: int = 2, num_steps: int = 2) -> None:
        super().__init__()
        if first_step < 0 or num_steps < 1:
            raise ValueError(
                f"first_step={first_step}, num_steps={num_steps}: record at least one step, and"
                " none before step 0"
            )
        self._directory = Path(dirpath)
        self._steps = range(first_step, first_step + num_steps)
        self._step = 0
        self._tracer: AllocationTracer | None = None
        self._open = ExitStack()

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = 0

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._step == self._steps.start:
            if trainer.strategy.root_device.type == "cuda":
                record_cuda_memory_history(True)
            self._tracer = AllocationTracer()
            state = _optimizer_state(trainer.optimizers)
            self._tracer.add(live_parameters(), "parameters", from_start=True)
            self._tracer.add(pl_module.buffers(), "parameters", from_start=True)
            self._tracer.add(state, "optimizer", from_start=True)
        if self._tracer is not None:
            self._tracer.add(tensors_of(batches_of(batch)), "data")
            self._open.enter_context(self._tracer)

    @override
    def on_before_optimizer_step(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        if self._tracer is not None:
            gradients = [p.grad for p in live_parameters() if p.grad is not None]
            self._tracer.add(gradients, "gradients")

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._step += 1
        # Between two steps a dataset may use tensors of its own that no mode can follow.
        self._open.close()
        if self._tracer is not None:
            self._tracer.add(_optimizer_state(trainer.optimizers), "optimizer")
            if self._step == self._steps.stop:
                self._write(trainer)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer)

    @override
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        # What was recorded before a step ran out of memory is what one wants to see.
        self._write(trainer)

    def _write(self, trainer: L.Trainer) -> None:
        if self._tracer is None:
            return
        tracer, self._tracer = self._tracer, None
        self._open.close()
        self._directory.mkdir(parents=True, exist_ok=True)
        rank = trainer.global_rank
        if trainer.strategy.root_device.type == "cuda":
            dump_cuda_memory_snapshot(self._directory / f"memory_snapshot_rank{rank}.pickle")
            record_cuda_memory_history(False)
        path = self._directory / f"memory_trace_rank{rank}.json"
        path.write_text(json.dumps(tracer.series()), encoding="utf-8")


def _optimizer_state(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    return [
        value
        for optimizer in optimizers
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, Tensor)
    ]
