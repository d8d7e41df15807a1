"""The rows of steps, by data device, and of the steps around a checkpoint. Nothing is read."""

import pickle
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_memmap.data.module import MemmapDataModule
from lightning_memmap.loading.state import LoaderState
from lightning_memmap.placement import DataTopology
from lightning_memmap.sampling import BatchSchedule, Sampler
from lightning_memmap.sampling.differences import difference_of
from lightning_memmap.sampling.schedule import SkippedSteps, steps_to_skip


@dataclass(frozen=True)
class DeviceRows:
    """The rows that one data device gives in a step."""

    device: int
    rank: int
    rows: list[Any]


@dataclass(frozen=True)
class StepRows:
    """The rows of a step."""

    epoch: int
    step: int
    first: int
    last: int
    rows: list[Any]
    devices: list[DeviceRows]
    run_step: int
    is_skipped: bool


@dataclass(frozen=True)
class Epochs:
    """The steps of epochs, and their rows by data device. Nothing is read."""

    order: Sampler
    whole: BatchSchedule
    topology: DataTopology
    skipped: SkippedSteps

    @classmethod
    def of(
        cls, data: MemmapDataModule, order: Sampler, topology: DataTopology, skipped: SkippedSteps
    ) -> "Epochs":
        """Those of a data module, which may leave out steps beside those of a checkpoint."""
        size = data.batch_size * topology.num_data_devices
        whole = BatchSchedule(order.num_positions, size, order.num_shards, data.drop_last)
        skipped = skipped.adding(steps_to_skip(data.skip_steps), whole)
        return cls(order, whole, topology, skipped)

    def step_rows(self, epoch: int, step: int) -> StepRows:
        """A step of an epoch, whether it is left out or not."""
        if step >= len(self.whole):
            raise ValueError(f"step={step}: epoch {epoch} has the steps 0 to {len(self.whole) - 1}")
        return self.rows_at(epoch, step, *self.whole.bounds(step))

    def rows_at(self, epoch: int, step: int, first: int, last: int) -> StepRows:
        """The step of these positions."""
        order, topology = self.order, self.topology
        found = order.pool.rows.names(order.dataset_rows(epoch, range(first, last)))
        count = topology.num_data_devices
        devices = [
            DeviceRows(device, device % topology.size, found[(device - first) % count :: count])
            for device in range(count)
        ]
        run_step = epoch * len(self.whole) + step
        is_skipped = any(begin <= first < end for begin, end in self.skipped.of_epoch(epoch))
        return StepRows(epoch, step, first, last, found, devices, run_step, is_skipped)

    def left_of(self, epoch: int, start: int) -> BatchSchedule:
        """The steps of an epoch from a position on, without those that are left out."""
        return replace(self.whole, start=start, skipped=self.skipped.of_epoch(epoch))

    def num_skipped(self, epoch: int, position: int) -> int:
        """The steps of an epoch that are left out before a position."""
        spans = self.skipped.of_epoch(epoch)
        rows = (min(last, position) - first for first, last in spans if first < position)
        return sum(-(-each // self.whole.global_batch) for each in rows)


def stored_rows(order: Sampler, step: StepRows) -> list[int]:
    """The rows of the store that the rows of a step are, or are parts of, in the same order."""
    rows = order.dataset_rows(step.epoch, range(step.first, step.last))
    found: list[int] = order.pool.rows.stored_rows(rows).tolist()
    return found


def steps_of_checkpoint(
    path: str, data: MemmapDataModule, order: Sampler, topology: DataTopology
) -> list[StepRows]:
    """The last step that a checkpoint has seen, if any, and the next one."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise ValueError(
            f"ckpt_path={path!r} holds more than tensors and plain values, and is not unpickled:"
            f" {str(error).splitlines()[0]}"
        ) from error
    name = type(data).__qualname__
    state = saved.get(name, {}).get("train") if isinstance(saved, dict) else None
    if state is None:
        raise ValueError(f"ckpt_path={path!r}: it has no state of a {name}")
    stand = LoaderState.read(state)
    if (differing := difference_of(stand.sampler, order.identity)) is not None:
        name, was, now, remedy = differing
        raise ValueError(
            f"ckpt_path={path!r}: its rows come in another order than those of the config, which"
            f" has {name}={now} instead of {name}={was}: give a config with {remedy}"
        )
    epochs = Epochs.of(data, order, topology, stand.skipped)
    epoch, position, found = stand.epoch, stand.position, list[StepRows]()
    if stand.steps:
        # The last step ends where the checkpoint stands, whatever the steps before it were.
        before = epochs.left_of(epoch, 0)
        first, last = before.bounds(stand.steps - 1) if stand.steps <= len(before) else (0, 0)
        if last != position:
            first = max(0, position - before.global_batch)
        number = stand.steps - 1 + epochs.num_skipped(epoch, first)
        found.append(epochs.rows_at(epoch, number, first, position))
    left = epochs.left_of(epoch, position)
    number = stand.steps
    if not len(left):
        left, epoch, number = epochs.left_of(epoch + 1, 0), epoch + 1, 0
    first, last = left.bounds(0)
    number += epochs.num_skipped(epoch, first)
    found.append(epochs.rows_at(epoch, number, first, last))
    return found
