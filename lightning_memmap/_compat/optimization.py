"""Names of Lightning's automatic optimization."""

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

#: Hooks of an optimizer step that callbacks have too, and those of the module alone.
SHARED_HOOKS = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
MODULE_HOOKS = ("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "backward")


class DirectOptimization(_AutomaticOptimization):
    """A step of training without the hooks that nobody overrides.

    It does what Lightning's own step does, in the same order: training step, gradients to zero,
    backward, optimizer. Lightning's own is taken where somebody would notice the difference.

    Args:
        trainer: The Trainer; what its loop has counted goes on.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        super().__init__(trainer)
        self.optim_progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress
        self._reason: str | None = None
        self._told: str | None = None

    @override
    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: Any) -> dict[str, Any]:
        if batch_idx == 0 or self._told is None:
            self._reason = self._find_reason(optimizer)
            self._tell()
        trainer: Any = self.trainer
        if self._reason is not None or trainer.accumulate_grad_batches != 1:
            return super().run(optimizer, batch_idx, kwargs)
        progress, module = self.optim_progress.optimizer, trainer.lightning_module
        progress.step.increment_ready()
        # What `self.log` takes for the hook that calls it.
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
        """Why this step would not be the same as Lightning's; None where it is."""
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
            return f"precision={trainer.precision!r} has a part in it"
        if trainer.gradient_clip_val is not None:
            return f"gradient_clip_val={trainer.gradient_clip_val}"
        if not isinstance(trainer.profiler, PassThroughProfiler):
            return f"{type(trainer.profiler).__name__} times the hooks"
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is None or closure.default is inspect.Parameter.empty:
            return f"{type(optimizer).__name__}.step needs the closure"
        return None

    def _tell(self) -> None:
        said = self._reason or ""
        if said and said != self._told:
            rank_zero_info(f"skip_unused_hooks: all hooks of a step are called, since {said}")
        self._told = said


def skip_unused_hooks(trainer: L.Trainer) -> None:
    """Let automatic optimization call only those hooks of a step that somebody overrides."""
    loop: Any = trainer.fit_loop.epoch_loop
    if not isinstance(loop.automatic_optimization, DirectOptimization):
        loop.automatic_optimization = DirectOptimization(trainer)


#: Does a step of training with a batch, as Lightning does it; what it gave, ``loss`` by that name.
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
    """Let something else do the steps of automatic optimization.

    Args:
        trainer: The Trainer.
        run: Is given the batch and Lightning's own step; returns what that does. Where it does not
            call it, it must count the step; see `count_step`.
    """
    trainer.fit_loop.epoch_loop.automatic_optimization = _StepBy(trainer, run)


def run_steps_as_ever(trainer: L.Trainer) -> None:
    """Undo `run_steps_by`."""
    loop: Any = trainer.fit_loop.epoch_loop
    if isinstance(loop.automatic_optimization, _StepBy):
        progress = loop.automatic_optimization.optim_progress
        loop.automatic_optimization = _AutomaticOptimization(trainer)
        loop.automatic_optimization.optim_progress = progress


def count_step(trainer: L.Trainer) -> None:
    """Count an optimizer step, as Lightning's own does."""
    progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer
    progress.step.increment_ready()
    progress.zero_grad.increment_ready()
    progress.zero_grad.increment_started()
    progress.zero_grad.increment_completed()
    progress.step.increment_completed()


@contextmanager
def logging_in(module: Any, hook: str) -> Iterator[None]:
    """Let a module's ``self.log`` write as it does inside a hook."""
    before = module._current_fx_name
    module._current_fx_name = hook
    yield
    module._current_fx_name = before
