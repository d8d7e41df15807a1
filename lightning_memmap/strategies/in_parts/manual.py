"""What a replica's ``training_step`` is given for the Trainer, its strategy and its optimizers.

Replicas run the whole ``training_step``, and under manual optimization that steps optimizers. There
is one of each, for the module's own parameters. So where a replica calls one, it meets the others:
the first replica acts once for all, and the others go on with what it gave.
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

from lightning_memmap._compat.loops import (
    lightning_optimizers,
    view_of,
    view_of_strategy,
    view_of_trainer,
)
from lightning_memmap.strategies.in_parts.replicas import Replicas

#: Calls ``action`` once with what each replica brought: (name of the meeting, value, action).
Meet = Callable[[str, Any, Callable[[list[Any]], Any]], Any]


class ActsOnce:
    """What is done once for all replicas.

    Args:
        strategy: The strategy that runs the replicas.
        replicas: The replicas.
        backward: Runs backward for all replicas, given the loss of each.
        join: Puts together what each replica has given to a scheduler, such as a loss.
    """

    def __init__(
        self,
        strategy: Strategy,
        replicas: Replicas,
        backward: Callable[..., Any],
        join: Callable[[list[Any]], Any],
    ) -> None:
        self.strategy = strategy
        self.replicas = replicas
        self.backward = backward
        self._join = join
        self._numbers: dict[int, int] = {}
        self._originals: dict[int, tuple[Any, Any]] = {}

    def number_of(self, original: Any) -> int:
        """By which an optimizer or a scheduler is called in messages, the same in all replicas."""
        return self._numbers.setdefault(id(original), len(self._numbers))

    def original_of(self, value: Any) -> Any:
        """What a view stands for; the value itself where it is no view."""
        return self._originals.get(id(value), (value, value))[1]

    def note_view(self, view: Any, original: Any) -> None:
        """Remember what a view stands for."""
        self._originals[id(view)] = (view, original)

    def step(self, optimizer: Optimizer | LightningOptimizer, options: dict[str, Any]) -> Any:
        """Step an optimizer, and give the replicas the parameters that it leaves."""
        self.check_gradients()
        result = optimizer.step(**options)
        self.replicas.copy_out()
        return result

    def change_gradients(
        self, function: Callable[..., Any], *arguments: Any, **options: Any
    ) -> Any:
        """Call what changes the module's gradients, and give the replicas copies of them."""
        self.check_gradients()
        result = function(*arguments, **options)
        self.replicas.copy_gradients()
        return result

    def step_scheduler(self, scheduler: Any, given: list[Any]) -> Any:
        """Step a scheduler with what all replicas have given it."""
        arguments, options = self._join(given)
        return scheduler.step(*arguments, **options)

    def check_gradients(self) -> None:
        """Check that replicas have no gradients of which the module's are not the sum.

        Raises:
            RuntimeError: One has.
        """
        if self.replicas.have_gradients:
            raise RuntimeError(
                "a replica has gradients that self.manual_backward did not make: under memmap_dp"
                " call self.manual_backward(loss) and not loss.backward(), which knows nothing of"
                " the other replicas"
            )


class StandIns:
    """What one replica is given for optimizers, schedulers and the Trainer.

    Args:
        acts: What is done once for all replicas.
        index: The replica.
        meet: Meets the other replicas.
    """

    def __init__(self, acts: ActsOnce, index: int, meet: Meet) -> None:
        self._acts = acts
        self._index = index
        self._meet = meet
        self._made: dict[int, tuple[Any, Any]] = {}

    def of(self, value: Any) -> Any:
        """The view of an optimizer or of a scheduler, also of one that Lightning does not know;
        anything else itself."""
        original = self._acts.original_of(value)
        if isinstance(original, Optimizer):
            make: Callable[[Any], Any] = self._optimizer
        elif _is_scheduler(original):
            make = self._scheduler
        else:
            return value
        if id(original) not in self._made:
            view = make(original)
            self._acts.note_view(view, original)
            self._made[id(original)] = (original, view)
        return self._made[id(original)][1]

    def trainer(self, trainer: Trainer, results: Callable[[], Any]) -> Any:
        """A Trainer that is the real one but for its optimizers, schedulers and backward.

        Args:
            trainer: The real one.
            results: Gives what ``self.log`` writes to.
        """
        acts = self._acts
        strategy: Any = acts.strategy
        plain = [self.of(optimizer) for optimizer in strategy.optimizers]
        wrapped = [self.of(optimizer) for optimizer in lightning_optimizers(strategy)]
        precision = strategy.precision_plugin

        def backward(loss: Tensor, *arguments: Any, **options: Any) -> Any:
            return self._meet(
                "manual_backward",
                loss,
                lambda losses: acts.backward(losses, *arguments, **options),
            )

        def clip_gradients(*arguments: Any, **options: Any) -> Any:
            return self._meet(
                "clip_gradients",
                None,
                lambda _: acts.change_gradients(precision.clip_gradients, *arguments, **options),
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
                    dataclasses.replace(config, scheduler=self.of(config.scheduler))
                    for config in strategy.lr_scheduler_configs
                ],
            ),
        )

    def _optimizer(self, optimizer: Any) -> Any:
        acts, replicas = self._acts, self._acts.replicas
        plain = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else None
        number = acts.number_of(plain or optimizer)

        def step(closure: Any = None, **options: Any) -> Any:
            if closure is not None:
                raise ValueError(
                    "optimizer.step(closure=...) in a training_step: memmap_dp supports closures"
                    " under automatic optimization alone; call manual_backward before step(), or"
                    " use memmap_superbatch"
                )
            return self._meet(
                f"the step of optimizer {number}", None, lambda _: acts.step(optimizer, options)
            )

        def zero_grad(*arguments: Any, **options: Any) -> Any:
            return self._meet(
                f"zero_grad of optimizer {number}",
                None,
                lambda _: acts.change_gradients(optimizer.zero_grad, *arguments, **options),
            )

        def toggle_model(sync_grad: bool = True) -> AbstractContextManager[None]:
            return _toggled(replicas.module_of(self._index), view)

        members: dict[str, Any] = {"step": step, "zero_grad": zero_grad}
        if plain is not None:
            members |= {"optimizer": self.of(plain), "toggle_model": toggle_model}
        if self._index:
            twin = replicas.twins[self._index - 1]
            members["param_groups"] = property(
                lambda _: [
                    {**group, "params": [twin.parameters.get(p, p) for p in group["params"]]}
                    for group in optimizer.param_groups
                ]
            )
        view: Any = view_of(optimizer, **members)
        return view

    def _scheduler(self, scheduler: Any) -> Any:
        number = self._acts.number_of(scheduler)

        def step(*arguments: Any, **options: Any) -> Any:
            return self._meet(
                f"the step of scheduler {number}",
                (arguments, options),
                lambda given: self._acts.step_scheduler(scheduler, given),
            )

        return view_of(scheduler, step=step)


@contextmanager
def _toggled(module: Any, optimizer: Any) -> Iterator[None]:
    with module.toggled_optimizer(optimizer):
        yield


def _is_scheduler(value: Any) -> bool:
    """Whether a value is used like torch's schedulers, whatever class it has."""
    return callable(getattr(type(value), "step", None)) and isinstance(
        getattr(value, "optimizer", None), Optimizer
    )
