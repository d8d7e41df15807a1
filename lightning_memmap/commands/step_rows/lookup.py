"""The rows of a step, which are computed: no data is loaded."""

import pickle
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_memmap.data.module import MemmapDataModule
from lightning_memmap.loading.state import LoaderState
from lightning_memmap.placement import DataTopology
from lightning_memmap.sampling import BatchSchedule, Sampler
from lightning_memmap.sampling.differences import difference_of


@dataclass(frozen=True)
class DeviceRows:
    """The rows that one data device gives in a step.

    Args:
        device: Number of the data device over all processes.
        rank: Data-parallel rank of its process.
        rows: The rows of its batch, in their order, as for `StepRows`.
    """

    device: int
    rank: int
    rows: list[Any]


@dataclass(frozen=True)
class StepRows:
    """The rows of a step.

    Args:
        epoch: The epoch.
        step: The step of the epoch.
        first: Its first position.
        last: One past its last position.
        rows: The rows of the global batch, in the order of positions: numbers, or as
            `lightning_memmap.sampling.Rows.names` has them.
        devices: The same by data device.
    """

    epoch: int
    step: int
    first: int
    last: int
    rows: list[Any]
    devices: list[DeviceRows]


def step_rows(
    order: Sampler, schedule: BatchSchedule, topology: DataTopology, epoch: int, step: int
) -> StepRows:
    """The rows of a step, by data device.

    Args:
        order: The order of rows.
        schedule: How the epoch is divided into steps.
        topology: The data devices of any of the processes.
        epoch: The epoch, counted from 0.
        step: The step of the schedule, counted from 0.

    Returns:
        The rows. Nothing is read.

    Raises:
        ValueError: There is no such step.
    """
    if step >= len(schedule):
        raise ValueError(f"step={step}: epoch {epoch} has the steps 0 to {len(schedule) - 1}")
    first, last = schedule.bounds(step)
    found = order.pool.rows.names(order.dataset_rows(epoch, range(first, last)))
    count = topology.num_data_devices
    devices = [
        DeviceRows(device, device % topology.size, found[(device - first) % count :: count])
        for device in range(count)
    ]
    return StepRows(epoch, step, first, last, found, devices)


def stored_rows(order: Sampler, step: StepRows) -> list[int]:
    """The rows of the store that the rows of a step are, or are parts of.

    Args:
        order: The order of rows.
        step: The step.

    Returns:
        Rows of the store, in the order of positions.
    """
    rows = order.dataset_rows(step.epoch, range(step.first, step.last))
    found: list[int] = order.pool.rows.stored_rows(rows).tolist()
    return found


def schedule_of(
    data: MemmapDataModule, order: Sampler, topology: DataTopology, start: int = 0
) -> BatchSchedule:
    """How an epoch of the training rows is divided into steps.

    Args:
        data: The data module of the training.
        order: The order of rows.
        topology: Its data devices.
        start: The first position that was not delivered yet.
    """
    global_batch = data.batch_size * topology.num_data_devices
    return BatchSchedule(order.num_positions, global_batch, order.num_shards, data.drop_last, start)


def steps_of_checkpoint(
    path: str, data: MemmapDataModule, order: Sampler, topology: DataTopology
) -> list[StepRows]:
    """The last step that a checkpoint has seen, and the next one.

    Args:
        path: The checkpoint.
        data: The data module of the training.
        order: The order of rows.
        topology: Its data devices.

    Returns:
        The two steps; the next one alone where the checkpoint has seen none.

    Raises:
        ValueError: The checkpoint is of another data module or another order, or holds more than
            tensors and plain values.
    """
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
    found = []
    if stand.steps:
        # The last step ends where the checkpoint stands, whatever the steps before it were.
        size = data.batch_size * topology.num_data_devices
        schedule = schedule_of(data, order, topology)
        if stand.steps <= len(schedule):
            first, last = schedule.bounds(stand.steps - 1)
            size = last - first if last == stand.position else size
        before = max(0, stand.position - size)
        seen = BatchSchedule(stand.position, stand.position - before, 1, start=before)
        step = step_rows(order, seen, topology, stand.epoch, 0)
        found.append(replace(step, step=stand.steps - 1))
    schedule = schedule_of(data, order, topology, stand.position)
    if len(schedule):
        step = step_rows(order, schedule, topology, stand.epoch, 0)
        found.append(replace(step, step=stand.steps))
    else:
        schedule = schedule_of(data, order, topology)
        found.append(step_rows(order, schedule, topology, stand.epoch + 1, 0))
    return found
