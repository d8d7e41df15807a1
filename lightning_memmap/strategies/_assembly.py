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
from lightning_memmap.loading.super_batch import step_rows_of
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
        if isinstance(dataloader, SuperBatchLoader) and dataloader.device is None:
            dataloader = dataloader.placed(self.data_topology)
        return super().process_dataloader(dataloader)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        # A super-batch comes here from a loader that is not the data module's own.
        if isinstance(batch, SuperBatch):
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
    _fetcher: Any = None

    @property
    def data_devices(self) -> tuple[torch.device, ...]:
        """The devices of this process that hold shards and serve batches."""
        return (self.root_device,)

    @override
    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        # The first to see a batch of a loader. What comes after it may replace all tensors.
        plugin: Any = self.precision_plugin

        def convert_input(batch: Any) -> Any:
            self._weigh(batch)
            return type(plugin).convert_input(plugin, batch)

        plugin.convert_input = convert_input

    def _weigh(self, batch: Any) -> None:
        rows = step_rows_of(batch)
        _, size = data_parallel_rank(self)
        weights = {num_rows * size / step_rows for num_rows, step_rows in rows} or {1.0}
        module = self.lightning_module
        if len(weights) > 1 and module is not None and module.trainer.training:
            raise ValueError(
                f"the batches of {len(rows)} loaders in one step, with the rows (of this process,"
                f" of all {size}) {sorted(rows)}: the loss has a mean over each, and one weight"
                " cannot be right for all of them; give each MemmapDataModule drop_last=True, so"
                " that all processes have as many rows"
            )
        self._row_weight = weights.pop()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # A step with ``dataloader_iter`` takes its batches itself.
        self._fetcher = getattr(next(iter(args), None), "data_fetcher", None)
        return super().training_step(*args, **kwargs)

    @override
    def backward(
        self,
        closure_loss: Tensor,
        optimizer: Optimizer | None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        if self._fetcher is not None:
            self._weigh(self._fetcher._batch)
        if self._row_weight != 1:
            closure_loss = closure_loss * self._row_weight
        return super().backward(closure_loss, optimizer, *args, **kwargs)
