"""Private names of Lightning's automatic optimization."""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
from lightning.pytorch.loops.optimization.automatic import (
    Closure,
    ClosureResult,
    _AutomaticOptimization,
)
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer
from typing_extensions import override

#: Hooks of an optimizer step: those of modules and callbacks, and those of modules only.
SHARED_HOOKS = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
MODULE_HOOKS = ("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "backward")


class DirectOptimization(_AutomaticOptimization):
    """A training step without the hooks that nobody overrides.

    It does the same as Lightning's own step in the same order: training step, zeroing of
    gradients, backward, optimizer. Lightning's own step runs wherever there would be a difference.

    Args:
        trainer: The Trainer, whose counts are continued.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        super().__init__(trainer)
        self.optim_progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress
        self._reason: str | None = None
        self._announced: str | None = None

    @override
    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        if batch_idx == 0 or self._announced is None:
            self._reason = self._find_reason(optimizer)
            self._announce()
        trainer: Any = self.trainer
        if self._reason is not None or trainer.accumulate_grad_batches != 1:
            return super().run(optimizer, batch_idx, kwargs)
        progress, module = self.optim_progress.optimizer, trainer.lightning_module
        progress.step.increment_ready()
        # `self.log` reads the name of the calling hook here.
        module._current_fx_name = "training_step"
        output = trainer.strategy.training_step(*kwargs.values())
        module._current_fx_name = None
        result = ClosureResult.from_training_step_output(output)
        if result.closure_loss is None:
            Closure.warning_cache.warn(
                "`training_step` returned `None`. If this was on purpose, ignore this warning..."
            )
        progress.zero_grad.increment_ready()
        progress.zero_grad.increment_started()
        optimizer.zero_grad()
        progress.zero_grad.increment_completed()
        if result.closure_loss is not None:
            module.backward(result.closure_loss)
        optimizer.step()
        progress.step.increment_completed()
        return {} if result.loss is None else result.asdict()

    def _find_reason(self, optimizer: Optimizer) -> str | None:
        """Why this step would differ from Lightning's; None if it would not."""
        trainer: Any = self.trainer
        module, strategy = trainer.lightning_module, trainer.strategy
        for name in (*SHARED_HOOKS, *MODULE_HOOKS):
            if is_overridden(name, module):
                return f"{type(module).__name__}.{name} is overridden"
        for callback in trainer.callbacks:
            for name in SHARED_HOOKS:
                if is_overridden(name, callback):
                    return f"{type(callback).__name__}.{name} is overridden"
        for name in ("optimizer_step", "backward"):
            if getattr(type(strategy), name) is not getattr(Strategy, name):
                return f"{type(strategy).__name__}.{name} is overridden"
        if type(strategy.precision_plugin) is not Precision:
            return f"precision={trainer.precision!r} adds to it"
        if trainer.gradient_clip_val is not None:
            return f"gradient_clip_val={trainer.gradient_clip_val}"
        if not isinstance(trainer.profiler, PassThroughProfiler):
            return f"{type(trainer.profiler).__name__} times the hooks"
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is None or closure.default is inspect.Parameter.empty:
            return f"{type(optimizer).__name__}.step needs the closure"
        return None

    def _announce(self) -> None:
        reason = self._reason or ""
        if reason and reason != self._announced:
            rank_zero_info(f"skip_unused_hooks: all hooks of a step are called, since {reason}")
        self._announced = reason


def skip_unused_hooks(trainer: L.Trainer) -> None:
    """Let automatic optimization leave out the hooks of a step where none is overridden.

    Args:
        trainer: The Trainer, before it trains. Calling this again changes nothing.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    if not isinstance(loop.automatic_optimization, DirectOptimization):
        loop.automatic_optimization = DirectOptimization(trainer)


#: Lightning's own training step with a batch; it returns a dict, with the loss under ``loss``.
Step = Callable[[Any], dict[str, Any]]


class _StepBy(_AutomaticOptimization):
    def __init__(self, trainer: L.Trainer, run: Callable[[Any, Step], dict[str, Any]]) -> None:
        super().__init__(trainer)
        self.optim_progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress
        self._run_step = run

    @override
    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        own = super().run

        def step(batch: Any) -> dict[str, Any]:
            return own(optimizer, batch_idx, OrderedDict({**kwargs, "batch": batch}))

        return self._run_step(kwargs["batch"], step)


def run_steps_by(trainer: L.Trainer, run: Callable[[Any, Step], dict[str, Any]]) -> None:
    """Replace the steps of automatic optimization.

    Args:
        trainer: The Trainer.
        run: Receives the batch and Lightning's own step, and returns what that step returns. If
            it does not call it, it must count the step itself; see `count_step`.
    """
    trainer.fit_loop.epoch_loop.automatic_optimization = _StepBy(trainer, run)


def run_steps_as_ever(trainer: L.Trainer) -> None:
    """Undo `run_steps_by`.

    Args:
        trainer: The Trainer; one with Lightning's own steps stays as it is.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    if isinstance(loop.automatic_optimization, _StepBy):
        progress = loop.automatic_optimization.optim_progress
        loop.automatic_optimization = _AutomaticOptimization(trainer)
        loop.automatic_optimization.optim_progress = progress


def count_step(trainer: L.Trainer) -> None:
    """Count an optimizer step, as Lightning's own step does.

    Args:
        trainer: The Trainer that is fitting.
    """
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer
    progress.step.increment_ready()
    progress.zero_grad.increment_ready()
    progress.zero_grad.increment_started()
    progress.zero_grad.increment_completed()
    progress.step.increment_completed()


@contextmanager
def logging_in(module: Any, hook: str) -> Iterator[None]:
    """Let a module's ``self.log`` work as it does inside a hook.

    Args:
        module: The LightningModule.
        hook: Name of the hook, such as ``training_step``.
    """
    before = module._current_fx_name
    module._current_fx_name = hook
    try:
        yield
    finally:
        module._current_fx_name = before
