"""What strategies under which no process holds the whole module do not support."""

from typing import ClassVar

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

_ELSEWHERE = "train with memmap_superbatch_ddp, memmap_superbatch or ddp"


class SplitModuleChecks(ParallelStrategy):
    """Refuses what needs the whole module on one process, for strategies that split it."""

    strategy_name: str
    #: Callbacks that need the whole module, and why.
    unsupported_callbacks: ClassVar[dict[type[L.Callback], str]] = {
        StochasticWeightAveraging: "it averages a copy of the whole module",
        WeightAveraging: "it averages a copy of the whole module",
        ModelPruning: "it compares the weights of whole layers",
    }

    def check_fit(self, trainer: L.Trainer, averages: bool = True) -> None:
        """Refuse callbacks that need the whole module, and gradients that cannot be averaged."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            for kind, reason in self.unsupported_callbacks.items():
                if isinstance(callback, kind):
                    raise ValueError(
                        f"{type(callback).__name__}: {reason}, and under {self.strategy_name} no"
                        f" process holds the whole module; omit the callback, or {_ELSEWHERE}"
                    )
        assert self.lightning_module is not None
        for name, child in self.lightning_module.named_modules():
            if averages and isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse:
                raise ValueError(
                    f"{name}: {type(child).__name__} with sparse=True, and {self.strategy_name}"
                    " cannot average sparse gradients over processes; make it with sparse=False"
                )

    @override
    def setup_optimizers(self, trainer: L.Trainer) -> None:
        """Set up optimizers that update each parameter by itself."""
        super().setup_optimizers(trainer)
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in self.optimizers):
            raise ValueError(
                "LBFGS: it needs the gradients of the whole module on one process, and under"
                f" {self.strategy_name} no process has them all; use an optimizer that updates each"
                f" parameter by itself, such as AdamW or SGD, or {_ELSEWHERE}"
            )

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: object, **kwargs: object
    ) -> Tensor:
        """Run the backward pass of a loss over outputs."""
        if closure_loss.is_meta or isinstance(closure_loss, DTensor):
            raise ValueError(
                "the loss has a term computed from the parameters themselves, such as a penalty on"
                f" their norms, and under {self.strategy_name} no process holds all of them; use"
                f" the optimizer's weight_decay for an L2 penalty, or {_ELSEWHERE}"
            )
        return super().backward(closure_loss, optimizer, *args, **kwargs)
