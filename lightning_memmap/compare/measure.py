"""What runs measure: a clock for steps and their parts, bytes, and callbacks for the rest."""

import gc
import json
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from itertools import pairwise
from math import nan
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import lightning as L
import psutil
import torch
from lightning.pytorch.profilers import Profiler
from torch import Tensor, nn
from typing_extensions import override

from lightning_memmap._compat.dispatch import TorchDispatchMode, tree_leaves
from lightning_memmap._compat.tensors import dense_parts, process_group_size, storage_id
from lightning_memmap.compare.config import RunSpec
from lightning_memmap.compare.metrics import PARTS, Rank
from lightning_memmap.compare.parity import MODULUS, batches_of
from lightning_memmap.data.module import MemmapDataModule
from lightning_memmap.loading.nested import dense_tensors, named_leaves
from lightning_memmap.placement.topology import data_parallel_rank

#: By whose they are and their name, the actions that are parts of a step. In manual optimization
#: the Trainer names nobody whose step it is, and no backward pass: `StepClock.watch` does.
_ACTIONS = {
    ("[_TrainingEpochLoop", "train_dataloader_next"): "data",
    ("[Strategy", "batch_to_device"): "transfer",
    ("[Strategy", "training_step"): "forward",
    ("backward", ""): "backward",
    ("[LightningModule", "optimizer_step"): "optimizer",
    ("optimizer_step", ""): "optimizer",
}
#: An event in the compute stream, or seconds of `time.perf_counter`, whose zero has no meaning.
Moment: TypeAlias = torch.Event | float


class _Span(NamedTuple):
    """A part of a step, and the part within which it ran."""

    part: str
    outer: str
    begin: Moment
    end: Moment


class StepClock(Profiler):
    """A profiler of the Trainer that times each step and its parts, and waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.is_on = False
        self._device = device
        self._open: list[tuple[str, Moment]] = []
        self._spans: list[_Span] = []
        self._ends: list[Moment] = []
        self._steps: list[list[_Span]] = []

    def watch(self, trainer: Any) -> None:
        """Time the steps of a Trainer."""
        trainer.profiler, strategy = self, trainer.strategy
        strategy.backward = self.profile("backward")(strategy.backward)

    @override
    def start(self, action_name: str) -> None:
        if self.is_on and (part := _part_of(action_name)):
            self._open.append((part, self.now()))

    @override
    def stop(self, action_name: str) -> None:
        part = _part_of(action_name)
        if self._open and self._open[-1][0] == part:
            _, begin = self._open.pop()
            outer = self._open[-1][0] if self._open else "other"
            self._spans.append(_Span(part, outer, begin, self.now()))

    def now(self) -> Moment:
        """This moment, on an accelerator: when what has been enqueued to compute is done."""
        if self._device.type == "cpu":
            return perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def end_step(self) -> None:
        """End a step; the next one begins. The first call begins the first step."""
        self._ends.append(self.now())
        if self.is_on:
            self._steps.append(self._spans)
        self._spans, self.is_on = [], True

    def steps(self) -> list[dict[str, float]]:
        """Return the seconds of each of `PARTS` of each step. They add up to that step."""
        if self._ends and isinstance(self._ends[-1], torch.Event):
            self._ends[-1].synchronize()
        found = []
        for spans, (begin, end) in zip(self._steps, pairwise(self._ends), strict=True):
            parts = dict.fromkeys(PARTS, 0.0)
            parts["other"] = _seconds(begin, end)
            for span in spans:
                seconds = _seconds(span.begin, span.end)
                parts[span.part] += seconds
                parts[span.outer] -= seconds
            found.append(parts)
        return found


def _part_of(action: str) -> str | None:
    owner, _, name = action.partition("]")
    return _ACTIONS.get((owner, name.rpartition(".")[2]))


def _seconds(begin: Any, end: Any) -> float:
    if isinstance(begin, torch.Event):
        return float(begin.elapsed_time(end)) / 1e3
    return float(end - begin)


def process_memory() -> dict[str, list[int]]:
    """By process id the private and shared bytes of this process and all that it has started."""
    me = psutil.Process()
    found = dict[str, list[int]]()
    for process in (me, *me.children(recursive=True)):
        try:
            sizes = process.memory_full_info()
        except psutil.Error:
            continue
        found[str(process.pid)] = [sizes.uss, sizes.rss - sizes.uss]
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


def device_peaks() -> dict[str, int]:
    """By accelerator that this process uses, the peak of allocated bytes."""
    module, devices = _counted_devices()
    return {str(index): peak for index in devices if (peak := module.max_memory_allocated(index))}


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
                # Torch refuses the address of some tensors after a compilation.
                memory = part.device, storage_id(part)
                if part.device.type != "meta" and memory[1] and memory not in seen:
                    seen.add(memory)
                    sizes[str(part.device)][name] += part.untyped_storage().nbytes()
    return dict(sizes)


class MovementRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """Counts the bytes that operators move while it is active, in this thread and its backward."""

    num_bytes = 0

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
    """Bytes that each process sends in a collective, on average: the least that a ring needs."""
    if any(word in name for word in ("barrier", "recv", "wait", "check")):
        return 0
    sizes = [size for arg in args if (size := process_group_size(arg)) is not None]
    size = sizes[0] if sizes else torch.distributed.get_world_size()
    payload = max(
        sum(leaf.nbytes for leaf in tree_leaves(each) if isinstance(leaf, Tensor))
        for each in (*args, result)
    )
    if "send" in name:
        return payload
    rounds = 2 if "allreduce" in name.replace("_", "") else 1
    return rounds * payload * (size - 1) // size


#: Steps of a check run, counted from 0, in which it measures bytes and movement: by
#: then the optimizer has its state, and what is allocated once has been allocated.
_BYTES_STEP, _MOVEMENT_STEP = 1, 2
#: Is made in the folder of a run when it has trained a step.
HAS_TRAINED = "trained"
#: Made by the first process of a run when it can go on.
IS_READY = "ready"


class RunCallback(L.Callback, ABC):
    """Writes the record of each process at the end of a run."""

    def __init__(self, spec: RunSpec, data: MemmapDataModule) -> None:
        super().__init__()
        self.spec, self.data = spec, data
        self._losses: list[Tensor | None] = []
        self._started_s, self._first_batch_s = perf_counter(), nan

    @abstractmethod
    def seen(self, trainer: L.Trainer) -> dict[str, Any]:
        """After the last step, on every rank: what the record has beside losses and memory."""

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not pl_module.automatic_optimization:
            # The Trainer counts the steps of each optimizer, of which a batch may have several.
            trainer.fit_loop.epoch_loop.max_steps = -1

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._losses:
            if (device := trainer.strategy.root_device).type != "cpu":
                torch.accelerator.current_stream(device).synchronize()
            self._first_batch_s = perf_counter() - self._started_s

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        # Not read yet: that would wait for the device.
        self._losses.append(loss.detach().clone() if isinstance(loss, Tensor) else None)
        if len(self._losses) == 1:
            (Path(self.spec.out) / HAS_TRAINED).touch()
        if len(self._losses) == self.spec.warmup_steps + self.spec.steps:
            trainer.should_stop = True

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        rank = Rank(
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            data_rank=data_parallel_rank(trainer.strategy)[0],
            global_batch=self.spec.global_batch,
            losses=[nan if loss is None else float(loss) for loss in self._losses],
            first_batch_s=self._first_batch_s,
            processes=process_memory(),
            peaks=device_peaks(),
            **self.seen(trainer),
        )
        path = Path(self.spec.out) / f"rank{trainer.global_rank}.json"
        path.write_text(json.dumps(asdict(rank)), encoding="utf-8")


class TimedCallback(RunCallback):
    """Times the steps of a Trainer, after those of the warm-up."""

    def __init__(self, spec: RunSpec, data: MemmapDataModule, trainer: L.Trainer) -> None:
        super().__init__(spec, data)
        self._clock = StepClock(trainer.strategy.root_device)
        self._clock.watch(trainer)

    @override
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(*args, **kwargs)
        measured = len(self._losses) - self.spec.warmup_steps
        if measured == 0:
            reset_device_peaks()
        if measured >= 0:
            self._clock.end_step()

    @override
    def seen(self, trainer: L.Trainer) -> dict[str, Any]:
        return {"steps": self._clock.steps()}


class CheckCallback(RunCallback):
    """Records what a variant trains on and what comes out: rows, losses, weights, bytes."""

    def __init__(self, spec: RunSpec, data: MemmapDataModule, hashes: list[int]) -> None:
        super().__init__(spec, data)
        self._hashes = hashes
        self._movement, self._open = MovementRecorder(), ExitStack()  # type: ignore[no-untyped-call]
        self._moved_row_bytes = 0
        self._state_bytes: dict[str, dict[str, int]] = {}

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._save_weights(trainer, "initial.pt")

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        step = len(self._losses)
        if step == _BYTES_STEP:
            self._moved_row_bytes = self._bytes_moved_by_loader(trainer, batch)
        if step == _MOVEMENT_STEP:
            self._open.enter_context(self._movement)

    @override
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if len(self._losses) == _BYTES_STEP:
            self._state_bytes = model_bytes(trainer.optimizers)

    @override
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(*args, **kwargs)
        self._open.close()

    @override
    def seen(self, trainer: L.Trainer) -> dict[str, Any]:
        self._save_weights(trainer, "final.pt")
        placement = self.data.placement
        devices = 1 if placement is None else len(placement.topology.data_devices)
        per_step = 1 if self.data.transform is None else devices
        # A loader may be ahead of the steps: only those that were trained count.
        hashes = self._hashes
        starts = range(0, per_step * len(self._losses), per_step)
        return {
            "num_parts": getattr(trainer.strategy, "num_parts", 1),
            "state_bytes": self._state_bytes,
            "moved_bytes": self._movement.num_bytes + self._moved_row_bytes,
            "hashes": [sum(hashes[at : at + per_step]) % MODULUS for at in starts],
            "parameters": [name for name, _ in trainer.lightning_module.named_parameters()],
        }

    def _bytes_moved_by_loader(self, trainer: L.Trainer, batch: Any) -> int:
        """Bytes of a batch that come from another device."""
        parts = batches_of(batch)
        leaves = (leaf for part in parts for _, leaf in named_leaves(part))
        num_bytes = sum(tensor.nbytes for leaf in leaves for tensor in dense_tensors(leaf))
        root, placement = trainer.strategy.root_device, self.data.placement
        if placement is None:  # Another loader's.
            return num_bytes if root.type != "cpu" else 0
        if parts[0] is not batch:  # Not assembled: still the batches of the data devices.
            return 0
        devices = placement.topology.data_devices
        return num_bytes * sum(each != root for each in devices) // len(devices)

    def _save_weights(self, trainer: L.Trainer, name: str) -> None:
        # On every rank: a strategy that shards the weights gathers them here.
        state = trainer.strategy.lightning_module_state_dict()
        if trainer.is_global_zero:
            tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
            copies = {key: value.detach().cpu().clone() for key, value in tensors.items()}
            torch.save(copies, Path(self.spec.out) / name)
