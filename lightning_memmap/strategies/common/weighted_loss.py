"""Weights losses so that an optimizer step is one on the mean over all rows, or other items.

Two processes share a step of 5 rows. Rank 0 computes the mean loss of 3 rows, rank 1 of 2 rows, and
gradients are averaged over processes. With the factors 3 * 2 / 5 and 2 * 2 / 5, the average is

    (loss_0 * 6 / 5 + loss_1 * 4 / 5) / 2  =  (3 * loss_0 + 2 * loss_1) / 5,

the mean over all 5 rows. The same holds for the micro-batches that are accumulated for a step: an
epoch of 5 batches of 4 rows with `accumulate_grad_batches=2` ends with a group of one batch, whose
loss Lightning divides by 2. Its factor is 4 * 2 / 4.

The items of a loss need not be rows: see `step_weight`. If they are known only once they are
counted in a batch, those of all processes are added up in each step; and gradients, which were
accumulated before the number in all micro-batches was known, are scaled before the optimizer uses
them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memmap._compat.progress import accumulation_group
from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.loading.nested import named_leaves
from lightning_memmap.loading.step_weight import (
    DeliveredStep,
    DeliveredSteps,
    StepWeight,
    positive_total,
)
from lightning_memmap.placement.topology import find_data_parallel_rank
from lightning_memmap.schema.fields import RowList
from lightning_memmap.strategies.common.data_devices import DataDevices
from lightning_memmap.strategies.common.split_rows import scale_loss


class WeightedLoss(DataDevices):
    """A strategy that scales the loss of each step before its gradients are averaged."""

    #: The items of each row of the batch of the step, of shape (B,); None if every row is one.
    items_by_row: Any = None
    _loss_scale: float | Tensor = 1.0
    _accumulation: "_Accumulation | None" = None
    _fetches_batches = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The deliveries of loaders that data modules have made for this fit.
        self._announced: WeakKeyDictionary[DeliveredSteps, None] = WeakKeyDictionary()
        # The deliveries of loaders that the Trainer trains from, in the same order on all ranks.
        self._delivered: WeakKeyDictionary[DeliveredSteps, None] = WeakKeyDictionary()

    @override
    def connect(self, model: LightningModule) -> None:
        self._announced.clear()
        self._delivered.clear()
        self._accumulation = None
        super().connect(model)

    def add_training_loader(self, loader: SuperBatchLoader) -> None:
        """Announce a training loader, which may reach the Trainer wrapped in another object."""
        self._announced[loader.delivered] = None

    @override
    def process_dataloader(self, dataloader: object) -> object:
        loader = super().process_dataloader(dataloader)
        if self.module.trainer.training:
            if isinstance(loader, SuperBatchLoader):
                self._delivered[loader.delivered] = None
            else:
                self._delivered.update(self._announced)
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
        if isinstance(self._loss_scale, Tensor) or self._loss_scale != 1:
            closure_loss = scale_loss(closure_loss, self._loss_scale)
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        def complete_closure() -> Any:
            output = closure()
            self.complete_gradients(optimizer)
            return output

        return super().optimizer_step(optimizer, complete_closure, model, **kwargs)

    def _update_loss_scale(self, batch: Any) -> None:
        """Ask the training loaders for the weight of the batch they delivered since the last call.

        Args:
            batch: The batch of the step; None if it is unknown.
        """
        self.items_by_row = None
        steps = []
        for delivered in self._delivered:
            if (step := delivered.take()) is None:
                continue
            if step.is_ambiguous and _num_rows(batch) != step.num_rows:
                raise ValueError(
                    "train_dataloader: between the MemmapDataModule and the Trainer something"
                    " fetches batches ahead, reorders or drops them, so the weight of this uneven"
                    f" step is unknown (its loader delivered {step.num_rows} rows next). Return the"
                    " loader of the data module itself, or pass drop_last=True"
                )
            steps.append((delivered, step))
        if len(steps) == 1:
            ((delivered, step),) = steps
            self.items_by_row = step.weight.by_row
            self._loss_scale = self._scale_in_group(delivered, step)
        elif steps:
            self._loss_scale = self._common_scale([step.weight for _, step in steps])

    def _scale_in_group(self, delivered: DeliveredSteps, step: DeliveredStep) -> float | Tensor:
        """Return the factor of a loss that makes the mean of its group one over items."""
        trainer: Any = self.module.trainer
        weight = step.weight
        # Lightning divides by it, and averages over processes.
        num_batches = trainer.accumulate_grad_batches
        if num_batches == 1:
            return self._scale_in_step(weight)
        batch, group = accumulation_group(trainer)
        if step.step_index != batch:
            # The loader's epoch isn't the Trainer's, so the rest of the group is unknown.
            return self._scale_in_step(weight)
        num_processes = find_data_parallel_rank(self)[1]
        if batch == group.start or self._accumulation is None:
            known = None if weight.total is None else delivered.num_items(group)
            self._accumulation = _Accumulation(num_batches, known)
        if self._accumulation.total is not None:
            scale: float = weight.scale(num_processes * num_batches, self._accumulation.total)
            return scale
        counted = self._accumulation.counted
        counted.append(self.sum_over_processes(weight.local.clone()))
        relative: Tensor = weight.scale(num_processes, counted[0])
        return relative

    def _scale_in_step(self, weight: StepWeight) -> float | Tensor:
        """Return the factor of a loss that makes the mean of its step one over items."""
        num_processes = find_data_parallel_rank(self)[1]
        total = None
        if weight.total is None:
            if num_processes == 1:
                return 1.0
            total = self.sum_over_processes(weight.local.clone())
        scale: float | Tensor = weight.scale(num_processes, total)
        return scale

    def _common_scale(self, weights: list[StepWeight]) -> float:
        """Return the factor of the loss of a step with batches of several loaders."""
        scales = {float(self._scale_in_step(weight)) for weight in weights}
        if len(scales) > 1:
            _, num_processes = find_data_parallel_rank(self)
            raise ValueError(
                "this step combines batches of several loaders that need different loss weights"
                f" ({', '.join(f'{scale:.4g}' for scale in sorted(scales))}), because their items"
                f" divide unevenly over {num_processes} processes. Pass drop_last=True to each"
                " MemmapDataModule, and omit weight="
            )
        return scales.pop()

    def complete_gradients(self, optimizer: Optimizer) -> None:
        """Scale accumulated gradients, once the items of all micro-batches are counted."""
        group = self._accumulation
        self._accumulation = None
        if group is None or group.total is not None:
            return
        total = torch.stack(group.counted).sum()
        factor = float(positive_total(group.counted[0]) * group.num_batches / positive_total(total))
        parameters = (p for params in optimizer.param_groups for p in params["params"])
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


@dataclass
class _Accumulation:
    """The micro-batches of an optimizer step.

    Args:
        num_batches: The number of them that Lightning divides losses by.
        total: The items of all micro-batches and processes; None if they are counted in batches.
        counted: The items of all processes in each micro-batch so far, if they are.
    """

    num_batches: int
    total: float | None
    counted: list[Tensor] = field(default_factory=list)


def _num_rows(batch: Any) -> int | None:
    """Return the rows of a batch; None if its leaves have different lengths, or none."""
    leaves = [leaf for _, leaf in named_leaves(batch)]
    sized = (leaf for leaf in leaves if isinstance(leaf, (Tensor, RowList)))
    lengths = {len(leaf) for leaf in sized if not isinstance(leaf, Tensor) or leaf.ndim}
    return lengths.pop() if len(lengths) == 1 else None
