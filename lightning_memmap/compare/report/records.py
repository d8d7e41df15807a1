"""What each process of a run writes down."""

from collections.abc import Sequence
from typing import Annotated, TypeVar

import msgspec

#: Parts of a step, in the order in which they happen.
PARTS = ("data", "transfer", "forward", "backward", "optimizer", "other")
#: Steps of a check run, from 0, whose memory is traced.
FIRST_TRACED_STEP, NUM_TRACED_STEPS = 4, 2
#: Counts and sizes, as large as any that could be measured.
Count = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value that is written to a file and read back strictly."""


class ProcessMemory(Value, frozen=True):
    """Memory of one process, as Linux accounts for it.

    Args:
        pid: Process id.
        parent: Process id of its parent.
        rss: Bytes of all its pages.
        own: Bytes of pages that no other process has; None where that is not known.
    """

    pid: int
    parent: int
    rss: int
    own: int | None

    @property
    def shared(self) -> int | None:
        """Bytes of the other pages, such as those of a mapped store or of libraries."""
        return None if self.own is None else self.rss - self.own


class DevicePeak(Value, frozen=True):
    """The peak of CUDA's allocator on one device.

    Args:
        allocated: Bytes of tensors.
        reserved: Bytes that the allocator took from the device.
    """

    allocated: Size
    reserved: Size


class ModelBytes(Value, frozen=True):
    """Bytes of a model on one device.

    Args:
        parameters: Bytes of parameters.
        gradients: Bytes of gradients.
        optimizer: Bytes of optimizer state.
    """

    parameters: Size = 0
    gradients: Size = 0
    optimizer: Size = 0

    @property
    def total(self) -> int:
        """Parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer


class Movement(Value, frozen=True):
    """Bytes of one kind that move in one step.

    Args:
        kind: ``allreduce``, ``broadcast``, ..., or ``copy``.
        source: Where from: a device, or ``process`` for what a process sends.
        target: Where to: a device, or ``processes`` and their number.
        num_bytes: Bytes that leave the source in a step.
    """

    kind: str
    source: str
    target: str
    num_bytes: int


class Rank(Value, frozen=True):
    """What one process of any run writes.

    Args:
        pid: Its process id.
        rank: Its global rank.
        world_size: Processes of the run.
        data_rank: Its data-parallel rank.
        data_size: Data-parallel processes.
        num_data_devices: Data devices of all processes.
        root_device: Its root device.
        data_devices: Its data devices.
        threads: Threads that torch uses in it.
        first_batch_s: Seconds from ``Trainer.fit`` until the first batch is on its device.
        process_to_first_batch_s: The same from the start of the process, with its imports.
        losses: The loss of each step; NaN where ``training_step`` returns none.
    """

    pid: int
    rank: int
    world_size: int
    data_rank: int
    data_size: int
    num_data_devices: int
    root_device: str
    data_devices: tuple[str, ...]
    threads: int
    first_batch_s: float
    process_to_first_batch_s: float
    losses: tuple[float, ...]


class TimedRank(Rank, frozen=True):
    """What one process of a timed run writes.

    Args:
        samples_per_s: Its rows per second in the measured steps.
        step_s: Seconds of each of the measured steps.
        parts_s: Seconds of each of `PARTS`, by step.
        memory: Its memory and that of its child processes, after the last step.
        device_peaks: Peaks of CUDA devices in the measured steps.
    """

    samples_per_s: float
    step_s: tuple[float, ...]
    parts_s: tuple[dict[str, float], ...]
    memory: tuple[ProcessMemory, ...]
    device_peaks: dict[str, DevicePeak]


class CheckRank(Rank, frozen=True):
    """What one process of a check run writes.

    Args:
        loader_hashes: Hash of the rows of each step as the loader gives them.
        model_hashes: Hash of the rows of each step as the model is given them.
        is_assembled: Whether the model is given one batch, and not one for each data device.
        batch_bytes: Bytes of a batch of this process.
        model_bytes: Bytes of the model by device.
        movements: What moves in a step.
        resident_bytes: Bytes of shards by data device and residency.
        flops: Floating point operations of a step, as far as torch counts them.
        parameters: Names of the module's parameters.
    """

    loader_hashes: tuple[int, ...]
    model_hashes: tuple[int, ...]
    is_assembled: bool
    batch_bytes: int
    model_bytes: dict[str, ModelBytes]
    movements: tuple[Movement, ...]
    resident_bytes: dict[str, dict[str, int]]
    flops: int
    parameters: tuple[str, ...]


AnyRank = TypeVar("AnyRank", bound=Rank)


def by_data_rank(ranks: Sequence[AnyRank]) -> list[list[AnyRank]]:
    """Group the processes by their share of the global batch.

    Under tensor and pipeline parallelism several processes have one share.

    Args:
        ranks: The records of all processes of a run.

    Returns:
        The records of each share, in the order of data-parallel ranks.
    """
    shares: dict[int, list[AnyRank]] = {}
    for rank in ranks:
        shares.setdefault(rank.data_rank, []).append(rank)
    return [shares[key] for key in sorted(shares)]
