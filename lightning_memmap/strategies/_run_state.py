"""What a strategy has from its set-up on, as one object."""

from typing import Generic, TypeVar

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy

RunT = TypeVar("RunT")


class RunState(Strategy, Generic[RunT]):
    """A strategy whose set-up makes one frozen object, `run`.

    The type parameter is the class of that object.
    """

    _run: RunT | None = None

    @property
    def run(self) -> RunT:
        """What the set-up made.

        Raises:
            RuntimeError: The strategy is not set up.
        """
        if self._run is None:
            raise self._not_set_up()
        return self._run

    @property
    def module(self) -> LightningModule:
        """The module that is trained.

        Raises:
            RuntimeError: The strategy is not connected to one.
        """
        module = self.lightning_module
        if module is None:
            raise self._not_set_up()
        return module

    def _not_set_up(self) -> RuntimeError:
        name = getattr(self, "strategy_name", type(self).__name__)
        return RuntimeError(
            f"strategy={name!r} is not set up: call fit, validate, test or predict of a Trainer"
            " that has it"
        )
