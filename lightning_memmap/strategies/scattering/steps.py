"""What strategies have in common that scatter the rows of each step."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_memmap._compat.loops import results_of
from lightning_memmap.strategies._devices import LocalDevices
from lightning_memmap.strategies._run_state import RunState, RunT
from lightning_memmap.strategies.scattering.batch import ScatteredBatch, weighted_mean
from lightning_memmap.strategies.scattering.logs import StepLog, merge_logs


class ScatteredSteps(RunState[RunT], LocalDevices):
    """Calls each step of the module once per replica or micro-batch, and merges the results.

    To Lightning it is one call with all rows: one loss, one output, one call of ``self.log``.
    """

    #: Of ``Trainer(sync_batchnorm=True)``, which sets it.
    _layer_sync: Any = None

    def refuse_sync_batchnorm(self, parts: str) -> None:
        """Refuse ``Trainer(sync_batchnorm=True)`` where a step is computed in parts.

        Args:
            parts: What they are, for the message.

        Raises:
            ValueError: The Trainer has this option.
        """
        if self._layer_sync is not None and self.scatters:
            raise ValueError(
                f"sync_batchnorm=True with {parts}: {self.strategy_name} computes batch norm on the"
                " rows of each; leave it out, use group or layer norm, or memmap_superbatch, whose"
                " batch norm is over all rows of a step"
            )

    @property
    def scatters(self) -> bool:
        """Whether there is more than one replica or micro-batch.

        Otherwise Lightning's own steps run.
        """
        return True

    @abstractmethod
    def scatter(self, batch: Any) -> ScatteredBatch:
        """Scatter a batch, unless it is scattered already.

        Args:
            batch: A batch as Lightning has it after the transfer.

        Returns:
            The batch of each replica or micro-batch.
        """

    @abstractmethod
    def run_scattered(
        self, name: str, batch: ScatteredBatch, logs: list[StepLog], *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Call a step of the module with each batch; ``self.log`` must write to that batch's log.

        Args:
            name: Name of the module's method.
            batch: The batches.
            logs: One per batch.
            *args: Positional arguments after the batch.
            **kwargs: Keyword arguments.

        Returns:
            What each call returned.
        """

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self.scatters:
            return super().training_step(*args, **kwargs)
        return _training_output(*self._step("training_step", "train_step", *args, **kwargs))

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self.scatters:
            return super().validation_step(*args, **kwargs)
        return _merged(*self._step("validation_step", "val_step", *args, **kwargs))

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self.scatters:
            return super().test_step(*args, **kwargs)
        return _merged(*self._step("test_step", "test_step", *args, **kwargs))

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self.scatters:
            return super().predict_step(*args, **kwargs)
        return _merged(*self._step("predict_step", "predict_step", *args, **kwargs))

    def _step(
        self, name: str, context: str, batch: Any, *args: Any, **kwargs: Any
    ) -> tuple[list[Any], ScatteredBatch]:
        """Run a step of this name, in the precision plugin's context of that name."""
        with getattr(self.precision_plugin, f"{context}_context")():
            scattered = self.scatter(batch)
            logs = [StepLog(rows) for rows in scattered.rows_per_batch]
            trainer = self.module.trainer
            try:
                outputs = self.run_scattered(name, scattered, logs, *args, **kwargs)
            finally:
                self.module.trainer = trainer
            results = results_of(trainer)
            if results is not None:
                merge_logs(logs, results, self.module, self)
        return outputs, scattered


def _merged(outputs: list[Any], batch: ScatteredBatch) -> Any:
    return batch.merge(outputs)


def _training_output(outputs: list[Any], batch: ScatteredBatch) -> Any:
    """The mean of the losses that were returned, with its graph, and the other outputs merged.

    What Lightning refuses to accept from one call is passed on, and Lightning refuses it.
    """
    given = [output for output in outputs if output is not None]
    if all(isinstance(output, Tensor) for output in given):
        return _mean_loss(outputs, batch)
    for output in given:
        if not isinstance(output, (Tensor, Mapping)):
            return output
    dicts = [
        {"loss": output} if isinstance(output, Tensor) else dict(output or {}) for output in outputs
    ]
    keys = dict.fromkeys(key for output in dicts for key in output if key != "loss")
    merged = {key: batch.merge([output.get(key) for output in dicts]) for key in keys}
    losses = [output.get("loss") for output in dicts]
    if any(
        output is not None and loss is None for output, loss in zip(outputs, losses, strict=True)
    ):
        return merged
    return {"loss": _mean_loss(losses, batch), **merged}


def _mean_loss(losses: list[Any], batch: ScatteredBatch) -> Tensor | None:
    """The mean over the batches that have a loss; None where no batch has one."""
    pairs = zip(losses, batch.rows_per_batch, strict=True)
    present = [(loss, rows) for loss, rows in pairs if loss is not None]
    if not present:
        return None
    values, weights = zip(*present, strict=True)
    return weighted_mean(values, weights, batch.device)
