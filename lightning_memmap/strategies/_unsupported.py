"""Checks for strategies under which each process holds only some of the module."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
#: What torch says of operators that take shards and other tensors, or reshape shards.
_OF_SHARDS = re.compile(r"mixed torch\.Tensor and DTensor|requires redistribution")


def check_callbacks(trainer: L.Trainer, strategy_name: str) -> None:
    """Refuse callbacks that average or prune weights, which need the whole module.

    Args:
        trainer: The Trainer.
        strategy_name: Name of the strategy, for the message.

    Raises:
        ValueError: The Trainer has such a callback.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            raise ValueError(
                f"{type(callback).__name__}: it averages a copy of the whole module, and under"
                f" {strategy_name} no process holds the whole module; leave the callback out, or"
                f" {_ELSEWHERE}"
            )
        if isinstance(callback, ModelPruning):
            raise ValueError(
                f"{type(callback).__name__}: it compares the weights of whole layers, and under"
                f" {strategy_name} no process holds the whole module; prune a trained checkpoint in"
                f" one process, or {_ELSEWHERE}"
            )


def check_embeddings(module: nn.Module, strategy_name: str) -> None:
    """Refuse sparse gradients, where gradients are averaged over processes.

    Args:
        module: The module that is trained.
        strategy_name: Name of the strategy, for the message.

    Raises:
        ValueError: An embedding has sparse gradients.
    """
    for name, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse:
            raise ValueError(
                f"{name}: {type(child).__name__} with sparse=True, and {strategy_name} cannot"
                " average sparse gradients over processes; make it with sparse=False"
            )


class SplitModuleChecks(ParallelStrategy):
    """Refuses what needs the whole module on one process, for strategies that split it."""

    strategy_name: str

    @override
    def setup_optimizers(self, trainer: L.Trainer) -> None:
        """Set up optimizers that update each parameter by itself.

        Raises:
            ValueError: One is LBFGS.
        """
        super().setup_optimizers(trainer)
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in self.optimizers):
            raise ValueError(
                "LBFGS: it needs the gradients of the whole module on one process, and under"
                f" {self.strategy_name} no process has them all; use an optimizer that updates each"
                f" parameter by itself, such as AdamW or SGD, or {_ELSEWHERE}"
            )

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run the backward pass of a loss over outputs.

        Raises:
            ValueError: The loss has terms of parameters that this process does not hold as a whole.
        """
        if closure_loss.is_meta or isinstance(closure_loss, DTensor):
            raise _term_error(self.strategy_name)
        return super().backward(closure_loss, optimizer, *args, **kwargs)


@contextmanager
def named_terms(strategy_name: str) -> Iterator[None]:
    """Around a training step: errors of torch about shards of parameters become that of the loss.

    Some operators on shards raise before there is a loss that `SplitModuleChecks` could refuse.

    Args:
        strategy_name: Name of the strategy, for the message.

    Raises:
        ValueError: The step computes with shards as with whole parameters.
    """
    try:
        yield
    except RuntimeError as error:
        if not _OF_SHARDS.search(str(error)):
            raise
        raise _term_error(strategy_name) from error


def _term_error(strategy_name: str) -> ValueError:
    return ValueError(
        "the loss has a term computed from the parameters themselves, such as a penalty on"
        f" their norms, and under {strategy_name} no process holds all of them; use the"
        f" optimizer's weight_decay for an L2 penalty, or {_ELSEWHERE}"
    )
