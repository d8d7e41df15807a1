"""Callbacks of the runs: one measures time and memory, the other looks at everything else."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from math import nan
from pathlib import Path
from time import monotonic, perf_counter, time
from typing import Any, cast

import lightning as L
import msgspec
import psutil
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode
from typing_extensions import override

from lightning_memmap.callbacks.memory_trace import batches_of, tensors_of
from lightning_memmap.compare.report.records import (
    CheckRank,
    ModelBytes,
    Rank,
    TimedRank,
)
from lightning_memmap.compare.run.clock import StepClock
from lightning_memmap.compare.run.memory import (
    device_peaks,
    model_bytes,
    process_memory,
    reset_device_peaks,
    resident_bytes,
)
from lightning_memmap.compare.run.movement import MovementRecorder
from lightning_memmap.compare.run.plan import RunSpec
from lightning_memmap.compare.run.rows import MODULUS, hash_batch
from lightning_memmap.data.module import MemmapDataModule
from lightning_memmap.placement import DataTopology, data_parallel_rank

#: Steps of a check run, counted from 0, in which it measures bytes, movement and operations: by
#: then the optimizer has its state, and what is allocated once has been allocated. The memory
#: trace follows.
_BYTES_STEP, _MOVEMENT_STEP, _FLOPS_STEP = 1, 2, 3
#: How often a run writes how many steps are done.
_PROGRESS_S = 0.2


class RunCallback(L.Callback, ABC):
    """What all runs have in common: place of the process, losses, progress, the record at the end.

    Args:
        spec: The run.
        data: The data module that supplies the rows, directly or through another loader.
    """

    def __init__(self, spec: RunSpec, data: MemmapDataModule) -> None:
        super().__init__()
        self.spec = spec
        self.data = data
        self._losses: list[Tensor | None] = []
        self._started_s = perf_counter()
        self._first_batch_s = self._process_to_first_batch_s = nan
        self._shown_s = 0.0

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # After the data module's own setup: by now its data devices are known.
        topology = self._topology
        if topology is not None:
            rows = self.data.batch_size * topology.num_data_devices
            if rows != self.spec.global_batch:
                raise ValueError(
                    f"{topology.num_data_devices} data devices make steps of {rows} rows, and those"
                    f" of this comparison have {self.spec.global_batch}"
                )

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._losses:
            if (device := trainer.strategy.root_device).type != "cpu":
                torch.accelerator.current_stream(device).synchronize()
            self._first_batch_s = perf_counter() - self._started_s
            self._process_to_first_batch_s = time() - psutil.Process().create_time()
        self.begin_step(batch)

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
        if trainer.is_global_zero and monotonic() - self._shown_s > _PROGRESS_S:
            self._shown_s = monotonic()
            progress = Path(self.spec.out) / "progress"
            progress.write_text(str(len(self._losses)), encoding="utf-8")
        self.end_step(trainer)

    def begin_step(self, batch: Any) -> None:
        """Handle the start of a step, whose batch is on its device. By default nothing is done.

        Args:
            batch: What the model is given.
        """

    def end_step(self, trainer: L.Trainer) -> None:
        """Handle the end of a step, whose loss has been added. By default nothing is done."""

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        record = self.record(trainer, pl_module)
        path = Path(self.spec.out) / f"rank{trainer.global_rank}.msgpack"
        partial = path.with_suffix(".partial")
        # Not as JSON, which has no NaN, and whose integers of 64 bits not every reader takes.
        partial.write_bytes(msgspec.msgpack.encode(record))
        partial.replace(path)

    @abstractmethod
    def record(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Rank:
        """Make the record of this process. It is called on every rank, after the last step.

        Args:
            trainer: The Trainer.
            pl_module: The model.

        Returns:
            The record, which is written to a file of this rank.
        """

    @property
    def _topology(self) -> DataTopology | None:
        """The data devices of the data module; None where another loader is used."""
        return None if self.data.placement is None else self.data.placement.topology

    def place(self, trainer: L.Trainer) -> dict[str, Any]:
        """Return the fields that all records have.

        Returns:
            The fields of `Rank` by name.
        """
        data_rank, data_size = data_parallel_rank(trainer.strategy)
        topology = self._topology
        return {
            "pid": os.getpid(),
            "rank": trainer.global_rank,
            "world_size": trainer.world_size,
            "data_rank": data_rank,
            "data_size": data_size,
            "num_data_devices": data_size if topology is None else topology.num_data_devices,
            "root_device": str(trainer.strategy.root_device),
            "data_devices": () if topology is None else tuple(map(str, topology.data_devices)),
            "threads": torch.get_num_threads(),
            "first_batch_s": self._first_batch_s,
            "process_to_first_batch_s": self._process_to_first_batch_s,
            "losses": tuple(nan if loss is None else float(loss) for loss in self._losses),
        }


class TimedCallback(RunCallback):
    """Times steps, after those of the warm-up.

    Args:
        spec: The run.
        data: As for `RunCallback`.
        clock: The Trainer's profiler.
    """

    def __init__(self, spec: RunSpec, data: MemmapDataModule, clock: StepClock) -> None:
        super().__init__(spec, data)
        self._clock = clock

    @override
    def end_step(self, trainer: L.Trainer) -> None:
        measured = len(self._losses) - self.spec.warmup_steps
        if measured == 0:
            reset_device_peaks()
        if measured >= 0:
            self._clock.end_step()

    @override
    def record(self, trainer: L.Trainer, pl_module: L.LightningModule) -> TimedRank:
        parts_s = self._clock.steps()
        step_s = tuple(sum(parts.values()) for parts in parts_s)
        rows = self.spec.global_batch // data_parallel_rank(trainer.strategy)[1]
        return TimedRank(
            **self.place(trainer),
            samples_per_s=rows * len(step_s) / sum(step_s),
            step_s=step_s,
            parts_s=tuple(parts_s),
            memory=process_memory(),
            device_peaks=device_peaks(),
        )


class CheckCallback(RunCallback):
    """Records what a variant trains on and what comes out: rows, losses, weights, bytes.

    Args:
        spec: The run.
        data: As for `RunCallback`.
        hashes: The list to which row hashes are added, in the order of steps: by `HashedTransform`
            one for each data device, or without a transform one for each step.
    """

    def __init__(self, spec: RunSpec, data: MemmapDataModule, hashes: list[int]) -> None:
        super().__init__(spec, data)
        self._loader_hashes = hashes
        self._model_hashes: list[int] = []
        self._flops = FlopCounterMode(display=False)
        self._movements = MovementRecorder()
        self._open = ExitStack()
        self._is_assembled = True
        self._batch_bytes = 0
        self._model_bytes: dict[str, ModelBytes] = {}

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save_weights(trainer, "initial.pt")

    @override
    def begin_step(self, batch: Any) -> None:
        step = len(self._losses)
        self._model_hashes.append(hash_batch(batch))
        if step == _BYTES_STEP:
            # Assembled on the root device, or still the batches of the data devices.
            parts = batches_of(batch)
            self._is_assembled = parts[0] is batch
            self._batch_bytes = sum(leaf.nbytes for part in parts for leaf in tensors_of(part))
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
            self._model_bytes = model_bytes(trainer.optimizers)

    @override
    def end_step(self, trainer: L.Trainer) -> None:
        self._open.close()

    @override
    def record(self, trainer: L.Trainer, pl_module: L.LightningModule) -> CheckRank:
        place = self.place(trainer)
        per_step = 1 if self.data.transform is None else max(1, len(place["data_devices"]))
        # A loader may be ahead of the steps: only those that were trained count.
        hashes = self._loader_hashes
        starts = range(0, per_step * len(self._losses), per_step)
        self._save_weights(trainer, "final.pt")
        return CheckRank(
            **place,
            loader_hashes=tuple(sum(hashes[at : at + per_step]) % MODULUS for at in starts),
            model_hashes=tuple(self._model_hashes),
            is_assembled=self._is_assembled,
            batch_bytes=self._batch_bytes,
            model_bytes=self._model_bytes,
            movements=tuple(self._movements.movements),
            resident_bytes=resident_bytes(self.data.placement),
            flops=self._flops.get_total_flops(),
            parameters=tuple(name for name, _ in pl_module.named_parameters()),
        )

    def _save_weights(self, trainer: L.Trainer, name: str) -> None:
        # On every rank: a strategy that shards the weights gathers them here.
        state = trainer.strategy.lightning_module_state_dict()
        root = trainer.strategy.root_device
        whole = {
            # Lightning has brought the shards to the CPU, where NCCL cannot gather them.
            key: cast(DTensor, value.to(root)).full_tensor()
            if isinstance(value, DTensor)
            else value
            for key, value in state.items()
            if isinstance(value, Tensor)
        }
        if trainer.is_global_zero:
            torch.save(
                {key: value.detach().cpu().clone() for key, value in whole.items()},
                Path(self.spec.out) / name,
            )
