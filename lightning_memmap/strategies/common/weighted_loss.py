"""The loss of an uneven step is weighted here: by the rows that each process has of the step.

Two processes share a step of 5 rows. Rank 0 computes the mean loss of 3 rows, rank 1 of 2 rows, and
gradients are averaged over processes. With the factors 3 * 2 / 5 and 2 * 2 / 5, the average is

    (loss_0 * 6 / 5 + loss_1 * 4 / 5) / 2  =  (3 * loss_0 + 2 * loss_1) / 5,

the mean over all 5 rows. Only the last steps of an epoch can be uneven; otherwise the factor is 1.

Packs are weighted by their targets instead of rows, in every step. The factor then also makes the
mean over micro-batches that are accumulated the mean over all of their targets, which a single
process needs too.
"""

from typing import Any
from weakref import WeakSet

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.loading.nested import named_leaves
from lightning_memmap.loading.step_weight import DeliveredSteps
from lightning_memmap.placement.topology import find_data_parallel_rank
from lightning_memmap.schema.fields import RowList
from lightning_memmap.strategies.common.data_devices import SuperBatchMixin


class WeightedLoss(SuperBatchMixin):
    """A strategy that scales the loss of each step before its gradients are averaged."""

    _loss_scale = 1.0
    _fetches_batches = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The deliveries of loaders that data modules have made for this fit.
        self._announced: WeakSet[DeliveredSteps] = WeakSet()
        # The deliveries of loaders that the Trainer trains from.
        self._delivered: WeakSet[DeliveredSteps] = WeakSet()

    @override
    def connect(self, model: LightningModule) -> None:
        self._announced.clear()
        self._delivered.clear()
        super().connect(model)

    def add_training_loader(self, loader: SuperBatchLoader) -> None:
        """Announce a training loader, which may reach the Trainer wrapped in another object."""
        self._announced.add(loader.delivered)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        loader = super().process_dataloader(dataloader)
        if self.module.trainer.training:
            if isinstance(loader, SuperBatchLoader):
                self._delivered.add(loader.delivered)
            else:
                self._delivered |= self._announced
        return loader

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._loss_scale = 1.0
        self._update_loss_scale(batch)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # A step with ``dataloader_iter`` fetches its batches itself.
        # Not by hasattr: a batch of replicas is assembled to look an attribute up.
        self._fetches_batches = "data_fetcher" in getattr(next(iter(args), None), "__dict__", {})
        return super().training_step(*args, **kwargs)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if self._fetches_batches:
            self._update_loss_scale(None)
        if self._loss_scale != 1:
            closure_loss = closure_loss * self._loss_scale
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def _update_loss_scale(self, batch: Any) -> None:
        """Ask the training loaders for the weight of the batch they delivered since the last call.

        Args:
            batch: The batch of the step; None if it is unknown.
        """
        _, num_processes = find_data_parallel_rank(self)
        scales = set()
        for delivered in self._delivered:
            taken = delivered.take()
            if taken is None:
                continue
            num_rows, weight, is_ambiguous = taken
            if is_ambiguous and _num_rows(batch) != num_rows:
                raise ValueError(
                    "train_dataloader: between the MemmapDataModule and the Trainer something"
                    " fetches batches ahead, reorders or drops them, so the weight of this uneven"
                    f" step is unknown (its loader delivered {num_rows} rows next). Return the"
                    " loader of the data module itself, or pass drop_last=True"
                )
            scales.add(weight.scale(num_processes))
        if len(scales) > 1:
            raise ValueError(
                "this step combines batches of several loaders that need different loss weights"
                f" ({', '.join(f'{scale:.4g}' for scale in sorted(scales))}), because their rows"
                f" divide unevenly over {num_processes} processes. Pass drop_last=True to each"
                " MemmapDataModule"
            )
        if scales:
            self._loss_scale = scales.pop()


def _num_rows(batch: Any) -> int | None:
    """Return the rows of a batch; None if its leaves have different lengths, or none."""
    leaves = [leaf for _, leaf in named_leaves(batch)]
    sized = (leaf for leaf in leaves if isinstance(leaf, (Tensor, RowList)))
    lengths = {len(leaf) for leaf in sized if not isinstance(leaf, Tensor) or leaf.ndim}
    return lengths.pop() if len(lengths) == 1 else None
