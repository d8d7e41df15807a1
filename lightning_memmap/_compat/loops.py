"""Names of Lightning's loops and loaders."""

import types
from collections.abc import Sequence
from typing import Any

import lightning as L
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from typing_extensions import override


class BatchIndices(_IndexBatchSamplerWrapper):
    """Where Lightning looks for the rows of a batch that a prediction writer is told.

    Args:
        sampler: What Lightning calls ``set_epoch`` of.
        rows: The dataset rows of each step.
    """

    def __init__(self, sampler: Any, rows: Sequence[list[int]]) -> None:
        self.sampler = sampler
        self.seen_batch_indices: Any = rows


class _RenewTrainLoader(L.Callback):
    def __init__(self, epoch: int, num_steps: int) -> None:
        self._epoch = epoch
        self._num_steps = num_steps

    @override
    def on_train_start(self, trainer: Any, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch != self._epoch:
            # The checkpoint is of the last step of its epoch. The Trainer counts the next epoch
            # from zero only where the steps that it has done reach the steps of an epoch.
            trainer.fit_loop.epoch_loop.batch_progress.current.completed = self._num_steps
            self._renew(trainer)

    @override
    def on_train_epoch_end(self, trainer: Any, pl_module: L.LightningModule) -> None:
        self._renew(trainer)

    def _renew(self, trainer: Any) -> None:
        trainer.fit_loop._combined_loader = None
        trainer.callbacks.remove(self)


def renew_train_loader_after_epoch(trainer: Any, epoch: int, num_steps: int) -> None:
    """Let the Trainer ask for the training loader, and its length, anew after an epoch.

    It asks once per fit. That is too seldom where the first epoch was resumed from a checkpoint
    of another number of data devices, and so has another number of steps than the next ones.

    Args:
        trainer: The Trainer.
        epoch: The epoch that is resumed.
        num_steps: The steps of all later epochs.
    """
    trainer.callbacks.append(_RenewTrainLoader(epoch, num_steps))


def validate_anew(trainer: Any) -> None:
    """Let the validation that a checkpoint was saved in be done again, from its first row.

    The Trainer goes back to it and counts the batches that were done before. But it keeps none of
    their metrics, and the loader begins at the first row: the metrics would be those of the first
    rows alone, as many as were left.

    Args:
        trainer: The Trainer, when it asks for the validation loader.
    """
    trainer.fit_loop.epoch_loop.val_loop.restarting = False


def view_of(original: Any, **members: Any) -> Any:
    """An object that is another one in all but some members: it shares all of its state.

    Args:
        original: An object that keeps its state in its ``__dict__``.
        members: By name; a property, or a value, which then cannot be assigned.
    """
    namespace: dict[str, Any] = {"__slots__": ()}
    for name, member in members.items():
        namespace[name] = member if isinstance(member, property) else _constant(member)
    kind = types.new_class(
        type(original).__name__, (type(original),), exec_body=lambda body: body.update(namespace)
    )
    view: Any = object.__new__(kind)
    object.__setattr__(view, "__dict__", original.__dict__)
    return view


def _constant(value: Any) -> property:
    return property(lambda view: value)


def view_of_strategy(strategy: Any, given_optimizers: list[Any], **members: Any) -> Any:
    """A strategy with other members, and with other optimizers for a module that asks for them."""
    return view_of(strategy, _lightning_optimizers=given_optimizers, **members)


def lightning_optimizers(strategy: Any) -> list[Any]:
    """The optimizers that a module is given, as Lightning wraps them."""
    optimizers: list[Any] = strategy._lightning_optimizers
    return optimizers


def view_of_trainer(trainer: Any, results: Any, **members: Any) -> Any:
    """A Trainer with other members and other results: what ``self.log`` writes to.

    Args:
        trainer: The real one.
        results: Gives the results at each time they are asked for.
        members: As for `view_of`.
    """
    return view_of(trainer, _results=property(lambda view: results()), **members)


def results_of(trainer: Any) -> Any:
    """What ``self.log`` writes to; None in a stage that has nothing of the kind."""
    return trainer._results
