"""How far a loader is in its epoch, and the state that training resumes from."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeAlias

import msgspec

from lightning_memmap._compat.progress import Delivery, FitPosition, TrainerProgress
from lightning_memmap.loading.step_weight import CountInSteps, DeliveredSteps
from lightning_memmap.loading.super_batch import CountInBatch, SuperBatch, weight_of_batch
from lightning_memmap.sampling.schedule import SkippedSteps

Count = Annotated[int, msgspec.Meta(ge=0)]


class LoaderState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The position of a loader in its epoch, which is the same on every rank."""

    sampler: dict[str, Any]
    num_positions: Count
    seed: Count
    epoch: Count
    position: Count = 0
    steps: Count = 0
    #: Rows of a step over all processes; None if an earlier version has saved the state.
    global_batch: Count | None = None
    skipped: SkippedSteps = SkippedSteps()
    #: The results that the order of the epoch depends on; None before its first step.
    results: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.sampler.get("shards"), dict):
            raise ValueError("sampler: the shards of the order are missing")
        if self.position > self.num_positions:
            raise ValueError(f"position={self.position} of num_positions={self.num_positions}")
        if not bool(self.position) <= self.steps <= self.position:
            raise ValueError(
                f"steps={self.steps}: with position={self.position} rows delivered, it must be 0 to"
                " that number, and at least 1 unless it is 0"
            )

    def as_dict(self) -> dict[str, Any]:
        """Return the state as a dict of plain values."""
        state: dict[str, Any] = msgspec.to_builtins(self)
        if not self.skipped.steps:
            del state["skipped"]
        for name in ("results", "global_batch"):
            if not state[name]:
                del state[name]
        return state

    @classmethod
    def read(cls, state: object) -> "LoaderState":
        """Check a state that `as_dict` has returned."""
        try:
            return msgspec.convert(state, cls)
        except ValueError as error:
            raise ValueError(
                f"the state of the training loader cannot be loaded: {error}. Resume from a"
                " checkpoint that this version has written, or pass load_state_dict a dict that"
                " state_dict has returned"
            ) from error

    @property
    def subset(self) -> Mapping[str, Any] | None:
        """The identity of the subset of rows that the loader serves; None for all rows."""
        subset: Mapping[str, Any] | None = self.sampler["shards"].get("subset")
        return subset


#: Computes the state after a number of steps of an epoch that began in a state.
StateAfter: TypeAlias = Callable[[LoaderState, int], LoaderState]


class LoaderProgress:
    """The steps of the current epoch that a loader has delivered, and a state to resume from.

    Args:
        start_state: The state before the first step.
        trainer_progress: Counts which of the delivered steps the Trainer's weights were trained
            on; None without a Trainer.
        weights: Receives the weight of each delivered step.
        count_in_batch: Counts the items of the loss in each row of a batch; None if the plan of
            the epoch knows them.
    """

    def __init__(
        self,
        start_state: LoaderState,
        trainer_progress: TrainerProgress | None,
        weights: DeliveredSteps,
        count_in_batch: CountInBatch | None = None,
    ) -> None:
        self._trainer_progress = trainer_progress
        self._weights = weights
        self._count_in_batch = count_in_batch
        #: The state in which the epoch began, or was resumed.
        self.start_state = start_state
        #: The steps of the epoch that were delivered, and the Trainer's counters at the last one.
        self._delivered: tuple[int, Delivery | None] = 0, None
        #: The start of the previous epoch, and its steps. Manual optimization may accumulate
        #: gradients across epochs.
        self._previous: tuple[LoaderState, int] | None = None
        #: A loaded state, until an epoch resumes from it.
        self._loaded: LoaderState | None = None

    def enter_epoch(self, state: LoaderState) -> None:
        """Switch to the epoch of a state, unless it is the current epoch or one was loaded."""
        if self._loaded is None and state.epoch != self.start_state.epoch:
            num_steps, last = self._delivered
            self._previous = (self.start_state, num_steps) if last is not None else None
            self.start_state = state
            self._delivered = 0, None

    def load(self, state: LoaderState) -> None:
        """Resume the next iteration from a state, if it is of the same epoch."""
        self.start_state = self._loaded = state
        self._previous = None
        self._delivered = state.steps, None

    def loaded_in(self, epoch: int) -> LoaderState | None:
        """Return the state that an epoch resumes from, if one was loaded."""
        loaded = self._loaded
        return loaded if loaded is not None and loaded.epoch == epoch else None

    def begin(self, state: LoaderState, count: CountInSteps) -> None:
        """Begin an iteration in a state.

        Args:
            state: The state.
            count: Counts the items of the loss in steps of the epoch.
        """
        self.start_state = state
        self._delivered = state.steps, None
        self._loaded = None
        self._weights.begin_epoch(state.steps, count)

    def deliver(self, super_batch: SuperBatch, batch: Any) -> None:
        """Count one more step as delivered, once what the loader yields for it is known."""
        if self._count_in_batch is not None:
            super_batch.weight = weight_of_batch(self._count_in_batch, super_batch, batch)
        self._weights.add((super_batch.num_rows, super_batch.weight))
        counters = None if self._trainer_progress is None else self._trainer_progress.delivery()
        # A single assignment, because a signal handler may save a checkpoint at any time.
        self._delivered = self._delivered[0] + 1, counters

    def trained_state(self, state_after: StateAfter) -> tuple[LoaderState, FitPosition | None]:
        """Return the state after the last step that the weights were trained on.

        Args:
            state_after: Computes the state after a number of steps of an epoch.

        Returns:
            The state of the loader, and the counters of its Trainer. The counters are None before
            the first step of an epoch and without a Trainer.
        """
        start_state = self.start_state
        num_steps, last = self._delivered
        trainer = self._trainer_progress
        num_delivered = None
        if last is not None and trainer is not None:
            num_delivered = trainer.num_delivered(last)
        if last is None or trainer is None or num_delivered is None:
            return state_after(start_state, num_steps), None
        num_untrained = trainer.num_untrained(last)
        num_here = num_steps - start_state.steps
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
            is_complete = start_state.steps == 0 and trainer.is_last(num_delivered)
            num_untrained = 0 if is_complete else num_here
        state = state_after(start_state, num_steps - num_untrained)
        return state, trainer.position(last, max(0, num_delivered - num_untrained), num_untrained)
