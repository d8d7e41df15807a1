"""What a replica's ``training_step`` is given for the Trainer, its strategy and its optimizers.

Replicas run the whole ``training_step``, and under manual optimization that steps optimizers. There
is one of each, for the module's own parameters. So where a replica calls one, it meets the others:
the first replica acts once for all, and the others go on with what it gave.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_memmap._compat.loops import (
    lightning_optimizers,
    view_of,
    view_of_strategy,
    view_of_trainer,
)
from lightning_memmap.strategies.in_parts.replicas import Twin

#: Calls ``action`` once with what each replica brought: (name of the meeting, value, action).
Meet = Callable[[str, Any, Callable[[list[Any]], Any]], Any]


class ReplicaTrainers:
    """Makes the Trainer that the module of one replica is given.

    Args:
        strategy: The strategy that runs the replicas.
        backward: Runs backward for all replicas, given the loss of each.
        before_step: Called before each optimizer step.
        after_step: Called after each optimizer step.
    """

    def __init__(
        self,
        strategy: Strategy,
        backward: Callable[..., Any],
        before_step: Callable[[], None],
        after_step: Callable[[], None],
    ) -> None:
        self._strategy = strategy
        self._backward = backward
        self._before_step = before_step
        self._after_step = after_step

    def make(
        self,
        trainer: Trainer,
        module: LightningModule,
        twin: Twin | None,
        results: Callable[[], Any],
        meet: Meet,
    ) -> Any:
        """A Trainer that is the real one but for what follows.

        Args:
            trainer: The real one.
            module: The module, or the replica of it.
            twin: Knows the parameters of the replica; None for replica 0.
            results: Gives what ``self.log`` writes to.
            meet: Meets the other replicas.
        """
        strategy: Any = self._strategy
        plain = [
            self._optimizer(index, optimizer, module, twin, meet)
            for index, optimizer in enumerate(strategy.optimizers)
        ]
        wrapped = [
            self._optimizer(index, optimizer, module, twin, meet, plain[index])
            for index, optimizer in enumerate(lightning_optimizers(strategy))
        ]
        precision = strategy.precision_plugin

        def backward(loss: Tensor, *arguments: Any, **options: Any) -> Any:
            return meet(
                "manual_backward",
                loss,
                lambda losses: self._backward(losses, *arguments, **options),
            )

        def clip_gradients(*arguments: Any, **options: Any) -> Any:
            return meet(
                "clip_gradients",
                None,
                lambda _: precision.clip_gradients(*arguments, **options),
            )

        return view_of_trainer(
            trainer,
            results,
            strategy=view_of_strategy(
                strategy,
                wrapped,
                optimizers=plain,
                backward=backward,
                precision_plugin=view_of(precision, clip_gradients=clip_gradients),
                lr_scheduler_configs=[
                    dataclasses.replace(config, scheduler=_scheduler(index, config.scheduler, meet))
                    for index, config in enumerate(strategy.lr_scheduler_configs)
                ],
            ),
        )

    def _optimizer(
        self,
        index: int,
        optimizer: Any,
        module: LightningModule,
        twin: Twin | None,
        meet: Meet,
        plain: Any = None,
    ) -> Any:
        def step(closure: Any = None, **options: Any) -> Any:
            if closure is not None:
                raise ValueError(
                    "optimizer.step(closure=...) in a training_step: memmap_dp supports closures"
                    " under automatic optimization alone; call manual_backward before step(), or"
                    " use memmap_superbatch"
                )
            return meet(
                f"the step of optimizer {index}", None, lambda _: self._step(optimizer, options)
            )

        def zero_grad(*arguments: Any, **options: Any) -> Any:
            return meet(
                f"zero_grad of optimizer {index}",
                None,
                lambda _: optimizer.zero_grad(*arguments, **options),
            )

        @contextmanager
        def toggle_model(sync_grad: bool = True) -> Iterator[None]:
            with module.toggled_optimizer(view):
                yield

        members: dict[str, Any] = {"step": step, "zero_grad": zero_grad}
        if plain is not None:
            members |= {"optimizer": plain, "toggle_model": toggle_model}
        if twin is not None:
            members["param_groups"] = property(
                lambda _: [
                    {**group, "params": [twin.parameters.get(p, p) for p in group["params"]]}
                    for group in optimizer.param_groups
                ]
            )
        view: Any = view_of(optimizer, **members)
        return view

    def _step(self, optimizer: Optimizer | LightningOptimizer, options: dict[str, Any]) -> Any:
        self._before_step()
        result = optimizer.step(**options)
        self._after_step()
        return result


def _scheduler(index: int, scheduler: Any, meet: Meet) -> Any:
    def step(*arguments: Any, **options: Any) -> Any:
        return meet(
            f"the step of scheduler {index}", None, lambda _: scheduler.step(*arguments, **options)
        )

    return view_of(scheduler, step=step)
