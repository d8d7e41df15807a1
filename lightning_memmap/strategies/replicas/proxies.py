"""Proxies of the Trainer, its strategy and its optimizers, for a replica's ``training_step``.

Replicas run the whole ``training_step``, which steps the optimizers under manual optimization. But
there is only one of each optimizer, for the module's own parameters. So the call of a replica is a
barrier: replica 0 makes the call once for all, and the others continue with its result.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_memmap._compat.loops import (
    lightning_optimizers,
    make_proxy,
    make_strategy_proxy,
    make_trainer_proxy,
    original_of,
)
from lightning_memmap.strategies.replicas.module import Replicas

#: Calls ``action`` once with the values of all replicas: (name, value of this replica, action).
Barrier = Callable[[str, Any, Callable[[list[Any]], Any]], Any]


class CollectiveActions:
    """The actions that run once for all replicas.

    Args:
        strategy: The strategy that runs the replicas.
        replicas: The replicas.
        backward: Runs the backward pass of all replicas, given the loss of each.
        merge: Merges what each replica gave to a scheduler, such as a metric.
    """

    def __init__(
        self,
        strategy: Strategy,
        replicas: Replicas,
        backward: Callable[..., Any],
        merge: Callable[[list[Any]], Any],
    ) -> None:
        self.strategy = strategy
        self.replicas = replicas
        self.backward = backward
        self.merge = merge
        self._numbers: dict[int, int] = {}
        self._is_stepping = False

    def number_of(self, original: Any) -> int:
        """The number of an optimizer or a scheduler in messages, the same in all replicas.

        Args:
            original: The optimizer or scheduler itself, not a proxy.

        Returns:
            The number, from 0, in the order of the first calls.
        """
        return self._numbers.setdefault(id(original), len(self._numbers))

    def step(self, optimizer: Optimizer | LightningOptimizer, options: dict[str, Any]) -> Any:
        """Step an optimizer, and give the replicas the new parameters.

        Args:
            optimizer: The optimizer of the module's own parameters.
            options: Keyword arguments of its ``step``.

        Returns:
            What its ``step`` returned.

        Raises:
            RuntimeError: As in `check_gradients`.
        """
        self.check_gradients()
        self._is_stepping = True
        try:
            result = optimizer.step(**options)
        finally:
            self._is_stepping = False
        self.replicas.broadcast()
        return result

    @contextmanager
    def sole_steps(self) -> Iterator[None]:
        """Refuse, within the context, steps of the module's optimizers that each replica makes.

        Raises:
            RuntimeError: A replica steps an optimizer that has parameters of the module, and is not
                a proxy.
        """
        handle = register_optimizer_step_pre_hook(self._check_step)
        try:
            yield
        finally:
            handle.remove()

    def _check_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_stepping or not self.replicas.others:
            return
        own = set(map(id, self.replicas.module.parameters()))
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            raise RuntimeError(
                f"a training_step steps the {type(optimizer).__name__} in an object that memmap_dp"
                " does not know, where every replica would step it: keep optimizers and schedulers"
                " as attributes of the module, or in lists, tuples and dicts, use"
                " self.optimizers(), or train with memmap_superbatch"
            )

    def change_gradients(
        self, function: Callable[..., Any], *arguments: Any, **options: Any
    ) -> Any:
        """Call a function that changes the module's gradients, and give the replicas copies.

        Args:
            function: The function, such as ``zero_grad`` of an optimizer.
            *arguments: Its positional arguments.
            **options: Its keyword arguments.

        Returns:
            What the function returned.

        Raises:
            RuntimeError: As in `check_gradients`.
        """
        self.check_gradients()
        result = function(*arguments, **options)
        self.replicas.broadcast_gradients()
        return result

    def check_gradients(self) -> None:
        """Check that no replica has gradients that the module's do not include.

        Raises:
            RuntimeError: A replica has some.
        """
        if self.replicas.have_gradients:
            raise RuntimeError(
                "a replica has gradients that self.manual_backward did not compute: under memmap_dp"
                " call self.manual_backward(loss) and not loss.backward(), which leaves out the"
                " other replicas"
            )


class ReplicaProxies:
    """The proxies of optimizers, schedulers and the Trainer for one replica.

    Args:
        actions: What runs once for all replicas.
        index: The replica, from 0.
        barrier: Waits for the other replicas.
    """

    def __init__(self, actions: CollectiveActions, index: int, barrier: Barrier) -> None:
        self._actions = actions
        self._index = index
        self._barrier = barrier
        self._made: dict[int, tuple[Any, Any]] = {}

    def proxy_of(self, value: Any) -> Any:
        """The proxy of an optimizer or a scheduler, including those that Lightning does not know.

        Args:
            value: Any object. The proxy of another replica is treated as its original.

        Returns:
            The same proxy in each call; the value itself if it is neither.
        """
        original = original_of(value)
        if isinstance(original, Optimizer):
            make: Callable[[Any], Any] = self._optimizer
        elif _is_scheduler(original):
            make = self._scheduler
        else:
            return value
        if id(original) not in self._made:
            self._made[id(original)] = (original, make(original))
        return self._made[id(original)][1]

    def trainer(self, trainer: Trainer, results: Callable[[], Any]) -> Any:
        """The proxy of the Trainer: its optimizers, schedulers and backward are proxies.

        Args:
            trainer: The Trainer.
            results: Returns what ``self.log`` writes to.

        Returns:
            The proxy, which a replica's module has as its ``trainer`` during a step.
        """
        actions = self._actions
        strategy: Any = actions.strategy
        plain = [self.proxy_of(optimizer) for optimizer in strategy.optimizers]
        wrapped = [self.proxy_of(optimizer) for optimizer in lightning_optimizers(strategy)]
        precision = strategy.precision_plugin

        def backward(loss: Tensor, *arguments: Any, **options: Any) -> Any:
            return self._barrier(
                "manual_backward",
                loss,
                lambda losses: actions.backward(losses, *arguments, **options),
            )

        def clip_gradients(*arguments: Any, **options: Any) -> Any:
            return self._barrier(
                "clip_gradients",
                None,
                lambda _: actions.change_gradients(precision.clip_gradients, *arguments, **options),
            )

        return make_trainer_proxy(
            trainer,
            results,
            strategy=make_strategy_proxy(
                strategy,
                wrapped,
                optimizers=plain,
                backward=backward,
                precision_plugin=make_proxy(precision, clip_gradients=clip_gradients),
                lr_scheduler_configs=[
                    dataclasses.replace(config, scheduler=self.proxy_of(config.scheduler))
                    for config in strategy.lr_scheduler_configs
                ],
            ),
        )

    def _optimizer(self, optimizer: Any) -> Any:
        actions, replicas = self._actions, self._actions.replicas
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else None
        number = actions.number_of(plain or optimizer)

        def step(closure: Any = None, **options: Any) -> Any:
            if closure is not None:
                raise ValueError(
                    "optimizer.step(closure=...) in a training_step: memmap_dp supports closures"
                    " under automatic optimization alone; call manual_backward before step(), or"
                    " use memmap_superbatch"
                )
            return self._barrier(
                f"the step of optimizer {number}", None, lambda _: actions.step(optimizer, options)
            )

        def zero_grad(*arguments: Any, **options: Any) -> Any:
            return self._barrier(
                f"zero_grad of optimizer {number}",
                None,
                lambda _: actions.change_gradients(optimizer.zero_grad, *arguments, **options),
            )

        def toggle_model(sync_grad: bool = True) -> AbstractContextManager[None]:
            return replicas.module_of(self._index).toggled_optimizer(proxy)

        overrides: dict[str, Any] = {"step": step, "zero_grad": zero_grad}
        if plain is not None:
            overrides |= {"optimizer": self.proxy_of(plain), "toggle_model": toggle_model}
        if self._index:
            own = replicas.others[self._index - 1]
            overrides["param_groups"] = property(
                lambda _: [
                    {**group, "params": [own.parameters.get(p, p) for p in group["params"]]}
                    for group in optimizer.param_groups
                ]
            )
        proxy: Any = make_proxy(optimizer, **overrides)
        return proxy

    def _scheduler(self, scheduler: Any) -> Any:
        number, merge = self._actions.number_of(scheduler), self._actions.merge

        def step_all(given: list[Any]) -> Any:
            arguments, options = merge(given)
            return scheduler.step(*arguments, **options)

        def step(*arguments: Any, **options: Any) -> Any:
            return self._barrier(f"the step of scheduler {number}", (arguments, options), step_all)

        return make_proxy(scheduler, step=step)


def _is_scheduler(value: Any) -> bool:
    """Whether a value has the interface of torch's schedulers, whatever its class."""
    return callable(getattr(type(value), "step", None)) and isinstance(
        getattr(value, "optimizer", None), Optimizer
    )
