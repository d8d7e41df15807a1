"""What a module's own calls do while its stages run in a pipeline."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_memmap.strategies.pipelining.microbatches import MicroBatches, slice_rows
from lightning_memmap.strategies.pipelining.pending import (
    KnownGradients,
    PendingOutput,
    num_rows_of,
)
from lightning_memmap.strategies.pipelining.schedules import Pipeline, without_gradients


class PipelinedCalls:
    """Lets ``self(inputs)`` and ``self.loss(output, batch)`` of a module go through its pipeline.

    Args:
        module: The module, of which this process has its own stages.
        pipeline: Runs the stages.
        num_microbatches: Micro-batches of a batch.
        is_first: Whether this process has the first stage, which computes the rows.
    """

    def __init__(
        self, module: L.LightningModule, pipeline: Pipeline, num_microbatches: int, is_first: bool
    ) -> None:
        self._module, self._pipeline = module, pipeline
        self._num_microbatches, self._is_first = num_microbatches, is_first
        self._own_loss: Any = module.loss
        self._is_in_step = False
        self._trained: dict[nn.Parameter, None] = {}

    def redirect(self) -> None:
        """Let the module's calls go through the pipeline, until `restore`."""
        self._module.forward = self._forward  # type: ignore[method-assign]
        self._module.loss = self._loss  # type: ignore[assignment]

    def restore(self) -> None:
        """Give the module its own calls back."""
        for name in ("forward", "loss"):
            vars(self._module).pop(name, None)

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step of the module. Outside of one, it refuses to be called."""
        self._is_in_step = True
        try:
            yield
        finally:
            self._is_in_step = False

    def take_trained(self) -> list[nn.Parameter]:
        """The parameters of this process that losses were computed with since the last call."""
        trained, self._trained = self._trained, {}
        return list(trained)

    def _forward(self, *args: Any) -> Any:
        if not self._is_in_step:
            raise RuntimeError(
                "memmap_pipeline: the module was called outside of a step, where it would wait for"
                " processes of its pipeline that may not call it: call it in training_step,"
                " validation_step, test_step or predict_step"
            )
        num_rows = num_rows_of(args)
        if self._is_first and any(arg.is_meta for arg in args):
            raise ValueError(
                f"memmap_pipeline: {type(self._module).__name__} was called with rows that the"
                " first process does not hold: name in input_fields all fields that training_step"
                " passes to self(...), or leave out input_fields and loss_fields"
            )
        if torch.is_grad_enabled():
            return PendingOutput(args, num_rows)
        return self._pipeline.forward(args, MicroBatches(num_rows, self._num_microbatches))

    def _loss(self, output: Any, batch: Any) -> Any:
        if not isinstance(output, PendingOutput):
            return self._own_loss(output, batch)
        rows = MicroBatches(output.num_rows, self._num_microbatches)

        def loss_of(index: int, micro_output: Any) -> Tensor:
            own = rows.rows(index)
            micro_output = slice_rows(micro_output, range(len(own)), rows.size)
            loss = self._own_loss(micro_output, slice_rows(batch, own, rows.num_rows))
            if not isinstance(loss, Tensor) or loss.ndim:
                raise TypeError(
                    f"loss(output, batch) returned {loss!r}: return a tensor without dimensions,"
                    " the mean loss over the rows of the batch"
                )
            return loss * rows.weight(index)

        every = list(self._module.parameters())
        local = [parameter for parameter in every if not parameter.is_meta]
        frozen = tuple(index for index, p in enumerate(every) if not p.requires_grad)
        with without_gradients(local) as grads:
            total = self._pipeline.train(output.args, rows, loss_of, frozen)
        found = {p: grad for p, grad in zip(local, grads, strict=True) if grad is not None}
        self._trained.update(dict.fromkeys(p for p in local if p.requires_grad))
        loss = total.requires_grad_()
        loss.register_hook(KnownGradients(found))  # type: ignore[no-untyped-call]
        # A copy, which the user may change in place, unlike a leaf.
        return loss.clone()
