"""Measures runs: a clock for the parts of steps, bytes of memory, a callback for each kind."""

import gc
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from math import nan
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

import lightning as L
import psutil
import torch
from lightning.pytorch.profilers import Profiler
from torch import Tensor, nn
from typing_extensions import override

from lightning_memmap._compat.tensors import dense_parts, storage_id
from lightning_memmap.compare.figures import STEP_PARTS
from lightning_memmap.compare.folder import WEIGHTS
from lightning_memmap.compare.parity import MODULUS
from lightning_memmap.compare.run_files import HAS_TRAINED, RankRecord, RunSpec
from lightning_memmap.compare.weights import digest_weights, save_weights, squared_distance
from lightning_memmap.data.module import MemmapDataModule
from lightning_memmap.placement.topology import find_data_parallel_rank

#: The part of a step that a profiled action belongs to, by the last word of the action's name, such
#: as "[Strategy]DDPStrategy.batch_to_device". In manual optimization the Trainer profiles no
#: backward pass: `StepClock.watch` does.
_PART_OF_ACTION = {
    "train_dataloader_next": "data",
    "batch_to_device": "transfer",
    "training_step": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer",
}
#: An event in the compute stream, or seconds of `time.perf_counter`, whose zero has no meaning.
Moment: TypeAlias = torch.Event | float


class StepClock(Profiler):
    """A profiler of the Trainer that times each step and its parts without synchronising.

    It notes the moments at which another part begins. If the backward pass runs within
    ``optimizer_step``, the moments of a step are, for example::

        other, data, other, forward, other, optimizer, backward, optimizer, other
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.is_on = False
        self._device = device
        #: The parts that have begun and not ended, the innermost last.
        self._open = ["other"]
        self._step: list[tuple[str, Moment]] = []
        self._steps: list[list[tuple[str, Moment]]] = []

    def watch(self, trainer: Any) -> None:
        """Time the steps of a Trainer."""
        strategy = trainer.strategy
        trainer.profiler = self
        strategy.backward = self.profile("backward")(strategy.backward)

    @override
    def start(self, action_name: str) -> None:
        if self.is_on and (part := _part_of(action_name)):
            self._open.append(part)
            self._step.append((part, self.now()))

    @override
    def stop(self, action_name: str) -> None:
        # An action that began before the clock was on isn't open.
        if len(self._open) > 1 and self._open[-1] == _part_of(action_name):
            self._open.pop()
            self._step.append((self._open[-1], self.now()))

    def now(self) -> Moment:
        """Return this moment; on an accelerator, when the compute stream reaches this point."""
        if self._device.type == "cpu":
            return perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def end_step(self) -> None:
        """End a step and begin the next one. The first call begins the first step."""
        now = self.now()
        if self.is_on:
            self._steps.append([*self._step, ("other", now)])
        self._step = [("other", now)]
        self.is_on = True

    def steps(self) -> list[dict[str, float]]:
        """Return the seconds of each of `STEP_PARTS`, which add up to the step."""
        if self._steps and isinstance(end := self._steps[-1][-1][1], torch.Event):
            end.synchronize()
        steps = []
        for moments in self._steps:
            seconds = dict.fromkeys(STEP_PARTS, 0.0)
            for (part, start), (_, stop) in pairwise(moments):
                seconds[part] += _seconds_between(start, stop)
            steps.append(seconds)
        return steps


def _part_of(action: str) -> str | None:
    return _PART_OF_ACTION.get(action.rpartition(".")[2])


def _seconds_between(start: Any, stop: Any) -> float:
    if isinstance(start, torch.Event):
        return float(start.elapsed_time(stop)) / 1e3
    return float(stop - start)


def process_memory() -> dict[str, list[int]]:
    """Measure private and shared bytes of this process and its descendants, by process id."""
    this = psutil.Process()
    memory: dict[str, list[int]] = {}
    for process in (this, *this.children(recursive=True)):
        try:
            sizes = process.memory_full_info()
        except psutil.Error:
            continue
        memory[str(process.pid)] = [sizes.uss, sizes.rss - sizes.uss]
    return memory


def _used_devices() -> tuple[Any, range]:
    """Return torch's module of the accelerator, and its devices if this process uses them."""
    module = torch.get_device_module()
    # Reading the statistics of a device must not create a context on it.
    is_used = hasattr(module, "memory_reserved") and module.is_initialized()
    return module, range(module.device_count() if is_used else 0)


def reset_device_peaks() -> None:
    """Reset the peaks of all accelerators that this process has used."""
    module, devices = _used_devices()
    for index in devices:
        module.reset_peak_memory_stats(index)


def device_peaks() -> dict[str, int]:
    """Return the peak of allocated bytes of each accelerator that this process uses."""
    module, devices = _used_devices()
    return {str(index): peak for index in devices if (peak := module.max_memory_allocated(index))}


def model_bytes(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, dict[str, int]]:
    """Count the bytes of parameters, gradients and optimizer state of this process, by device."""
    # All objects that are alive, so that replicas count. By type, because reading an object's
    # __class__ may run arbitrary code.
    parameters = [param for param in gc.get_objects() if issubclass(type(param), nn.Parameter)]
    parameters = [param for param in parameters if not nn.parameter.is_lazy(param)]
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    tensors_by_kind: dict[str, list[Any]] = {
        "parameters": parameters,
        "gradients": [param.grad for param in parameters if param.grad is not None],
        "optimizer": [value for state in states for value in state.values()],
    }
    sizes: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(tensors_by_kind, 0))
    for kind, tensors in tensors_by_kind.items():
        counted: set[tuple[torch.device, int]] = set()
        for tensor in tensors:
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            for part in dense_parts(local) if isinstance(local, Tensor) else ():
                # Torch raises for the address of some tensors after a compilation.
                memory = part.device, storage_id(part)
                if part.device.type != "meta" and memory[1] and memory not in counted:
                    counted.add(memory)
                    sizes[str(part.device)][kind] += part.untyped_storage().nbytes()
    return dict(sizes)


#: The step of a check run, counted from 0, in which it measures bytes: the optimizer then has its
#: state.
_BYTES_STEP = 1


class RunCallback(L.Callback, ABC):
    """Writes the record of each process at the end of a run."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__()
        self.spec = spec
        self._losses: list[Tensor | None] = []
        self._started_s = perf_counter()
        self._first_batch_s = nan

    @abstractmethod
    def measure(self, trainer: L.Trainer) -> dict[str, Any]:
        """Return further fields of the record, after the last step. All ranks must call this."""

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
        # Reading the value here would synchronise the device.
        self._losses.append(loss.detach().clone() if isinstance(loss, Tensor) else None)
        if len(self._losses) == 1:
            (Path(self.spec.out) / HAS_TRAINED).touch()
        if len(self._losses) == self.spec.warmup_steps + self.spec.steps:
            trainer.should_stop = True

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        RankRecord(
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            data_rank=find_data_parallel_rank(trainer.strategy)[0],
            global_batch=self.spec.global_batch,
            losses=[nan if loss is None else float(loss) for loss in self._losses],
            first_batch_s=self._first_batch_s,
            processes=process_memory(),
            peaks=device_peaks(),
            **self.measure(trainer),
        ).write(Path(self.spec.out))


class TimedCallback(RunCallback):
    """Times the steps of a Trainer after the warm-up."""

    def __init__(self, spec: RunSpec, trainer: L.Trainer) -> None:
        super().__init__(spec)
        self._clock = StepClock(trainer.strategy.root_device)
        self._clock.watch(trainer)

    @override
    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(*args, **kwargs)
        num_measured = len(self._losses) - self.spec.warmup_steps
        if num_measured == 0:
            reset_device_peaks()
        if num_measured >= 0:
            self._clock.end_step()

    @override
    def measure(self, trainer: L.Trainer) -> dict[str, Any]:
        return {"steps": self._clock.steps()}


class CheckCallback(RunCallback):
    """Records what a variant trains on, and its results: rows, losses, weights, bytes."""

    def __init__(self, spec: RunSpec, data: MemmapDataModule, hashes: list[int]) -> None:
        super().__init__(spec)
        self._data = data
        self._hashes = hashes
        self._initial: dict[str, str] = {}
        self._state_bytes: dict[str, dict[str, int]] = {}

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        weights = _gather_weights(trainer)
        if trainer.is_global_zero:
            self._initial = digest_weights(weights)
            if self.spec.reference is None:
                save_weights(weights, Path(self.spec.out) / WEIGHTS)

    @override
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if len(self._losses) == _BYTES_STEP:
            self._state_bytes = model_bytes(trainer.optimizers)

    @override
    def measure(self, trainer: L.Trainer) -> dict[str, Any]:
        placement = self._data.placement
        num_devices = 1 if placement is None else len(placement.topology.data_devices)
        num_hashes = 1 if self._data.transform is None else num_devices
        # A loader may have prefetched further batches: only steps that were trained count.
        starts = range(0, num_hashes * len(self._losses), num_hashes)
        parameters = [name for name, _ in trainer.lightning_module.named_parameters()]
        measured = {
            "num_separate_batches": getattr(trainer.strategy, "num_separate_batches", 1),
            "state_bytes": self._state_bytes,
            "hashes": [sum(self._hashes[start : start + num_hashes]) % MODULUS for start in starts],
            "parameters": parameters,
        }
        weights = _gather_weights(trainer)
        if trainer.is_global_zero:
            # In the reference run, the file still has the initial weights.
            path = Path(self.spec.reference or Path(self.spec.out) / WEIGHTS)
            measured |= {
                "initial": self._initial,
                "final": digest_weights(weights),
                "squared_distance": squared_distance(weights, parameters, path),
            }
            if self.spec.reference is None:
                save_weights(weights, path)
        return measured


def _gather_weights(trainer: L.Trainer) -> dict[str, Tensor]:
    """Return all weights on global rank zero. All ranks must call this: some strategies gather."""
    state = trainer.strategy.lightning_module_state_dict()
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}
