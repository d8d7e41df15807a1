"""What strategies have in common that train on whole super-batches."""

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memmap.loading import (
    BatchLoader,
    Padded,
    RowList,
    SuperBatch,
    SuperBatchLoader,
    has_streams,
)
from lightning_memmap.placement import DataTopology, data_parallel_rank, local_processes
from lightning_memmap.schema import Masked

#: Steps that are prepared ahead on a device that works asynchronously.
_PREFETCH = 2


class SuperBatchAssembly(Strategy):
    """Declares that super-batches are assembled on the root device before Lightning sees them.

    The precision plugin and the module's transfer hooks then get what they expect.

    Args:
        *args: Arguments of the strategy that this is mixed into.
        prefetch: Coming steps that are made ready while one is computed; see
            `lightning_memmap.loading.prefetch`. By default 2 where the root device is a GPU, and
            0 on a CPU, which would only do the same work at another time.
        **kwargs: Arguments of the strategy that this is mixed into.

    Raises:
        ValueError: ``prefetch`` is below 0.
    """

    _has_transfer_hooks = True

    def __init__(self, *args: Any, prefetch: int | None = None, **kwargs: Any) -> None:
        if prefetch is not None and prefetch < 0:
            raise ValueError(
                f"prefetch={prefetch}: the steps that are made ready ahead; 0 for none, or leave"
                " it out"
            )
        super().__init__(*args, **kwargs)
        self._prefetch = prefetch

    if TYPE_CHECKING:

        @property
        def data_devices(self) -> tuple[torch.device, ...]:
            """The devices of this process that hold shards and serve batches."""

    @property
    def data_topology(self) -> DataTopology:
        """Which devices hold the data; batches are assembled on the root device."""
        rank, size = data_parallel_rank(self)
        return DataTopology(
            self.data_devices,
            rank,
            size,
            assemble_on=self.root_device,
            prefetch=self.prefetch,
            num_local_processes=local_processes(self),
        )

    @override
    def process_dataloader(self, dataloader: object) -> object:
        self._has_transfer_hooks = self._find_transfer_hooks()
        # Loaders that were made without a data module, or without a Trainer.
        if isinstance(dataloader, BatchLoader):
            dataloader = dataloader.loader
        if isinstance(dataloader, SuperBatchLoader):
            if dataloader.device is None:
                dataloader = dataloader.placed(self.data_topology)
            dataloader.subscribe(self.on_super_batch)
        return super().process_dataloader(dataloader)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        # A super-batch comes here from a loader that is not the data module's own.
        if isinstance(batch, SuperBatch):
            self.on_super_batch(batch)
            batch = batch.to(device or self.root_device)
        # Lightning takes about 20 us a step to find that nothing is to be moved.
        if not self._has_transfer_hooks and _is_on(batch, device or self.root_device):
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    @property
    def prefetch(self) -> int:
        """Coming steps that are made ready while one is computed."""
        if self._prefetch is None:
            return _PREFETCH if has_streams(self.root_device) else 0
        return self._prefetch

    def _find_transfer_hooks(self) -> bool:
        """Whether the module or its data module takes part in moving a batch."""
        module = self.lightning_module
        if module is None:
            return True
        owners = [module, getattr(module.trainer, "datamodule", None)]
        return any(
            is_overridden(name, owner)
            for owner in owners
            if owner is not None
            for name in ("transfer_batch_to_device", "on_after_batch_transfer")
        )

    def on_super_batch(self, super_batch: SuperBatch) -> None:
        """Called with each super-batch when it is due, before Lightning gets its batch.

        Args:
            super_batch: The super-batch, on the data devices or assembled.
        """


def _is_on(batch: Any, device: torch.device) -> bool:
    """Whether a batch of plain containers has nothing but tensors on a device, and text."""
    if isinstance(batch, Tensor):
        return batch.device == device
    if type(batch) is dict:
        return all(_is_on(child, device) for child in batch.values())
    if isinstance(batch, (str, bytes)):
        return True
    is_plain = type(batch) in (list, tuple, Padded, Masked, RowList)
    return is_plain and all(_is_on(child, device) for child in batch)


class RowWeighting(SuperBatchAssembly, ParallelStrategy):
    """Weighs each process's loss by its rows. For strategies that average gradients over processes.

    Process ``r`` of ``R`` computes the mean loss of its ``n_r`` rows of a step of ``n``. The
    average over processes of ``loss_r * n_r * R / n`` is the mean over all rows. The last steps of
    an epoch may not divide evenly; in all others the weight is 1 and nothing is multiplied. What
    is logged is the loss as ``training_step`` returned it.
    """

    _row_weight = 1.0

    @property
    def data_devices(self) -> tuple[torch.device, ...]:
        """The devices of this process that hold shards and serve batches."""
        return (self.root_device,)

    @override
    def on_super_batch(self, super_batch: SuperBatch) -> None:
        _, size = data_parallel_rank(self)
        self._row_weight = super_batch.num_rows * size / super_batch.step_rows

    @override
    def setup_environment(self) -> None:
        # Batches of other loaders are not weighted, whatever the weight of our last batch was.
        self._row_weight = 1.0
        super().setup_environment()

    @override
    def backward(
        self,
        closure_loss: Tensor,
        optimizer: Optimizer | None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        if self._row_weight != 1:
            closure_loss = closure_loss * self._row_weight
        return super().backward(closure_loss, optimizer, *args, **kwargs)
