"""Where the time of a step goes, by the actions that the Trainer reports to its profiler."""

import re
from collections.abc import Callable
from time import perf_counter

from lightning.pytorch.profilers import Profiler
from typing_extensions import override

from lightning_memmap.compare.report.records import PARTS

_ACTIONS = {
    r"\[\w+\]\.train_dataloader_next": "data",
    r"\[Strategy\]\w+\.batch_to_device": "transfer",
    r"\[Strategy\]\w+\.training_step": "forward",
    r"\[Strategy\]\w+\.backward": "backward",
    r"\[LightningModule\]\w+\.optimizer_step": "optimizer",
}


class StepClock(Profiler):
    """A profiler of the Trainer that adds up the parts of each step.

    - ``data``: the loop waits for the loader. Under a strategy that assembles super-batches in
      the loader, as ``memmap_superbatch`` does, this includes bringing them to the root device.
    - ``transfer``: the strategy's ``batch_to_device``.
    - ``forward``: the strategy's ``training_step``; everything, in manual optimization.
    - ``backward``: the strategy's ``backward``, with the collectives that it waits for.
    - ``optimizer``: the module's ``optimizer_step`` without the two before: clearing gradients,
      clipping, the step itself.
    - ``other``: the rest of the step: the Trainer's own work, callbacks and logging.

    Args:
        synchronize: Waits for the device. It is called at both ends of each part while
            `is_synchronizing`, so that a part contains the device's work that it started.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        super().__init__()
        self.is_synchronizing = False
        self._synchronize = synchronize
        self._parts: dict[str, str | None] = {}
        self._started_s: dict[str, float] = {}
        self._spent_s = dict.fromkeys(PARTS[:-1], 0.0)

    @override
    def start(self, action_name: str) -> None:
        part = self._part(action_name)
        if part is not None:
            self._started_s[part] = self.now()

    @override
    def stop(self, action_name: str) -> None:
        part = self._part(action_name)
        if part is not None and part in self._started_s:
            self._spent_s[part] += self.now() - self._started_s.pop(part)

    def now(self) -> float:
        """Return the time in seconds. While `is_synchronizing`, the device is waited for first.

        Returns:
            Seconds of `time.perf_counter`, whose zero has no meaning.
        """
        if self.is_synchronizing:
            self._synchronize()
        return perf_counter()

    def take(self, step_s: float) -> dict[str, float]:
        """Return the parts of the step that ends now; the next step starts from 0.

        Args:
            step_s: Seconds that the step took, from the end of the one before.

        Returns:
            Seconds of each of `PARTS`.
        """
        parts = self._spent_s
        self._spent_s = dict.fromkeys(PARTS[:-1], 0.0)
        parts["optimizer"] = max(0.0, parts["optimizer"] - parts["forward"] - parts["backward"])
        return parts | {"other": max(0.0, step_s - sum(parts.values()))}

    def _part(self, action: str) -> str | None:
        if action not in self._parts:
            found = (part for pattern, part in _ACTIONS.items() if re.fullmatch(pattern, action))
            self._parts[action] = next(found, None)
        return self._parts[action]
