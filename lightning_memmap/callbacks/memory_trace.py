"""Records the memory of a few training steps over time, by kind."""

import gc
import json
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_memmap.loading import SuperBatch
from lightning_memmap.loading.nested import named_leaves
from lightning_memmap.loading.variable_leaves import dense_tensors
from lightning_memmap.strategies.microbatch import MicroBatches

#: The kinds of memory, from the bottom of a picture to its top.
KINDS = ("parameters", "gradients", "optimizer", "data", "activations")


def live_parameters() -> list[nn.Parameter]:
    """All parameters that are alive in this process, including those of replicas."""
    # By type: reading an object's __class__ may run arbitrary code.
    tensors = [found for found in gc.get_objects() if issubclass(type(found), Tensor)]
    return [
        tensor
        for tensor in tensors
        if isinstance(tensor, nn.Parameter) and not nn.parameter.is_lazy(tensor)
    ]


def optimizer_tensors(optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """The tensors of the state of optimizers."""
    return [
        value
        for optimizer in optimizers
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, Tensor)
    ]


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in the order of its containers."""
    return [tensor for _, leaf in named_leaves(batch) for tensor in dense_tensors(leaf)]


def batches_of(batch: Any) -> list[Any]:
    """The batches in what a callback receives as a batch."""
    if isinstance(batch, SuperBatch):
        return batch.batches
    return batch.parts if isinstance(batch, MicroBatches) else [batch]


class AllocationTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """Traces each storage that an operator of torch returns, until it is freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._start_s = perf_counter()
        self._kinds: list[str] = []
        #: Time, change of bytes, number of the storage.
        self._events: list[tuple[float, int, int]] = []
        self._live: dict[int, tuple[Any, int]] = {}

    def add(self, tensors: Iterable[Any], kind: str, *, from_start: bool = False) -> None:
        """Set the kind of the memory of tensors."""
        for tensor in tensors:
            if (number := self._number_of(tensor, from_start)) is not None:
                self._kinds[number] = kind

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._number_of(leaf)
        return result

    def _number_of(self, tensor: Any, from_start: bool = False) -> int | None:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.device.type == "meta" or local.layout is not torch.strided:
            return None
        storage = local.untyped_storage()
        key, num_bytes = id(storage), storage.nbytes()
        if key not in self._live:
            number = len(self._kinds)
            self._kinds.append("activations")
            self._note(num_bytes, number, from_start)

            def end(_: Any) -> None:
                self._note(-num_bytes, number)
                del self._live[key]

            self._live[key] = (weakref.ref(storage, end), number)
        return self._live[key][1]

    def _note(self, change: int, number: int, from_start: bool = False) -> None:
        time_s = 0.0 if from_start else perf_counter() - self._start_s
        self._events.append((time_s, change, number))

    def series(self) -> dict[str, list[float]]:
        """``time_s``, seconds since the start, and the bytes of each of `KINDS` at these times."""
        sizes = dict.fromkeys(KINDS, 0.0)
        moments: dict[float, list[float]] = {}
        for time_s, change, number in sorted(self._events):
            sizes[self._kinds[number]] += change
            moments[time_s] = [time_s, *sizes.values()]
        columns = map(list, zip(*moments.values(), strict=True))
        return dict(zip(("time_s", *KINDS), columns, strict=True)) if moments else {}


class MemoryTrace(L.Callback):
    """Records what the memory of a few training steps is used for.

    Each process writes ``memory_trace_rank<r>.json``: ``time_s``, and the bytes of parameters,
    gradients, optimizer state, data and activations (everything else that operators return,
    temporaries included) at these times, summed over all devices of the process. On CUDA devices it
    also writes ``memory_snapshot_rank<r>.pickle`` for https://pytorch.org/memory_viz (experimental:
    it has not run on a GPU).

    Recording slows down the recorded steps, and no others.

    Args:
        dirpath: The directory to write to; it is created where needed.
        first_step: The first step to record, from 0; the optimizer has its state from step 1 on.
        num_steps: Number of steps to record.

    Raises:
        ValueError: ``first_step`` is below 0, or ``num_steps`` below 1.
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
                # torch has no public name for the history that its viewer shows.
                torch.cuda.memory._record_memory_history(enabled="all")
            self._tracer = AllocationTracer()
            state = optimizer_tensors(trainer.optimizers)
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
        # Between two steps a dataset may use tensor subclasses that no dispatch mode can trace.
        self._open.close()
        if self._tracer is not None:
            self._tracer.add(optimizer_tensors(trainer.optimizers), "optimizer")
            if self._step == self._steps.stop:
                self._write(trainer)

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer)

    @override
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        # When a step runs out of memory, what was recorded before is of interest.
        self._write(trainer)

    def _write(self, trainer: L.Trainer) -> None:
        if self._tracer is None:
            return
        tracer, self._tracer = self._tracer, None
        self._open.close()
        self._directory.mkdir(parents=True, exist_ok=True)
        rank = trainer.global_rank
        if trainer.strategy.root_device.type == "cuda":
            path = self._directory / f"memory_snapshot_rank{rank}.pickle"
            torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        path = self._directory / f"memory_trace_rank{rank}.json"
        path.write_text(json.dumps(tracer.series()), encoding="utf-8")
