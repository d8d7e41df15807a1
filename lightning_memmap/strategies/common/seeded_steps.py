"""The random numbers of a module, such as dropout, in a training step.

They depend on the seed of the program, the epoch, the batch, the data-parallel rank and the replica
alone. So ranks and replicas draw different ones after `seed_everything`, and a resumed fit draws
those of one that was never interrupted. Random numbers of numpy and Python are not seeded: to
save and restore their states would take 20 times as long, in every step.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
import xxhash
from lightning.pytorch import LightningModule
from typing_extensions import override

from lightning_memmap.loading.transform import seeded
from lightning_memmap.placement.topology import find_data_parallel_rank
from lightning_memmap.sampling.sampler import MAX_SEED
from lightning_memmap.strategies.common.base import MemmapStrategy


class SeededSteps(MemmapStrategy):
    """A strategy that seeds the random numbers of each training step."""

    _seed = 0

    @property
    def random_rank(self) -> int:
        """A number of this process. Processes with equal numbers draw equal random numbers."""
        return find_data_parallel_rank(self)[0]

    @override
    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        self._seed = torch.initial_seed()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.seeded_replica(0, self.root_device):
            return super().training_step(*args, **kwargs)

    def seeded_replica(self, replica: int, device: torch.device) -> AbstractContextManager[None]:
        """Return a context with the random numbers of a replica on a device, the current one."""
        assert self.lightning_module is not None
        seed = seed_of_step(self.lightning_module.trainer, self._seed, self.random_rank, replica)
        return seeded(device, seed)


def seed_of_step(trainer: Any, seed: int, rank: int, replica: int = 0) -> int:
    """Derive the seed of the batch that a Trainer trains on.

    Args:
        trainer: The Trainer.
        seed: Seed of the program.
        rank: Data-parallel rank, or another number of a process.
        replica: The replica in the process.
    """
    words = seed, trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx, rank, replica
    return xxhash.xxh3_64_intdigest(" ".join(map(str, words)).encode()) & MAX_SEED
