"""How long steps and their parts take on the device that trains, by the actions of the Trainer."""

import re
from itertools import pairwise
from time import perf_counter
from typing import NamedTuple, TypeAlias

import torch
from lightning.pytorch.profilers import Profiler
from typing_extensions import override

from lightning_memmap.compare.metrics import PARTS

_ACTIONS = {
    r"\[\w+\]\.train_dataloader_next": "data",
    r"\[Strategy\]\w+\.batch_to_device": "transfer",
    r"\[Strategy\]\w+\.training_step": "forward",
    r"\[Strategy\]\w+\.backward": "backward",
    r"\[LightningModule\]\w+\.optimizer_step": "optimizer",
}
#: An event in the compute stream, or seconds of `time.perf_counter`, whose zero has no meaning.
Moment: TypeAlias = torch.Event | float


class _Span(NamedTuple):
    """A part of a step, and the part within which it ran."""

    part: str
    outer: str
    begin: Moment
    end: Moment


class StepClock(Profiler):
    """A profiler of the Trainer that times each step and its parts, and waits for nothing.

    On an accelerator it records events in the stream that computes, and reads them at the end: a
    part takes as long as it keeps that stream busy or waiting. Copies in other streams that are
    ready in time take none, and neither does a host that runs ahead. On a CPU it reads the time.

    - ``data``: from the end of a step until the loader has given the batch of the next. Under a
      strategy that assembles super-batches in the loader, as ``memmap_superbatch`` does, this
      includes bringing them to the root device.
    - ``transfer``: the strategy's ``batch_to_device``.
    - ``forward``: the strategy's ``training_step``; with the optimizer, in manual optimization.
    - ``backward``: the strategy's ``backward``, with the collectives that it waits for.
    - ``optimizer``: the module's ``optimizer_step``: clearing gradients, clipping, the step itself.
    - ``other``: the rest of the step: the Trainer's own work, callbacks and logging.

    A part that runs within another, as the forward pass does in ``optimizer_step``, counts alone.

    Args:
        device: The device that trains.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.is_on = False
        self._device = device
        self._parts: dict[str, str | None] = {}
        self._open: list[tuple[str, Moment]] = []
        self._spans: list[_Span] = []
        self._ends: list[Moment] = []
        self._steps: list[list[_Span]] = []

    @override
    def start(self, action_name: str) -> None:
        if self.is_on and (part := self._part(action_name)):
            self._open.append((part, self.now()))

    @override
    def stop(self, action_name: str) -> None:
        part = self._part(action_name)
        if self._open and self._open[-1][0] == part:
            _, begin = self._open.pop()
            outer = self._open[-1][0] if self._open else "other"
            self._spans.append(_Span(part, outer, begin, self.now()))

    def now(self) -> Moment:
        """This moment, on an accelerator: when what has been enqueued to compute is done."""
        if self._device.type == "cpu":
            return perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def end_step(self) -> None:
        """End a step; the next one begins. The first call begins the first step."""
        self._ends.append(self.now())
        if self.is_on:
            self._steps.append(self._spans)
        self._spans, self.is_on = [], True

    def steps(self) -> list[dict[str, float]]:
        """Return the seconds of each of `PARTS` of each step. They add up to that step.

        The device is waited for, until it has done the last step.
        """
        if self._ends and isinstance(self._ends[-1], torch.Event):
            self._ends[-1].synchronize()
        found = []
        for spans, (begin, end) in zip(self._steps, pairwise(self._ends), strict=True):
            parts = dict.fromkeys(PARTS, 0.0)
            parts["other"] = _seconds(begin, end)
            for span in spans:
                seconds = _seconds(span.begin, span.end)
                parts[span.part] += seconds
                parts[span.outer] -= seconds
            found.append(parts)
        return found

    def _part(self, action: str) -> str | None:
        if action not in self._parts:
            found = (part for pattern, part in _ACTIONS.items() if re.fullmatch(pattern, action))
            self._parts[action] = next(found, None)
        return self._parts[action]


def _seconds(begin: Moment, end: Moment) -> float:
    if isinstance(begin, torch.Event) and isinstance(end, torch.Event):
        return float(begin.elapsed_time(end)) / 1e3
    assert isinstance(begin, float)
    assert isinstance(end, float)
    return end - begin
