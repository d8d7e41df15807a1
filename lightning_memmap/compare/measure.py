"""Callbacks of the runs: one that times, and one that looks at everything else."""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from itertools import pairwise
from math import nan
from pathlib import Path
from time import monotonic, perf_counter, time
from typing import Any

import lightning as L
import psutil
import torch
from lightning.fabric.utilities.throughput import Throughput
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from lightning_memmap.callbacks.memory_trace import batches_of
from lightning_memmap.compare.clock import StepClock
from lightning_memmap.compare.memory import (
    EnergyMeter,
    device_peaks,
    model_bytes,
    process_memory,
    reset_device_peaks,
    resident_bytes,
)
from lightning_memmap.compare.movement import MovementRecorder
from lightning_memmap.compare.rows import hash_batch, leaves_of
from lightning_memmap.compare.spec import RunSpec
from lightning_memmap.datamodule import MemmapDataModule

#: Steps of a check, from 0, in which it looks at bytes: by then the optimizer has its state, and
#: what is allocated once has been allocated.
_BYTES_STEP, _MOVEMENT_STEP, _FLOPS_STEP = 1, 2, 3
#: Then its memory is traced.
FIRST_TRACED_STEP, NUM_TRACED_STEPS = 4, 2
LEAST_CHECK_STEPS = FIRST_TRACED_STEP + NUM_TRACED_STEPS


class RunCallback(L.Callback):
    """What all runs have in common: place of the process, losses, progress, the file at the end.

    Args:
        spec: The run.
        data: The data module of the config, whichever feed is used.
    """

    def __init__(self, spec: RunSpec, data: MemmapDataModule) -> None:
        super().__init__()
        self.spec = spec
        self.data = data
        self.result: dict[str, Any] = {}
        self._losses: list[Tensor | None] = []
        self._started_s = perf_counter()
        self._shown_s = 0.0

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # After the data module has set itself up, and before it is asked for a loader: by now the
        # data devices of the global batch are known.
        num_devices = self.data.placement.topology.num_data_devices if self.data.placement else None
        if num_devices is not None:
            if self.spec.global_batch % num_devices:
                raise ValueError(
                    f"{num_devices} data devices do not divide a global batch of"
                    f" {self.spec.global_batch} rows: choose another batch_size or --devices"
                )
            self.data.batch_size = self.spec.global_batch // num_devices
        sharding = trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        self.result |= {
            "pid": os.getpid(),
            "rank": trainer.global_rank,
            "world_size": trainer.world_size,
            "data_rank": sharding["rank"],
            "data_size": sharding["num_replicas"],
            "num_data_devices": num_devices or sharding["num_replicas"],
            "root_device": str(trainer.strategy.root_device),
            "threads": torch.get_num_threads(),
            "data_devices": [str(device) for device in self._data_devices()],
        }

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._losses:
            synchronize(trainer)
            self.result["first_batch_s"] = perf_counter() - self._started_s
            self.result["process_to_first_batch_s"] = time() - psutil.Process().create_time()

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
        if trainer.is_global_zero and monotonic() - self._shown_s > 0.2:
            self._shown_s = monotonic()
            progress = Path(self.spec.out) / "progress"
            progress.write_text(str(len(self._losses)), encoding="utf-8")

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.finish(trainer, pl_module)
        self.result["losses"] = [nan if loss is None else float(loss) for loss in self._losses]
        path = Path(self.spec.out) / f"rank{trainer.global_rank}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self.result), encoding="utf-8")
        partial.replace(path)

    def finish(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Complete the result, on every rank."""

    def _data_devices(self) -> tuple[torch.device, ...]:
        return self.data.placement.topology.data_devices if self.data.placement else ()


class TimedRun(RunCallback):
    """Times steps: first those of the warm-up, then those that count, then some in parts.

    The steps that count are not disturbed: the device is waited for before the first and after the
    last of them alone. In the steps after them it is waited for at the ends of each part.

    Args:
        spec: The run.
        data: The data module of the config.
        clock: The Trainer's profiler.
    """

    def __init__(self, spec: RunSpec, data: MemmapDataModule, clock: StepClock) -> None:
        super().__init__(spec, data)
        self._clock = clock
        self._ends_s: list[float] = []
        self._parts: list[dict[str, float]] = []
        self._throughput = Throughput(window_size=spec.steps + 1)
        self._energy: EnergyMeter | None = None

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        spec, done = self.spec, len(self._losses)
        if done < spec.warmup_steps:
            return
        if done == spec.warmup_steps:
            reset_device_peaks()
            # One process of each machine reads the devices of all.
            cuda = trainer.strategy.root_device.type == "cuda" and trainer.local_rank == 0
            self._energy = EnergyMeter(torch.cuda.device_count() if cuda else 0)
            self._joules = self._energy.read_joules()
        measured = done - spec.warmup_steps
        if measured in (0, spec.steps):
            synchronize(trainer)
        now = self._clock.now()
        if measured <= spec.steps:
            rows = spec.global_batch // self.result["data_size"]
            # Of all its figures only rates within the window matter: it starts at any time.
            self._throughput.update(time=now, batches=measured, samples=measured * rows)
        if measured == spec.steps:
            self._close_window(now)
        if measured:
            self._parts.append(self._clock.take(now - self._ends_s[-1]))
        else:
            self._clock.take(0.0)
        self._clock.is_synchronizing = measured >= spec.steps
        self._ends_s.append(now)

    def _close_window(self, now: float) -> None:
        self.result["window_s"] = now - self._ends_s[0]
        rate = self._throughput.compute()["device/samples_per_sec"]
        self.result["samples_per_s"] = float(rate)
        self.result["device_peaks"] = device_peaks()
        end = self._energy.read_joules() if self._energy else None
        if end is not None and self._joules is not None:
            self.result["joules"] = end - self._joules

    @override
    def finish(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        steps = self.spec.steps
        ends = self._ends_s[: steps + 1]
        self.result["step_s"] = [b - a for a, b in pairwise(ends)]
        # Where nothing needs to be waited for, the undisturbed steps have parts too.
        split = self._parts[steps:] if trainer.strategy.root_device.type != "cpu" else self._parts
        self.result["parts_s"] = split
        self.result["memory"] = process_memory()


class CheckRun(RunCallback):
    """Notes what an arm trains on and what comes out: rows, losses, weights, bytes.

    Args:
        spec: The run.
        data: The data module of the config.
        taken: Where the hash of each batch is noted, in the order of steps: by `Tap` that of each
            data device, without a transform by `NotedLoader` that of the step.
    """

    def __init__(self, spec: RunSpec, data: MemmapDataModule, taken: list[int]) -> None:
        super().__init__(spec, data)
        self._taken = taken
        self._seen: list[int] = []
        self._flops = FlopCounterMode(display=False)
        self._movements = MovementRecorder()
        self._open = ExitStack()

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save_weights(trainer, pl_module, "initial.pt")

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        step = len(self._losses)
        self._seen.append(hash_batch(batch))
        if step == _BYTES_STEP:
            # Assembled on the root device, or still the batches of the data devices.
            parts = batches_of(batch)
            self.result["is_assembled"] = parts[0] is batch
            self.result["batch_bytes"] = sum(
                leaf.nbytes for part in parts for leaf in leaves_of(part)
            )
        if step == _FLOPS_STEP:
            self._open.enter_context(self._flops)
        if step == _MOVEMENT_STEP:
            self._open.enter_context(self._movements)

    @override
    def on_before_optimizer_step(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        if len(self._losses) == _BYTES_STEP:
            self.result["model_bytes"] = model_bytes(trainer.optimizers)

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._open.close()
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def finish(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        steps = len(self._losses)
        self.result["seen"] = self._seen
        # A loader may be ahead of the steps.
        per_step = 1 if self.data.transform is None else max(1, len(self.result["data_devices"]))
        self.result["taken"] = [
            sum(self._taken[step * per_step : (step + 1) * per_step]) % 2**64
            for step in range(steps)
        ]
        self.result["flops"] = self._flops.get_total_flops()
        self.result["movements"] = [asdict(found) for found in self._movements.movements]
        self.result["resident_bytes"] = resident_bytes(self.data.placement)
        self.result["parameters"] = [name for name, _ in pl_module.named_parameters()]
        self._save_weights(trainer, pl_module, "final.pt")

    def _save_weights(self, trainer: L.Trainer, pl_module: L.LightningModule, name: str) -> None:
        # On every rank: a strategy that shards the weights gathers them here.
        state = trainer.strategy.lightning_module_state_dict()
        whole = {
            key: (value.full_tensor() if hasattr(value, "full_tensor") else value)
            for key, value in state.items()
            if isinstance(value, Tensor)
        }
        if trainer.is_global_zero:
            torch.save(
                {key: value.detach().cpu().clone() for key, value in whole.items()},
                Path(self.spec.out) / name,
            )


def synchronize(trainer: L.Trainer) -> None:
    """Wait until the devices have done what this process gave them."""
    synchronizer(trainer.strategy.root_device)()


def synchronizer(device: torch.device) -> Callable[[], None]:
    """What waits for a device; for a CUDA device, for all of them that this process uses."""

    def wait() -> None:
        if device.type == "cuda":
            for index in range(torch.cuda.device_count()):
                # To wait for a device of another process would take memory on it.
                if torch.cuda.memory_reserved(index):
                    torch.cuda.synchronize(index)
        elif device.type == "mps":
            torch.mps.synchronize()

    return wait
