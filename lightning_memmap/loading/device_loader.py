"""A loader whose super-batches are assembled on one device: it yields plain batches."""

from collections.abc import Iterator
from typing import Any

import torch

from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.loading.prefetch import prefetched
from lightning_memmap.placement import DataTopology


class DeviceLoader:
    """Assembles the super-batches of a loader on one device, and yields plain batches.

    Args:
        loader: The super-batch loader; its epoch and its state are shared.
        device: Where the batches are assembled, usually the root device.
        prefetch: Coming steps that are made ready on side streams while the consumer has one; see
            `lightning_memmap.loading.prefetch`. With 0, each is made when it is asked for.

    Raises:
        ValueError: ``prefetch`` is below 0.
    """

    def __init__(self, loader: SuperBatchLoader, device: torch.device, prefetch: int = 0) -> None:
        if prefetch < 0:
            raise ValueError(f"prefetch={prefetch}: the steps made ready ahead, 0 for none")
        self.loader = loader
        self.device = device
        self._prefetch = prefetch

    @property
    def batch_sampler(self) -> Any:
        """Where Lightning looks for a sampler; see `SuperBatchLoader.batch_sampler`."""
        return self.loader.batch_sampler

    @property
    def num_steps(self) -> int:
        """Steps of an epoch that is not resumed."""
        return self.loader.num_steps

    @property
    def num_trained(self) -> int | None:
        """Batches that a Trainer has trained on; see `SuperBatchLoader.num_trained`."""
        return self.loader.num_trained

    @property
    def dataset(self) -> range:
        """What Lightning's ``BatchSizeFinder`` measures; see `SuperBatchLoader.batch_sizes`.

        Raises:
            AttributeError: The super-batch loader was given none.
        """
        return self.loader.dataset

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration has.

        Args:
            epoch: Epoch, counted from 0.
        """
        self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands; see `SuperBatchLoader.state_dict`."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a saved loader stood; see `SuperBatchLoader.load_state_dict`."""
        self.loader.load_state_dict(state)

    def __len__(self) -> int:
        return len(self.loader)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.loader!r}, device={str(self.device)!r})"

    def __iter__(self) -> Iterator[Any]:
        if self._prefetch:
            return prefetched(self.loader, self.device, self._prefetch)
        return self._one_by_one()

    def _one_by_one(self) -> Iterator[Any]:
        for super_batch in self.loader:
            batch = super_batch.to(self.device)
            del super_batch
            yield batch
            del batch


def loader_for(
    loader: SuperBatchLoader, topology: DataTopology
) -> "SuperBatchLoader | DeviceLoader":
    """A loader whose batches are where a topology wants them: assembled, or apart.

    A transform of the assembled batch needs all rows together, even if they are separated
    afterwards: then the batches are assembled on the first data device.

    Args:
        loader: The super-batch loader.
        topology: Says where batches are assembled, and how many steps are prefetched.

    Returns:
        A `DeviceLoader`, or ``loader`` itself where the batches stay apart.
    """
    device = topology.assemble_on
    if device is None and loader.transforms_super_batches:
        device = topology.data_devices[0]
    return loader if device is None else DeviceLoader(loader, device, topology.prefetch)
