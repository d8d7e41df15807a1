"""Runs the replicas of a step side by side, a thread each, and lets them meet inside the step."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch


class Workers:
    """A thread for each replica but the first, which runs in the caller's own thread.

    Replicas on one physical device take turns, in order: their random numbers come from one
    generator, and a run must repeat. Replicas on different devices run side by side.

    Args:
        devices: One per replica.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._threads = (
            ThreadPoolExecutor(len(devices) - 1, "replica") if len(devices) > 1 else None
        )
        # What follows is of one step, and changes under this lock alone.
        self._changed = threading.Condition()
        self._turns: dict[torch.device, list[int]] = {}
        self._waiting: dict[int, tuple[str, Any]] = {}
        self._ended: dict[int, bool] = {}
        self._num_parties = self._num_meetings = 0
        self._result: Any = None

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call one function per replica, and wait for all of them.

        Gradient mode, inference mode, autocast and current streams are those of the caller.

        Raises:
            Exception: What the first replica that failed raised, once all have ended.
        """
        self._turns, self._waiting, self._ended = {}, {}, {}
        self._num_parties, self._num_meetings = len(functions), 0
        for index in range(len(functions)):
            self._turns.setdefault(self._devices[index], []).append(index)
        if self._threads is None or len(functions) == 1:
            return [self._call(0, functions[0])]
        states = [_ThreadState(device) for device in self._devices]
        others = [
            self._threads.submit(self._call, index, functions[index], states[index])
            for index in range(1, len(functions))
        ]
        errors: list[BaseException] = []
        results = []
        try:
            results.append(self._call(0, functions[0]))
        except BaseException as error:
            errors.append(error)
        for other in others:
            failure = other.exception()
            if failure is not None:
                errors.append(failure)
            else:
                results.append(other.result())
        if errors:
            # That others went separate ways follows from a failure, where there was one.
            raise next((e for e in errors if not isinstance(e, SeparateWaysError)), errors[0])
        return results

    def meet(self, index: int, name: str, value: Any, action: Callable[[list[Any]], Any]) -> Any:
        """Wait for all replicas of the step, and let the first one act for all of them.

        Args:
            index: The replica that calls.
            name: What the meeting is for; all replicas must name the same.
            value: What this replica brings.
            action: Called by the first replica with the values of all.

        Returns:
            What the action returned, to all replicas.

        Raises:
            SeparateWaysError: Another replica ended its step, or waits for something else.
        """
        self._end_turn(index)
        with self._changed:
            meeting = self._num_meetings
            self._waiting[index] = (name, value)
            self._changed.notify_all()
            if index == 0:
                self._changed.wait_for(lambda: self._all_waiting or self._ended)
            else:
                self._changed.wait_for(lambda: self._num_meetings > meeting or self._ended)
            if self._num_meetings == meeting:
                self._check_meeting(index, name)
            result = self._result
        if index == 0:
            # The others wait: nobody else runs.
            result = action([self._waiting[other][1] for other in range(self._num_parties)])
            with self._changed:
                self._waiting, self._result = {}, result
                self._num_meetings += 1
                self._changed.notify_all()
        self._await_turn(index)
        return result

    def close(self) -> None:
        """End the threads."""
        if self._threads is not None:
            self._threads.shutdown()

    @property
    def _all_waiting(self) -> bool:
        return len(self._waiting) == self._num_parties

    def _check_meeting(self, index: int, name: str) -> None:
        others = {other: what for other, (what, _) in self._waiting.items() if what != name}
        others |= dict.fromkeys(self._ended, "the end of its training_step")
        if others:
            other, what = min(others.items())
            raise SeparateWaysError(
                f"replica {index} of {self._num_parties} came to {name}, and replica {other} to"
                f" {what}: under memmap_dp all replicas must make the same calls to optimizers,"
                " schedulers and manual_backward in a step, whatever their rows"
            )

    def _call(
        self, index: int, function: Callable[[], Any], state: "_ThreadState | None" = None
    ) -> Any:
        try:
            with ExitStack() as stack:
                if state is not None:
                    state.enter(stack)
                self._await_turn(index)
                return function()
        finally:
            self._end_turn(index, for_good=True)

    def _await_turn(self, index: int) -> None:
        turns = self._turns[self._devices[index]]
        with self._changed:
            self._changed.wait_for(lambda: turns[0] == index)

    def _end_turn(self, index: int, for_good: bool = False) -> None:
        turns = self._turns[self._devices[index]]
        with self._changed:
            turns.remove(index)
            if for_good:
                self._ended[index] = True
            else:
                turns.append(index)
            self._changed.notify_all()


class SeparateWaysError(RuntimeError):
    """The replicas of a step did not make the same calls."""


class _ThreadState:
    """What torch keeps for each thread: taken from this one, entered by another."""

    def __init__(self, device: torch.device) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._cache = torch.is_autocast_cache_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in sorted({"cpu", device.type})
        ]
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def enter(self, stack: ExitStack) -> None:
        stack.enter_context(torch.inference_mode(self._inference))
        stack.enter_context(torch.set_grad_enabled(self._grad))
        for kind, dtype, enabled in self._autocast:
            stack.enter_context(
                torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._cache)
            )
        if self._stream is not None:
            # Makes its device the current one, too.
            stack.enter_context(torch.cuda.stream(self._stream))
