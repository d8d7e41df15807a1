"""Private names of Lightning's loops and loaders."""

from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch import callbacks
from lightning.pytorch.overrides import distributed

#: Callbacks that average weights of the whole module; Lightning has them since 2.6.
WEIGHT_AVERAGING: tuple[type[L.Callback], ...] = tuple(
    getattr(callbacks, name) for name in ("WeightAveraging",) if hasattr(callbacks, name)
)
#: Without it, prediction writers receive no rows.
_SAMPLER: Any = getattr(distributed, "_IndexBatchSamplerWrapper", object)


class BatchIndices(_SAMPLER):  # type: ignore[misc]
    """The batch sampler in which Lightning looks up the rows of a batch, for prediction writers."""

    def __init__(self, sampler: Any, rows: Any) -> None:
        self.sampler = sampler
        #: Lightning asks for its length and its entries.
        self.seen_batch_indices = rows


class _Once(L.Callback):
    def __init__(self, hook: str, action: Callable[[Any], None], epoch: int) -> None:
        setattr(self, hook, self._run)
        self._action = action
        self._epoch = epoch

    def _run(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch >= self._epoch:
            self._action(trainer)
            # A new list: the Trainer is iterating over this one.
            trainer.callbacks = [other for other in trainer.callbacks if other is not self]


def run_once(trainer: Any, hook: str, action: Callable[[Any], None], epoch: int = 0) -> None:
    """Let a Trainer call a function with itself at one of its hooks, from an epoch on, once."""
    trainer.callbacks = [*trainer.callbacks, _Once(hook, action, epoch)]


def _request_train_loader(trainer: Any) -> None:
    trainer.fit_loop._combined_loader = None


def renew_train_loader_after_epoch(trainer: Any, epoch: int) -> None:
    """Let the Trainer request the training loader, and its length, again after an epoch."""
    # It does so once per fit. An epoch has another number of steps than the next one if it is
    # resumed from a checkpoint of another number of data devices, or one of them leaves steps out.
    run_once(trainer, "on_train_epoch_end", _request_train_loader, epoch)


def renew_train_loader_at_start(trainer: Any) -> None:
    """Make the Trainer request the training loader again once a checkpoint is restored.

    ``Trainer.estimated_stepping_batches`` requests it in ``configure_optimizers``, before the
    Trainer has restored its counters, or even before it has read the checkpoint.
    """
    _request_train_loader(trainer)
    run_once(trainer, "on_fit_start", _request_train_loader)


def forget_validation_position(trainer: Any) -> None:
    """Make a restored Trainer validate from the first batch.

    It would skip the batches that were done before the checkpoint, whose metrics it does not
    restore.
    """
    trainer.fit_loop.epoch_loop.val_loop.restarting = False


def is_restoring(trainer: Any) -> bool:
    """Return whether a Trainer has read a checkpoint, and has not restored all of it."""
    return bool(trainer._checkpoint_connector._loaded_checkpoint)
