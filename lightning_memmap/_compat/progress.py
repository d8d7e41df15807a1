"""The position of a fit: the batches that weights were trained on, and the Trainer's counts."""

import weakref
from typing import Annotated, Any, NamedTuple

import msgspec
from lightning.pytorch.core.optimizer import _MockOptimizer
from torch.optim import Optimizer

from lightning_memmap._compat.signals import SignalDeferral

Count = Annotated[int, msgspec.Meta(ge=0)]


class FitPosition(msgspec.Struct, frozen=True):
    """The counts that a Trainer would have if it had just ended the last batch that counts.

    A batch counts once an optimizer has stepped on it. An interrupted batch does not count, nor do
    batches whose gradients are accumulated for the next optimizer step.
    """

    #: Batches of the epoch, and of all epochs.
    num_batches: Count
    total_batches: Count
    #: Lightning's ``global_step``.
    optimizer_steps: Count
    #: The step of the loggers.
    logged_steps: Count


class Delivery(NamedTuple):
    """The Trainer's counts when a batch was delivered."""

    processed: int
    global_step: int
    optimizer_steps: int
    logged_steps: int


class TrainerProgress:
    """Finds which of the delivered batches the Trainer's weights were trained on."""

    def __init__(self, trainer: Any) -> None:
        # A weak reference: the Trainer refers to the loader, which refers to this.
        self._trainer = weakref.ref(trainer)
        self._is_watching = False
        #: Steps of all optimizers, and the Trainer's count of started ones at the last step.
        self._optimizer_steps = 0
        self._counted_steps = -1
        #: Batches of all epochs up to the last one that an optimizer has stepped on; None if steps
        #: cannot be observed.
        self._stepped_batches: int | None = None

    def delivery(self) -> Delivery | None:
        """Return the Trainer's counts when a batch is delivered; None if it isn't training."""
        trainer: Any = self._trainer()
        if trainer is None or not trainer.training:
            return None
        loop = trainer.fit_loop.epoch_loop
        if not self._is_watching:
            self._watch(trainer)
        processed = loop.batch_progress.total.processed
        steps = loop.global_step, self._optimizer_steps
        return Delivery(processed, *steps, loop._batches_that_stepped)

    def num_untrained(self, last: Delivery) -> int:
        """Count the last delivered batches that the weights were not trained on.

        They may have begun in the previous epoch.
        """
        trainer: Any = self._trainer()
        if trainer is None:
            return 0
        loop = trainer.fit_loop.epoch_loop
        progress = loop.batch_progress
        is_processed = progress.total.processed > last.processed
        if not trainer.lightning_module.automatic_optimization:
            if self._stepped_batches is None:
                return int(not is_processed)
            return max(0, last.processed + 1 - self._stepped_batches)
        # The current batch, until an optimizer steps or its step ends, and the batches whose
        # gradients wait for the rest of their group, since a checkpoint has no gradients.
        now = loop.global_step, self._optimizer_steps
        if not is_processed and now != (last.global_step, last.optimizer_steps):
            return 0
        num_processed = progress.current.processed
        is_group_open = (
            num_processed != trainer.num_training_batches
            and not trainer.strategy.handles_gradient_accumulation
        )
        waiting = int(num_processed) % int(trainer.accumulate_grad_batches) if is_group_open else 0
        return waiting + int(not is_processed)

    @property
    def is_manual(self) -> bool:
        """Whether the module itself decides when an optimizer steps."""
        trainer: Any = self._trainer()
        return trainer is not None and not trainer.lightning_module.automatic_optimization

    def is_last(self, num_batches: int) -> bool:
        """Return whether an epoch ends after a number of batches."""
        trainer: Any = self._trainer()
        return trainer is not None and num_batches >= trainer.num_training_batches

    def num_delivered(self, last: Delivery) -> int | None:
        """Count the batches of the epoch that were delivered; None without a Trainer."""
        trainer: Any = self._trainer()
        if trainer is None:
            return None
        progress = trainer.fit_loop.epoch_loop.batch_progress
        is_under_way = progress.total.processed == last.processed
        num_processed: int = progress.current.processed
        return num_processed + int(is_under_way)

    def position(self, last: Delivery, num_batches: int, num_untrained: int) -> FitPosition:
        """Return the position of the fit after the first batches of an epoch."""
        trainer: Any = self._trainer()
        loop = trainer.fit_loop.epoch_loop
        steps = step_progress(trainer).total
        # An optimizer has stepped, and the Trainer was interrupted before it counted that.
        is_uncounted = steps.ready == self._counted_steps == steps.completed + 1
        # With manual optimization Lightning counts every batch for the loggers, and otherwise none
        # of those that wait.
        is_waiting = int(num_untrained > 0)
        uncounted_batches = num_untrained if self.is_manual else is_waiting
        return FitPosition(
            num_batches,
            last.processed + 1 - num_untrained,
            loop.global_step + int(is_uncounted),
            last.logged_steps + 1 - uncounted_batches,
        )

    def _watch(self, trainer: Any) -> None:
        """Count the steps of optimizers. Lightning counts a step only after all of its hooks."""
        this = weakref.ref(self)
        batches = trainer.fit_loop.epoch_loop.batch_progress
        steps = step_progress(trainer).total
        # Signals may raise in the middle of an update, or save a checkpoint there.
        signals = SignalDeferral()
        # A finalizer lives as long as the program. The handlers in `signals` refer to the Trainer,
        # which refers to this.
        weakref.finalize(self, _close, weakref.ref(signals))

        def begin(*_: Any) -> None:
            signals.begin()

        def count(*_: Any) -> None:
            if (progress := this()) is not None:
                progress._optimizer_steps += 1
                progress._counted_steps = steps.ready
                # In `on_train_batch_start`, the batch that begins has no gradients yet.
                current = batches.current
                is_beginning = max(current.started, current.processed) < current.ready
                if progress._stepped_batches is not None:
                    progress._stepped_batches = batches.total.ready - int(is_beginning)
            signals.end()

        # Lightning takes other classes too, which have no hooks. Its own is of a module that has
        # no optimizer.
        optimizers = [
            optimizer
            for optimizer in trainer.optimizers
            if isinstance(optimizer, Optimizer) and not isinstance(optimizer, _MockOptimizer)
        ]
        for optimizer in optimizers:
            weakref.finalize(self, optimizer.register_step_pre_hook(begin).remove)
            weakref.finalize(self, optimizer.register_step_post_hook(count).remove)
        if optimizers and len(optimizers) == len(trainer.optimizers):
            self._stepped_batches = batches.total.processed
        if optimizers:
            signals.install()
        self._is_watching = True


def accumulation_group(trainer: Any) -> tuple[int, range]:
    """Return the number of the current batch of an epoch, and all with which it is accumulated."""
    batch = int(trainer.fit_loop.epoch_loop.batch_idx)
    size = trainer.accumulate_grad_batches
    start = batch // size * size
    # The number of batches is infinite if the loader has no length.
    return batch, range(start, int(min(start + size, trainer.num_training_batches)))


def _close(signals: "weakref.ref[SignalDeferral]") -> None:
    if (deferral := signals()) is not None:
        deferral.close()


def step_progress(trainer: Any) -> Any:
    """Return the Trainer's counts of optimizer steps, of all epochs and of the current one."""
    loop = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization:
        return loop.automatic_optimization.optim_progress.optimizer.step
    return loop.manual_optimization.optim_step_progress
