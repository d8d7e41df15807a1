"""Batches without a Trainer: a loader that is used like torch's ``DataLoader``."""

from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler
from typing_extensions import override

from lightning_memmap.loading.loader import SuperBatchLoader


class BatchLoader(DataLoader[Any]):
    """Yields assembled batches, those of another epoch in each iteration."""

    # Lightning's own properties, where torch has attributes.
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
        #: The epoch of the next iteration; None for that of the sampler.
        self._next_epoch: int | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration has, instead of the next one."""
        self.loader.set_epoch(epoch)
        self._next_epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands; see `SuperBatchLoader.state_dict`."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a saved loader stood; see `SuperBatchLoader.load_state_dict`."""
        self.loader.load_state_dict(state)
        # Of another order, its position says nothing: the next iteration tells how they differ.
        position, count = state["position"], state["num_positions"]
        is_same = count == self.loader.order.num_positions
        is_at_end = position == count or (
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
        # Only when the first batch is asked for: iter() alone begins no epoch.
        epoch = self._next_epoch
        if epoch is None:
            epoch = getattr(self.sampler, "epoch", 0)
        self.loader.set_epoch(epoch)
        self._next_epoch = epoch + 1
        yield from self.loader


class _EpochNote(SequentialSampler):
    """Remembers the epoch that a Trainer sets for a loader that was made without one."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Remember the epoch."""
        self.epoch = epoch
