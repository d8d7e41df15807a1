"""Strategies under which no process has the whole module."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memmap._compat.loops import WEIGHT_AVERAGING
from lightning_memmap.process_group import broadcast_all
from lightning_memmap.strategies.common.processes import SeveralProcesses
from lightning_memmap.strategies.common.weighted_loss import WeightedLoss

_ALTERNATIVES = "train with memmap_superbatch_ddp, memmap_superbatch or ddp"


class SplitModule(WeightedLoss, SeveralProcesses):
    """A strategy that splits the module: it raises for features that need the whole of it."""

    unsupported_callbacks: ClassVar[tuple[type[Callback], ...]] = (
        lightning_callbacks.StochasticWeightAveraging,
        lightning_callbacks.ModelPruning,
        *WEIGHT_AVERAGING,
    )

    def check_callbacks(self, trainer: Trainer) -> None:
        """Raise for callbacks that need the whole module."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, self.unsupported_callbacks):
                raise ValueError(
                    f"{type(callback).__name__} needs the weights of the whole module, and under"
                    f" {self.strategy_name} no process holds them; omit it, or {_ALTERNATIVES}"
                )

    def check_dense_gradients(self) -> None:
        """Raise for sparse gradients, which are not averaged."""
        for name, child in self.module.named_modules():
            if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse:
                raise ValueError(
                    f"{name}: {type(child).__name__} with sparse=True, and {self.strategy_name}"
                    " cannot average sparse gradients over processes; create it with sparse=False"
                )

    def share_buffers(self) -> None:
        """Broadcast the buffers of the first data-parallel process, as DDP does in a step."""
        local = (buffer for buffer in self.module.buffers() if not buffer.is_meta)
        broadcast_all(local, self.data_parallel_group)

    @override
    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        plugin: Any = self.precision_plugin
        trainer: Any = self.module.trainer
        evaluations = trainer.validate_loop, trainer.test_loop, trainer.predict_loop
        for loop in (trainer.fit_loop.epoch_loop.val_loop, *evaluations):
            # Tensors that FSDP2 gathers and that pipelines keep are used in training too.
            self.overrides.set(loop, "inference_mode", False)
        for stage in ("train", "val", "test", "predict"):
            name = f"{stage}_step_context"
            self.overrides.set(plugin, name, self._sharing_buffers(getattr(plugin, name)))

    def _sharing_buffers(self, context: Callable[[], Any]) -> Callable[[], Any]:
        """Return the context of a step that shares buffers first."""

        @contextmanager
        def step() -> Iterator[None]:
            self.share_buffers()
            with context():
                yield

        return step

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        """Set up optimizers that update each parameter by itself."""
        super().setup_optimizers(trainer)
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in self.optimizers):
            raise ValueError(
                f"LBFGS needs all gradients on one process, and {self.strategy_name} divides them;"
                f" use an optimizer such as AdamW or SGD, or {_ALTERNATIVES}"
            )

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: object, **kwargs: object
    ) -> Tensor:
        """Run the backward pass of a loss that is computed from outputs."""
        if closure_loss.is_meta or isinstance(closure_loss, DTensor):
            raise ValueError(
                "the loss has a term computed from the parameters themselves, which"
                f" {self.strategy_name} divides; use weight_decay for an L2 penalty, or"
                f" {_ALTERNATIVES}"
            )
        return super().backward(closure_loss, optimizer, *args, **kwargs)
