"""A super-batch: the batches of all data devices in one step, and the collators that make them.

A transform runs either on each data device before the batches are assembled, in `DeviceCollator`,
or on the assembled rows, in `SuperBatchCollator`. The latter also serves loaders without one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from typing_extensions import override

from lightning_memmap.loading.assembly import Assembler
from lightning_memmap.loading.row_random import RowRandom
from lightning_memmap.loading.step_weight import StepWeight
from lightning_memmap.loading.transform import (
    BatchTransform,
    DeviceTransform,
    OnSuperBatch,
    has_parameter,
)
from lightning_memmap.placement.topology import DataTopology
from lightning_memmap.sampling.sampler import derive_seed

#: The fetched rows of one data device, one leaf per field.
Leaves: TypeAlias = Sequence[Any]
#: Nests the leaves like the dataset's samples; see `LayoutCollate`.
Collate: TypeAlias = Callable[[Leaves], Any]


class StepSeeds(NamedTuple):
    """The random numbers for the transforms of one step."""

    first: int  # The data device that holds row 0.
    num_devices: int
    seed: int  # The seed of the loader.
    epoch: int
    step: int
    rank: int  # The process that serves the step, of ``num_processes``.
    num_processes: int
    random: RowRandom | None  # The random numbers for each row, if the transform takes them.

    def seed_of(self, index: int) -> int:
        """Return the seed of the transform on one data device."""
        consumer = self.rank + self.num_processes * index
        return derive_seed(self.seed, self.epoch, self.step, consumer)

    def random_of(self, index: int) -> RowRandom | None:
        """Return the random numbers for the rows of one data device."""
        start = (index - self.first) % self.num_devices
        return self.random and self.random.restarted(rows=slice(start, None, self.num_devices))


class Collator(ABC):
    """Makes the batches of a loader.

    Args:
        collate: Nests one leaf per field like the dataset's samples.
        transform: The batch transform.
    """

    def __init__(self, collate: Collate, transform: BatchTransform | None) -> None:
        self._collate = collate
        self._transform = transform
        self.has_transform = transform is not None
        #: Whether the transform takes random numbers for each row.
        self.takes_random = transform is not None and has_parameter(transform, "random")
        self._transforms: dict[tuple[int, torch.device], DeviceTransform] = {}
        self._assembler = Assembler()

    @abstractmethod
    def fetch_on(self, device: torch.device | None) -> torch.device | None:
        """Return the device to fetch all rows of a step on; None to fetch per data device.

        Args:
            device: The device that batches are assembled on, if any.
        """

    @abstractmethod
    def assemble_on(self, topology: DataTopology) -> torch.device | None:
        """Return the device to assemble batches on; None to keep them on the data devices."""

    @abstractmethod
    def collate(
        self, leaves: list[Leaves], devices: Sequence[torch.device], seeds: StepSeeds | None
    ) -> list[Any]:
        """Make the batch of each data device.

        Args:
            leaves: The fetched rows by data device. Removed one by one, to free what is copied.
            devices: The data devices.
            seeds: The random numbers of the step; None without a transform.
        """

    @abstractmethod
    def assemble(self, super_batch: "SuperBatch", device: torch.device) -> Any:
        """Make one batch of the batches of all data devices, on a device."""

    def _transformed(
        self, batch: Any, device: torch.device, index: int, seed: int, random: RowRandom | None
    ) -> Any:
        """Run the transform on a batch."""
        key = index, device
        if key not in self._transforms:
            assert self._transform is not None
            self._transforms[key] = DeviceTransform(self._transform, device)
        result = self._transforms[key](batch, seed, random)
        if result is None:
            raise TypeError(
                "transform: it returned None: return the batch (is the return statement missing?)"
            )
        return result


class DeviceCollator(Collator):
    """Runs the transform on each data device, and assembles the results."""

    @override
    def fetch_on(self, device: torch.device | None) -> torch.device | None:
        return None

    @override
    def assemble_on(self, topology: DataTopology) -> torch.device | None:
        return topology.assemble_on

    @override
    def collate(
        self, leaves: list[Leaves], devices: Sequence[torch.device], seeds: StepSeeds | None
    ) -> list[Any]:
        assert seeds is not None
        batches: list[Any] = []
        for index, device in enumerate(devices):
            batch = self._collate(leaves.pop(0))
            random = seeds.random_of(index)
            batch = self._transformed(batch, device, index, seeds.seed_of(index), random)
            batches.append(batch)
        return batches

    @override
    def assemble(self, super_batch: "SuperBatch", device: torch.device) -> Any:
        return self._assembler.assemble(
            super_batch.batches, super_batch.first, super_batch.num_rows, device
        )


class SuperBatchCollator(Collator):
    """Assembles the rows of all data devices, and runs the transform, if any, on the result."""

    @override
    def fetch_on(self, device: torch.device | None) -> torch.device | None:
        return device

    @override
    def assemble_on(self, topology: DataTopology) -> torch.device | None:
        if topology.assemble_on is None and self.has_transform:
            return topology.data_devices[0]
        return topology.assemble_on

    @override
    def collate(
        self, leaves: list[Leaves], devices: Sequence[torch.device], seeds: StepSeeds | None
    ) -> list[Any]:
        batches: list[Any] = []
        while leaves:
            batches.append(self._collate(leaves.pop(0)))
        return batches

    @override
    def assemble(self, super_batch: "SuperBatch", device: torch.device) -> Any:
        if [*super_batch.data_devices] == [device]:
            (batch,) = super_batch.batches
        else:
            batch = self._assembler.assemble(
                super_batch.batches, super_batch.first, super_batch.num_rows, device
            )
        if (seeds := super_batch.seeds) is None:
            return batch
        return self._transformed(batch, device, 0, seeds.seed_of(0), seeds.random)


def make_collator(collate: Collate, transform: BatchTransform | None = None) -> Collator:
    """Make the collator for a transform."""
    if transform is None or isinstance(transform, OnSuperBatch):
        return SuperBatchCollator(collate, transform)
    return DeviceCollator(collate, transform)


@dataclass(eq=False, repr=False, slots=True)
class SuperBatch:
    """The batches of all data devices in one step."""

    data_devices: Sequence[torch.device]
    num_rows: int
    weight: StepWeight  # The weight of the loss on these rows.
    first: int  # The data device whose batch has the first row.
    collator: Collator
    #: The batch of each data device, on that device, as its transform has returned it.
    batches: list[Any]
    seeds: StepSeeds | None  # None without a transform.

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Any:
        """Assemble the super-batch on one device. Only copies to the CPU are complete on return.

        ``non_blocking`` exists for compatibility with `torch.Tensor.to`, and changes nothing: later
        work on the device waits for the copies, and their sources are not overwritten before.
        """
        target = device if isinstance(device, torch.device) else torch.device(device)
        return self.collator.assemble(self, target)

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        devices = ", ".join(str(device) for device in self.data_devices)
        return f"SuperBatch({self.num_rows} rows on {devices})"
