"""Batches without a Trainer: a loader that is used as torch's own are."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler
from typing_extensions import override

from lightning_memmap.loading.loader import DeviceLoader, SuperBatchLoader


class BatchLoader(DeviceLoader, DataLoader[Any]):
    """Yields assembled batches, those of another epoch in each iteration.

    It is a ``DataLoader`` to Fabric's ``setup_dataloaders``, which gives each of several processes
    the rows of its own: those at the positions ``p`` with ``p % size == rank``. The batches are
    made in the process itself, without torch's samplers, collating or workers.

    The state is that of the stream; `load_state_dict` goes on in the epoch that was saved, or with
    the next one where that was at its end. Fabric saves and loads it with
    ``fabric.save(path, {"loader": loader})``.

    Args:
        loader: The zipped loader.
        device: Where the batches are assembled.
        sampler: Which process this is, where Lightning has made a sampler that says so.
        **_: What else Lightning knows of a ``DataLoader`` that it makes anew.

    Raises:
        ValueError: The processes do not divide the shards of the store.
    """

    # Lightning's own properties, where torch has attributes.
    batch_sampler: Any = None
    dataset: Any = None

    def __init__(
        self, loader: SuperBatchLoader, device: torch.device, sampler: Any = None, **_: Any
    ) -> None:
        if isinstance(sampler, DistributedSampler):
            loader = loader.of_process(sampler.rank, sampler.num_replicas)
        DeviceLoader.__init__(self, loader, device)
        rows: Any = range(loader.stream.num_rows)
        DataLoader.__init__(
            self, rows, batch_size=None, sampler=_EpochNote(rows) if sampler is None else sampler
        )
        #: The epoch of the next iteration; None for that which the sampler was told.
        self._next_epoch: int | None = None

    @override
    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration has, instead of the next one."""
        super().set_epoch(epoch)
        self._next_epoch = epoch

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a saved stream stood; see `SuperBatchLoader.load_state_dict`."""
        super().load_state_dict(state)
        self.set_epoch(state["epoch"] + self.loader.is_at_end(state["position"]))

    @override
    def __iter__(self) -> Any:
        return self._epoch()

    def _epoch(self) -> Iterator[Any]:
        # When the first batch is asked for: iter() alone begins no epoch.
        epoch = self._next_epoch
        if epoch is None:
            epoch = getattr(self.sampler, "epoch", 0)
        super().set_epoch(epoch)
        self._next_epoch = epoch + 1
        yield from super().__iter__()


class _EpochNote(SequentialSampler):
    """Notes the epoch that a Trainer says to a loader that was made without one."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Note the epoch."""
        self.epoch = epoch
