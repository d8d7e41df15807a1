"""How far a loader is in its epoch, and the state that training resumes from."""

from collections.abc import Callable
from typing import TypeAlias

from lightning_memmap._compat.progress import Delivery, FitPosition, TrainerProgress
from lightning_memmap.loading.state import LoaderState
from lightning_memmap.loading.step_weight import CountInSteps, DeliveredSteps
from lightning_memmap.loading.super_batch import SuperBatch

#: Computes the state after a number of steps of an epoch that began in a state.
StateAfter: TypeAlias = Callable[[LoaderState, int], LoaderState]


class LoaderProgress:
    """The steps of the current epoch that a loader has delivered, and a state to resume from.

    Args:
        start: The state before the first step.
        trainer: Counts which of the delivered steps the Trainer's weights were trained on; None
            without a Trainer.
        weights: Receives the weight of each delivered step.
    """

    def __init__(
        self, start: LoaderState, trainer: TrainerProgress | None, weights: DeliveredSteps
    ) -> None:
        self._trainer = trainer
        self._weights = weights
        #: The state in which the epoch began, or was resumed.
        self._start = start
        #: The steps of the epoch that were delivered, and the Trainer's counters at the last one.
        self._delivered: tuple[int, Delivery | None] = 0, None
        #: The start of the previous epoch, and its steps. Manual optimization may accumulate
        #: gradients across epochs.
        self._previous: tuple[LoaderState, int] | None = None
        #: A loaded state, until an epoch resumes from it.
        self._loaded: LoaderState | None = None

    @property
    def start(self) -> LoaderState:
        """The state in which the epoch began, or was resumed."""
        return self._start

    def enter_epoch(self, start: LoaderState) -> None:
        """Switch to the epoch of a state, unless it is the current epoch or one was loaded."""
        if self._loaded is None and start.epoch != self._start.epoch:
            num_steps, last = self._delivered
            self._previous = (self._start, num_steps) if last is not None else None
            self._start = start
            self._delivered = 0, None

    def load(self, state: LoaderState) -> None:
        """Resume the next iteration from a state, if it is of the same epoch."""
        self._start = self._loaded = state
        self._previous = None
        self._delivered = state.steps, None

    def loaded_in(self, epoch: int) -> LoaderState | None:
        """Return the state that an epoch resumes from, if one was loaded."""
        loaded = self._loaded
        return loaded if loaded is not None and loaded.epoch == epoch else None

    def begin(self, start: LoaderState, count: CountInSteps) -> None:
        """Begin an iteration in a state.

        Args:
            start: The state.
            count: Counts the items of the loss in steps of the epoch.
        """
        self._start = start
        self._delivered = start.steps, None
        self._loaded = None
        self._weights.begin_epoch(start.steps, count)

    def deliver(self, super_batch: SuperBatch) -> None:
        """Count one more step as delivered."""
        self._weights.add((super_batch.num_rows, super_batch.weight))
        counters = None if self._trainer is None else self._trainer.delivery()
        # A single assignment, because a signal handler may save a checkpoint at any time.
        self._delivered = self._delivered[0] + 1, counters

    def position(self, state_after: StateAfter) -> tuple[LoaderState, FitPosition | None]:
        """Return the state after the last step that the weights were trained on.

        Args:
            state_after: Computes the state after a number of steps of an epoch.

        Returns:
            The state of the loader, and the counters of its Trainer. The counters are None before
            the first step of an epoch and without a Trainer.
        """
        start = self._start
        num_steps, last = self._delivered
        trainer = self._trainer
        num_delivered = None
        if last is not None and trainer is not None:
            num_delivered = trainer.num_delivered(last)
        if last is None or trainer is None or num_delivered is None:
            return state_after(start, num_steps), None
        num_untrained = trainer.num_untrained(last)
        num_here = num_steps - start.steps
        if num_untrained > num_here and self._previous is not None:
            # The accumulation group began in the previous epoch, if an optimizer stepped there.
            previous, num_previous = self._previous
            num_before = num_untrained - num_here
            if num_before < num_previous - previous.steps:
                state = state_after(previous, num_previous - num_before)
                return state, trainer.position(last, num_previous - num_before, num_untrained)
        if trainer.is_manual and num_untrained >= num_here:
            # No optimizer has stepped in this epoch since the fit began. A whole epoch without a
            # step is not an accumulation group.
            is_complete = start.steps == 0 and trainer.is_last(num_delivered)
            num_untrained = 0 if is_complete else num_here
        state = state_after(start, num_steps - num_untrained)
        return state, trainer.position(last, max(0, num_delivered - num_untrained), num_untrained)
