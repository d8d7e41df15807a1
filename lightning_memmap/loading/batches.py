"""Batches without a Trainer: a loader that can be used like torch's ``DataLoader``."""

from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler
from typing_extensions import override

from lightning_memmap.loading.loader import SuperBatchLoader


class BatchLoader(DataLoader[Any]):
    """Yields assembled batches. Each iteration is the next epoch.

    Args:
        loader: The loader of the batches.
        device: The device that batches are assembled on.
        sampler: Set by Lightning. A ``DistributedSampler`` makes the loader serve the rows of its
            rank.
    """

    # Attributes of torch's class that Lightning reads and sets.
    batch_sampler: Any = None
    dataset: Any = None

    def __init__(
        self, loader: SuperBatchLoader, device: torch.device, sampler: Any = None, **_: Any
    ) -> None:
        if isinstance(sampler, DistributedSampler):
            loader = loader.of_process(sampler.rank, sampler.num_replicas)
        #: The loader of the batches.
        self.loader = loader.assembled(device, loader.prefetch_on(device))
        self.device = device
        rows: Any = range(loader.order.num_positions)
        sampler = _EpochNote(rows) if sampler is None else sampler
        super().__init__(rows, batch_size=None, sampler=sampler)
        #: The epoch of the next iteration; None to use the epoch of the sampler.
        self._next_epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, instead of the next epoch."""
        self.loader.set_epoch(epoch)
        self._next_epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader; see `SuperBatchLoader.state_dict`."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state; see `SuperBatchLoader.load_state_dict`."""
        self.loader.load_state_dict(state)
        position = state["position"]
        num_positions = state["num_positions"]
        # The next iteration raises an error for a state of another order.
        is_same = num_positions == self.loader.order.num_positions
        is_at_end = position == num_positions or (
            is_same and not self.loader.num_steps_of(state["epoch"], position)
        )
        self.set_epoch(state["epoch"] + is_at_end)

    @override
    def __len__(self) -> int:
        return len(self.loader)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.loader!r})"

    @override
    def __iter__(self) -> Any:
        # A generator, because iter() alone must not begin an epoch.
        epoch = self._next_epoch
        if epoch is None:
            epoch = getattr(self.sampler, "epoch", 0)
        self.loader.set_epoch(epoch)
        self._next_epoch = epoch + 1
        yield from self.loader


class _EpochNote(SequentialSampler):
    """Stores the epoch that a Trainer sets for a loader that was made without a Trainer."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Store the epoch."""
        self.epoch = epoch
