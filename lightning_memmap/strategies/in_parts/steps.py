"""What strategies have in common that run each step of the module in several parts."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from typing_extensions import override

from lightning_memmap._compat.loops import results_of
from lightning_memmap.strategies._devices import LocalDevices
from lightning_memmap.strategies.in_parts.records import StepLog, write_logs
from lightning_memmap.strategies.in_parts.shares import Shares, weighted_mean


class StepsInParts(LocalDevices):
    """Calls the module's steps several times, each with a part of the rows, and merges the results.

    To Lightning it is one call with all rows: one loss, one output, one call of ``self.log``.
    """

    @property
    def divides_steps(self) -> bool:
        """Whether there is more than one part at all; otherwise all is as Lightning does it."""
        return True

    @abstractmethod
    def share(self, batch: Any) -> Shares:
        """The parts of a batch."""

    @abstractmethod
    def run_parts(
        self, name: str, shares: Shares, logs: list[StepLog], *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Call the step of this name with each part; ``self.log`` must write to the part's log.

        Args:
            name: Name of the module's method.
            shares: The parts.
            logs: One per part.
            args: Given after the batch.
            kwargs: Given by name.

        Returns:
            What each call returned.
        """

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self.divides_steps:
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context():
            outputs, shares = self._run("training_step", *args, **kwargs)
        return _training_output(outputs, shares)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self.divides_steps:
            return super().validation_step(*args, **kwargs)
        with self.precision_plugin.val_step_context():
            outputs, shares = self._run("validation_step", *args, **kwargs)
        return shares.join(outputs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self.divides_steps:
            return super().test_step(*args, **kwargs)
        with self.precision_plugin.test_step_context():
            outputs, shares = self._run("test_step", *args, **kwargs)
        return shares.join(outputs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self.divides_steps:
            return super().predict_step(*args, **kwargs)
        with self.precision_plugin.predict_step_context():
            outputs, shares = self._run("predict_step", *args, **kwargs)
        return shares.join(outputs)

    @property
    def module(self) -> LightningModule:
        """The module that is trained."""
        assert self.lightning_module is not None
        return self.lightning_module

    def _run(self, name: str, batch: Any, *args: Any, **kwargs: Any) -> tuple[list[Any], Shares]:
        shares = self.share(batch)
        logs = [StepLog(rows) for rows in shares.part_rows]
        trainer = self.module.trainer
        try:
            outputs = self.run_parts(name, shares, logs, *args, **kwargs)
        finally:
            self.module.trainer = trainer
        results = results_of(trainer)
        if results is not None:
            write_logs(logs, results, self.module, self)
        return outputs, shares


def _training_output(outputs: list[Any], shares: Shares) -> Any:
    """The loss with its graph, over the parts that returned one, and the rest put together.

    What Lightning refuses of one call, it is given to refuse.
    """
    given = [output for output in outputs if output is not None]
    if all(isinstance(output, Tensor) for output in given):
        return _mean_loss(outputs, shares)
    for output in given:
        if not isinstance(output, (Tensor, Mapping)):
            return output
    dicts = [
        {"loss": output} if isinstance(output, Tensor) else dict(output or {}) for output in outputs
    ]
    keys = dict.fromkeys(key for output in dicts for key in output if key != "loss")
    rest = {key: shares.join([output.get(key) for output in dicts]) for key in keys}
    losses = [output.get("loss") for output in dicts]
    if any(
        output is not None and loss is None for output, loss in zip(outputs, losses, strict=True)
    ):
        return rest
    return {"loss": _mean_loss(losses, shares), **rest}


def _mean_loss(losses: list[Any], shares: Shares) -> Tensor | None:
    """The mean over the parts that have a loss; None where no part has one."""
    pairs = zip(losses, shares.part_rows, strict=True)
    present = [(loss, rows) for loss, rows in pairs if loss is not None]
    if not present:
        return None
    values, weights = zip(*present, strict=True)
    return weighted_mean(values, weights, shares.device)
