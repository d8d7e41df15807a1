"""Sets the Trainer's counters to where the fit stood that a checkpoint was saved from."""

from functools import partial
from typing import Any

from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loops.loop import _Loop

from lightning_memmap._compat.loops import run_once
from lightning_memmap._compat.progress import FitPosition, step_progress

# The Trainer counts epochs and batches as ready, started, processed and completed, in this order.
# It resumes correctly from a checkpoint of `on_train_batch_end` (the batch is processed, but not
# completed), of a validation step, of `on_validation_end`, and, without `max_steps`, of
# `on_train_epoch_end` (the epoch is processed, but not completed). For these nothing is changed,
# except that an epoch that is over is counted as completed. In a fit with 9 batches per epoch:
#
#   saved                               epochs  batches  resumed as if saved
#   in batch 4, before the update       1110    4433     at the end of batch 3
#   in batch 4, after the update        1110    4433     at the end of batch 4
#   after `max_steps=4`                 1111    4444     at the end of batch 4
#   at the end of batch 9               1110    9998     before epoch 1 begins
#   by a resumed fit that is over       1111    0000     before epoch 1 begins


def settle_counters(
    trainer: Any, saved: tuple[int, FitPosition] | None, is_validating: bool | None
) -> None:
    """Continue a resumed fit with the first batch that the weights were not trained on.

    Args:
        trainer: It has restored its counters, and its loops have not begun.
        saved: The epoch and the position that a data module saved; None if it saved none.
        is_validating: Whether a validation was running; None if a data module did not save it.
    """
    fit_loop = trainer.fit_loop
    if not (fit_loop.restarting or fit_loop._loaded_from_state_dict):
        return
    epochs = fit_loop.epoch_progress.current
    batches = fit_loop.epoch_loop.batch_progress
    current = batches.current
    epoch = epochs.started - 1
    if epochs.started < epochs.ready:
        # Saved as the epoch began. The batches still belong to the previous epoch.
        _begin_epoch(trainer, epochs.started)
    elif current.ready == 0 and epochs.processed == epochs.started == epochs.completed:
        # Saved by a fit that was resumed between two epochs and had nothing left to do. The
        # position that the data module saved is of the epoch before.
        _begin_epoch(trainer, epochs.started)
    elif epoch >= 0:
        if saved is not None and saved[0] not in (epoch, epoch - 1):
            saved = None
        target, position = saved or (epoch, None)
        num_batches = current.processed if position is None else position.num_batches
        is_counted = epochs.processed == epochs.started
        # Gradients that wait for an optimizer step in the next epoch get none after the last one.
        is_end = is_counted and 0 <= (trainer.max_epochs or -1) <= epochs.processed
        # `on_train_batch_start` may have ended the epoch, and skipped the last batch.
        is_over = num_batches >= current.ready or current.started < current.processed
        if batches.is_last_batch and (is_end or (target == epoch and is_over)):
            _settle_ended_epoch(trainer, epoch, position, is_counted, is_validating)
        elif is_counted or (
            position is not None and (target, num_batches) != (epoch, current.ready)
        ):
            _settle_batch(trainer, target, num_batches, position)
        elif current.ready == 0:
            _begin_epoch(trainer, epoch)
        elif current.completed == current.processed:
            if is_validating is False:
                _settle_batch(trainer, epoch, num_batches, position)
            else:
                _settle_validation(trainer, bool(is_validating))
    if epochs.processed < epochs.started:
        _accumulate_as_scheduled(trainer)


def _settle_ended_epoch(
    trainer: Any,
    epoch: int,
    position: FitPosition | None,
    is_counted: bool,
    is_validating: bool | None,
) -> None:
    loop = trainer.fit_loop.epoch_loop
    current = loop.batch_progress.current
    if is_counted:
        _begin_epoch(trainer, epoch + 1)
    elif current.completed < current.processed or current.processed < current.ready:
        if position is not None:
            _settle_batch(trainer, epoch, position.num_batches, position)
        loop._batches_that_stepped += 1
        _begin_epoch(trainer, epoch + 1)
    elif is_validating is not False:
        _settle_validation(trainer, bool(is_validating))


def _settle_validation(trainer: Any, is_validating: bool) -> None:
    """Resume with the validation that a checkpoint was saved in, unless it was over."""
    progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    has_ended = progress.is_last_batch and progress.current.completed == progress.current.ready
    if not has_ended and (is_validating or progress.current.ready > 0):
        # The Trainer does so after a checkpoint of a validation step.
        for counts in (progress.total, progress.current):
            counts.ready = counts.started = 1
            counts.processed = counts.completed = 0
        progress.is_last_batch = False


def _settle_batch(trainer: Any, epoch: int, num_batches: int, position: FitPosition | None) -> None:
    """Set the counters to the end of a batch of an epoch, or to the epoch's beginning."""
    fit_loop = trainer.fit_loop
    loop = fit_loop.epoch_loop
    progress = loop.batch_progress
    is_same_epoch = epoch == fit_loop.epoch_progress.current.started - 1
    has_stepped = is_same_epoch and num_batches > progress.current.processed
    progress.is_last_batch &= is_same_epoch and num_batches >= progress.current.ready
    total = progress.total.processed
    if position is not None:
        total = position.total_batches
        steps = step_progress(trainer)
        steps.current.completed = steps.current.ready
        steps.total.ready = steps.total.completed = position.optimizer_steps
        loop._batches_that_stepped = position.logged_steps
    for counts, number in ((progress.total, total), (progress.current, num_batches)):
        counts.ready = counts.started = counts.processed = counts.completed = number
    if num_batches == 0:
        _begin_epoch(trainer, epoch)
        return
    # As if saved at its end. The Trainer adds what is subtracted here.
    progress.total.completed -= 1
    progress.current.completed -= 1
    loop._batches_that_stepped -= 1
    _count_epochs(trainer, epoch, epoch + 1)
    fit_loop.restarting = True
    if has_stepped:
        _step_schedulers(trainer)


def _begin_epoch(trainer: Any, epoch: int) -> None:
    """Set the counters to where an epoch is about to begin."""
    fit_loop = trainer.fit_loop
    batches = fit_loop.epoch_loop.batch_progress
    counts = batches.total
    counts.started = counts.processed = counts.completed = counts.ready
    batches.reset_on_run()
    _count_epochs(trainer, epoch, epoch)
    # The setter of `fit_loop` would not let an epoch begin if there is `max_steps`.
    _Loop.restarting.fset(fit_loop, False)  # type: ignore[attr-defined]


def _count_epochs(trainer: Any, completed: int, started: int) -> None:
    progress = trainer.fit_loop.epoch_progress
    earlier = progress.total.ready - progress.current.ready
    for counts, before in ((progress.total, earlier), (progress.current, 0)):
        counts.ready = counts.started = before + started
        counts.processed = counts.completed = before + completed


def _step_schedulers(trainer: Any) -> None:
    """Step the schedulers for a batch that an optimizer had stepped on when it was interrupted."""
    loop = trainer.fit_loop.epoch_loop
    for optimizer in trainer.optimizers:
        # A scheduler looks here, and would otherwise warn that it steps before the optimizer.
        optimizer._opt_called = True
    loop._update_learning_rates("step", update_plateau_schedulers=False)
    if loop._num_ready_batches_reached():
        loop._update_learning_rates("epoch", update_plateau_schedulers=False)


def _accumulate(num_batches: int, trainer: Any) -> None:
    trainer.accumulate_grad_batches = num_batches


def _accumulate_as_scheduled(trainer: Any) -> None:
    """Do in a resumed epoch what `GradientAccumulationScheduler` does when an epoch begins."""
    for callback in trainer.callbacks:
        if isinstance(callback, GradientAccumulationScheduler):
            # Not yet: at its start the callback checks that no other number was set.
            number = callback.get_accumulate_grad_batches(trainer.current_epoch)
            run_once(trainer, "on_train_start", partial(_accumulate, number))
