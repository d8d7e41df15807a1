"""The whole training step as one graph of the device: captured once, and replayed."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_memmap._compat.optimization import (
    MODULE_HOOKS,
    SHARED_HOOKS,
    Step,
    count_step,
    logging_in,
)
from lightning_memmap._compat.tensors import copy_tensors, storage_key, tree_leaves
from lightning_memmap.loading.nested import named_leaves, rebuilt
from lightning_memmap.strategies._cuda_graph import CUDAGraph

#: Steps of one shape that run normally before one is captured, so that everything that is made
#: lazily exists, such as the state of optimizers and the plans of libraries.
_WARM_UP_STEPS = 3
_WAY_OUT = "train without cuda_graph=True, or with torch.compile(module, mode='reduce-overhead')"


def check_step(trainer: Trainer, module: LightningModule, strategy: Strategy) -> None:
    """Check that a step can be replayed, as far as this is known before it runs.

    Args:
        trainer: The Trainer, with all of its callbacks.
        module: The module.
        strategy: The strategy after its set-up, with its optimizers.

    Raises:
        ValueError: It cannot be replayed. The message says why, and what to do instead.
    """
    if not module.automatic_optimization:
        raise _refusal("automatic_optimization=False: the module steps its optimizers itself")
    if len(strategy.optimizers) != 1:
        raise _refusal(f"the module has {len(strategy.optimizers)} optimizers, and must have one")
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    accumulates = any(isinstance(each, GradientAccumulationScheduler) for each in callbacks)
    if trainer.accumulate_grad_batches != 1 or accumulates:
        raise _refusal("gradients accumulate over steps: leave out accumulate_grad_batches")
    if getattr(strategy.precision_plugin, "scaler", None) is not None:
        raise _refusal(
            "precision='16-mixed' decides on the CPU whether to step: use precision='bf16-mixed'"
        )
    for owner in (module, *callbacks):
        is_callback = isinstance(owner, Callback)
        parent = Callback if is_callback else LightningModule
        for hook in SHARED_HOOKS if is_callback else (*SHARED_HOOKS, *MODULE_HOOKS):
            if is_overridden(hook, owner, parent=parent):
                raise _refusal(
                    f"{type(owner).__name__}.{hook} is overridden, and a replay does not call it:"
                    " move what it does to on_train_batch_start or on_train_batch_end"
                )
    _check_optimizer(strategy.optimizers[0], has_scheduler=bool(strategy.lr_scheduler_configs))


def _check_optimizer(optimizer: Optimizer, *, has_scheduler: bool) -> None:
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if "capturable" in group:
            if not group["capturable"]:
                raise _refusal(f"{name} must be made with capturable=True")
        elif not group.get("fused"):
            raise _refusal(
                f"{name} may compute on the CPU between its kernels: use one with capturable=True,"
                " such as Adam, or SGD with fused=True"
            )
        if has_scheduler and not isinstance(group["lr"], Tensor):
            raise _refusal(
                f"the learning rate is the number {group['lr']}, and a scheduler would change it"
                f" where a replay does not look: use {name}(..., lr=torch.tensor({group['lr']}))"
            )


def _refusal(why: str) -> ValueError:
    return ValueError(f"cuda_graph=True: {why}; or {_WAY_OUT}")


@dataclass
class _Captured:
    """A captured step: its inputs and outputs, and what must not change until a replay."""

    shape: tuple[Any, ...]
    batch: Any
    output: dict[str, Any]
    logged: list[Callable[[], None]]
    numbers: list[dict[str, Any]]
    memory: list[int]
    gradients: list[Tensor | None]


class GraphedStep:
    """Runs training steps: the first few normally, then one graph for all steps of their shape.

    Steps of another shape, such as the last one of an epoch, run normally, with the same
    parameters and the same optimizer state.

    Args:
        trainer: The Trainer.
        module: The module.
        optimizer: Its only optimizer. All three must pass `check_step`.
        graph: An empty graph of the root device.
    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, optimizer: Optimizer, graph: CUDAGraph
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._optimizer = optimizer
        self._graph = graph
        self._metrics = [child for child in module.modules() if isinstance(child, Metric)]
        self._captured: _Captured | None = None
        self._shape: Any = None
        self._warm_steps = 0

    def run(self, batch: Any, step: Step) -> dict[str, Any]:
        """Do one training step.

        Args:
            batch: The batch, with all tensors on the root device.
            step: Runs the whole step with a batch, the optimizer step included.

        Returns:
            What the step returned: a dict, with the loss under ``loss``. After a replay its tensors
            are copies, which the next replay does not overwrite.

        Raises:
            ValueError: Something turned out not to be replayable.
            RuntimeError: The step waits for the device, or does something else that cannot be
                captured.
        """
        shape, captured = _shape(batch), self._captured
        if captured is not None and shape != captured.shape:
            return step(batch)
        if captured is None:
            self._move_rates()
            if shape is None or shape != self._shape:
                self._shape, self._warm_steps = shape, 0
            if shape is None or self._warm_steps < _WARM_UP_STEPS:
                self._warm_steps += 1
                return self._graph.warm_up(partial(self._without_metrics, batch, step))
            # Lightning has counted the step, but the device has not done any of it yet.
            captured = self._captured = self._capture(batch, shape, step)
            self._graph.replay()
        else:
            self._check_unchanged(captured)
            copy_tensors(_leaves(captured.batch), _leaves(batch))
            # A step of another shape may have replaced them.
            for parameter, gradient in zip(self._parameters, captured.gradients, strict=True):
                parameter.grad = gradient
            self._graph.replay()
            count_step(self._trainer)
        with logging_in(self._module, "training_step"):
            for log in captured.logged:
                log()
        output: dict[str, Any] = apply_to_collection(captured.output, Tensor, torch.clone)
        return output

    @property
    def _parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _generators(self) -> list[torch.Generator]:
        """The generators of the device that are attributes of modules."""
        values = (value for child in self._module.modules() for value in vars(child).values())
        root = self._parameters[0].device
        found = [each for each in values if isinstance(each, torch.Generator)]
        return [each for each in dict.fromkeys(found) if each.device == root]

    def _move_rates(self) -> None:
        """Move learning rates to the device of the parameters.

        A captured step would not see changes of those on the CPU, where a module or a checkpoint
        may have put them.
        """
        for group in self._optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"] = group["lr"].to(group["params"][0].device)

    def _without_metrics(self, batch: Any, step: Step) -> dict[str, Any]:
        before = [metric.update_count for metric in self._metrics]
        output = step(batch)
        for metric, count in zip(self._metrics, before, strict=True):
            if metric.update_count != count:
                raise _refusal(
                    f"training_step updates the metric {type(metric).__name__}, which also counts"
                    " in Python: update it in on_train_batch_end, from what training_step returns"
                )
        return output

    def _capture(self, batch: Any, shape: Any, step: Step) -> _Captured:
        static = rebuilt(batch, iter([leaf.clone() for leaf in _leaves(batch)]))
        numbers = [_numbers(group) for group in self._optimizer.param_groups]
        logged: list[Callable[[], None]] = []

        own = self._module.log

        def log(name: str, value: Any, *args: Any, **options: Any) -> None:
            if not isinstance(value, Tensor):
                raise _refusal(
                    f"self.log({name!r}, {value!r}) in training_step: a replay would log this value"
                    " in every step; log a tensor on the device, or log it in on_train_batch_end"
                )
            logged.append(partial(own, name, value.detach().clone(), *args, **options))

        vars(self._module)["log"] = log
        try:
            output = self._graph.capture(lambda: step(static), self._generators())
        except RuntimeError as error:
            raise RuntimeError(
                "cuda_graph=True: the step could not be captured. A captured step must not wait"
                " for the device, as .item(), .cpu() and printing a tensor do, nor make tensors"
                f" from Python numbers on it. Change that, or {_WAY_OUT}"
            ) from error
        finally:
            del vars(self._module)["log"]
        if "loss" not in output:
            raise _refusal("training_step returned None, which skips a step: return a loss")
        for leaf in tree_leaves(output):
            if not isinstance(leaf, Tensor):
                raise _refusal(
                    f"training_step returned {leaf!r} beside the loss: a replay would return this"
                    " value in every step; return tensors"
                )
        memory = [storage_key(parameter) for parameter in self._parameters]
        gradients = [parameter.grad for parameter in self._parameters]
        return _Captured(shape, static, output, logged, numbers, memory, gradients)

    def _check_unchanged(self, captured: _Captured) -> None:
        for group, before in zip(self._optimizer.param_groups, captured.numbers, strict=True):
            for name, now in _numbers(group).items():
                if now != before.get(name):
                    raise _refusal(
                        f"{name} of the optimizer has changed from {before.get(name)} to {now}"
                        " since the step was captured, and a replay does not see that: do not"
                        " change it, or make it a tensor"
                    )
        if [storage_key(parameter) for parameter in self._parameters] != captured.memory:
            raise _refusal(
                "parameters have other memory than when the step was captured: change their values"
                " in place, for example with copy_()"
            )


def _numbers(group: dict[str, Any]) -> dict[str, Any]:
    """The options of an optimizer whose values are fixed in a graph."""
    return {name: value for name, value in group.items() if not isinstance(value, (Tensor, list))}


def _leaves(batch: Any) -> list[Tensor]:
    return [leaf for _, leaf in named_leaves(batch)]


def _shape(batch: Any) -> tuple[Any, ...] | None:
    """What batches of one graph have in common; None for one that has other than dense tensors."""
    leaves = list(named_leaves(batch))
    if not all(isinstance(leaf, Tensor) and not leaf.is_nested for _, leaf in leaves):
        return None
    return tuple((name, leaf.shape, leaf.dtype, leaf.device) for name, leaf in leaves)
