"""Private names of Lightning's loops and loaders."""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import lightning as L
from lightning.pytorch import callbacks
from lightning.pytorch.overrides import distributed
from typing_extensions import override

from lightning_memmap._compat.required import missing

#: Callbacks that average weights of the whole module; Lightning has them since 2.6.
WEIGHT_AVERAGING: tuple[type[L.Callback], ...] = tuple(
    getattr(callbacks, name) for name in ("WeightAveraging",) if hasattr(callbacks, name)
)
#: Without it, prediction writers are given no rows.
_SAMPLER: Any = getattr(distributed, "_IndexBatchSamplerWrapper", object)


def fetched_batch(fetcher: Any, strategy: str) -> Any:
    """Return the batch that a step with ``dataloader_iter`` took last."""
    if not hasattr(fetcher, "_batch"):
        path = f"{type(fetcher).__module__}:{type(fetcher).__name__}._batch"
        raise missing(strategy, path, "a training_step that takes batch instead of dataloader_iter")
    return fetcher._batch


class BatchIndices(_SAMPLER):  # type: ignore[misc]
    """Where Lightning looks for the rows of a batch, for prediction writers."""

    def __init__(self, sampler: Any, rows: Sequence[list[int]]) -> None:
        self.sampler = sampler
        self.seen_batch_indices: Any = rows


class _RenewTrainLoader(L.Callback):
    def __init__(self, epoch: int, num_steps: int) -> None:
        self._epoch = epoch
        self._num_steps = num_steps

    @override
    def on_train_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch > self._epoch:
            # The checkpoint was saved at the last step of its epoch. The Trainer counts the next
            # epoch from zero only if the completed steps reach the steps of an epoch.
            trainer.fit_loop.epoch_loop.batch_progress.current.completed = self._num_steps
            self._renew(trainer)

    @override
    def on_train_epoch_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch >= self._epoch:
            self._renew(trainer)

    def _renew(self, trainer: Any) -> None:
        trainer.fit_loop._combined_loader = None
        _remove(self, trainer)


def _remove(callback: L.Callback, trainer: Any) -> None:
    # A new list: the Trainer is iterating over this one, and would skip the next callback.
    trainer.callbacks = [each for each in trainer.callbacks if each is not callback]


def renew_train_loader_after_epoch(trainer: Any, epoch: int, num_steps: int) -> None:
    """Make the Trainer request the training loader, and its length, again after an epoch."""
    # It does so once per fit. An epoch has another number of steps than the next one if it is
    # resumed from a checkpoint of another number of data devices, or one of them leaves steps out.
    trainer.callbacks.append(_RenewTrainLoader(epoch, num_steps))


class _Counts(NamedTuple):
    """What a Trainer had counted when a batch was delivered."""

    processed: int
    global_step: int
    optimizer_steps: int


class TrainerProgress:
    """Finds which of the delivered batches the Trainer's weights were trained on."""

    def __init__(self, trainer: Any) -> None:
        # A weak reference: the Trainer refers to the loader, which refers to this.
        self._trainer = weakref.ref(trainer)
        self._optimizer_steps = 0
        self._is_watching = False

    def counts(self) -> _Counts | None:
        """The Trainer's counts, noted when a batch is delivered; None where it does not train."""
        trainer: Any = self._trainer()
        if trainer is None or not trainer.training:
            return None
        if not self._is_watching:
            self._watch(trainer.optimizers)
        return self._now(trainer)

    def _now(self, trainer: Any) -> _Counts:
        loop = trainer.fit_loop.epoch_loop
        processed = loop.batch_progress.total.processed
        return _Counts(processed, loop.global_step, self._optimizer_steps)

    def num_untrained(self, noted: _Counts) -> int:
        """The number of delivered batches, at the end, that the weights were not trained on."""
        # The current batch, until an optimizer steps or its step ends, and the batches whose
        # gradients wait for the rest of their group, since a checkpoint has no gradients.
        trainer: Any = self._trainer()
        if trainer is None:
            return 0
        loop, now = trainer.fit_loop.epoch_loop, self._now(trainer)
        num_processed = loop.batch_progress.current.processed
        is_processed = now.processed > noted.processed
        if not is_processed and now[1:] != noted[1:]:
            return 0
        is_group_open = (
            num_processed != trainer.num_training_batches
            and not trainer.strategy.handles_gradient_accumulation
            and trainer.lightning_module.automatic_optimization
        )
        waiting = int(num_processed) % int(trainer.accumulate_grad_batches) if is_group_open else 0
        return waiting + int(not is_processed)

    def num_trained(self, noted: _Counts) -> int | None:
        """The batches of the epoch that the weights were trained on; None without a Trainer."""
        trainer: Any = self._trainer()
        if trainer is None:
            return None
        num_processed: int = trainer.fit_loop.epoch_loop.batch_progress.current.processed
        is_under_way = self._now(trainer).processed == noted.processed
        return num_processed + int(is_under_way) - self.num_untrained(noted)

    def _watch(self, optimizers: list[Any]) -> None:
        """Count the steps of optimizers. Lightning counts a step only after all of its hooks."""
        this = weakref.ref(self)

        def count(*_: Any) -> None:
            if (progress := this()) is not None:
                progress._optimizer_steps += 1

        for optimizer in optimizers:
            weakref.finalize(self, optimizer.register_step_post_hook(count).remove)
        self._is_watching = True


class _SettleCounts(L.Callback):
    """Removes an interrupted step from the Trainer's counts, once it has restarted."""

    def __init__(self, batches_that_stepped: int) -> None:
        self._batches_that_stepped = batches_that_stepped

    @override
    def on_train_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        loop = trainer.fit_loop.epoch_loop
        # The Trainer itself resets only the counts of the epoch: later checkpoints would look like
        # those of interrupted steps. And it counts the step for the loggers.
        loop.batch_progress.total.reset_on_restart()
        loop._batches_that_stepped = self._batches_that_stepped
        _remove(self, trainer)


def go_on_after(trainer: Any, num_batches: int) -> None:
    """Continue a fit that is resumed inside an epoch after a number of its batches."""
    # Where an optimizer had stepped in the interrupted batch, the batch counts as complete, and the
    # schedulers step. Otherwise the Trainer's counts are reduced to the trained batches.
    loop = trainer.fit_loop.epoch_loop
    progress = loop.batch_progress
    num_processed, num_completed = progress.current.processed, progress.current.completed
    if progress.current.ready == num_processed == num_batches:
        return
    if num_batches > num_processed:
        # The optimizer has stepped: as if the checkpoint was saved at the end of the batch.
        for counts in (progress.total, progress.current):
            counts.processed = counts.started = counts.ready = counts.completed + 1
        steps = loop.automatic_optimization.optim_progress.optimizer.step
        for counts in (steps.total, steps.current):
            counts.completed = counts.ready
        for optimizer in trainer.optimizers:
            # A scheduler looks here, and would otherwise warn that it steps before the optimizer.
            optimizer._opt_called = True
        loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        if loop._num_ready_batches_reached():
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        return
    for counts in (progress.total, progress.current):
        counts.processed += num_batches - num_processed
        counts.completed += num_batches - num_completed
    progress.is_last_batch = False
    trainer.callbacks = [*trainer.callbacks, _SettleCounts(loop._batches_that_stepped)]
