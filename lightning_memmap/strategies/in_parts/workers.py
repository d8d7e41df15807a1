"""Runs the replicas of a step, in turn or side by side, and lets them meet inside the step."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch


class Workers:
    """Calls the replicas of a step: in turn on one physical device, side by side on several.

    Replicas of one device take turns, in order: their random numbers come from one generator, and a
    run must repeat. They run in one thread, because each thread that computes on a CPU brings an
    OpenMP team of its own; for the first device it is the caller's. Only where a replica waits for
    the others in the middle of its step does the next one begin in another thread.

    Args:
        devices: One per replica.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._threads = ThreadPoolExecutor(len(devices), "replica")
        self._step: _Step | None = None

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call one function per replica, and wait for all of them.

        Gradient mode, inference mode, autocast and current streams are those of the caller.

        Raises:
            Exception: What the first replica that failed raised, once all have ended.
        """
        self._step = step = _Step(functions, self._devices, self._threads)
        try:
            return step.run()
        finally:
            self._step = None

    def meet(self, index: int, name: str, value: Any, action: Callable[[list[Any]], Any]) -> Any:
        """Wait for all replicas of the step, and let the first one act for all of them.

        Outside of a step there is nobody to wait for, and the caller acts.

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
        if self._step is None:
            return action([value])
        return self._step.meet(index, name, value, action)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()


class SeparateWaysError(RuntimeError):
    """The replicas of a step did not make the same calls."""


class _Step:
    """One step of all replicas."""

    def __init__(
        self,
        functions: Sequence[Callable[[], Any]],
        devices: Sequence[torch.device],
        threads: ThreadPoolExecutor,
    ) -> None:
        self._functions = functions
        self._devices = devices
        self._threads = threads
        self._futures: list[Future[None]] = []
        # What follows changes under this lock alone.
        self._changed = threading.Condition()
        self._turns: dict[torch.device, list[int]] = {}
        for index in range(len(functions)):
            self._turns.setdefault(devices[index], []).append(index)
        self._not_begun = {device: list(indices) for device, indices in self._turns.items()}
        self._states = {device: _ThreadState(device) for device in self._turns}
        self._waiting: dict[int, tuple[str, Any]] = {}
        self._ended: dict[int, bool] = {}
        self._returned: dict[int, Any] = {}
        self._errors: dict[int, BaseException] = {}
        self._num_meetings = 0
        self._result: Any = None

    def run(self) -> list[Any]:
        here, *others = self._turns
        for device in others:
            self._start_thread(device)
        self._run_replicas(here)
        for future in self._futures:  # It grows where replicas meet.
            future.result()
        errors = [self._errors[index] for index in sorted(self._errors)]
        if errors:
            # That others went separate ways follows from a failure, where there was one.
            raise next((e for e in errors if not isinstance(e, SeparateWaysError)), errors[0])
        return [self._returned[index] for index in range(len(self._functions))]

    def meet(self, index: int, name: str, value: Any, action: Callable[[list[Any]], Any]) -> Any:
        device = self._devices[index]
        self._end_turn(index)
        if self._not_begun[device]:
            self._start_thread(device)
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
            result = action([self._waiting[other][1] for other in range(len(self._functions))])
            with self._changed:
                self._waiting, self._result = {}, result
                self._num_meetings += 1
                self._changed.notify_all()
        self._await_turn(index)
        return result

    @property
    def _all_waiting(self) -> bool:
        return len(self._waiting) == len(self._functions)

    def _check_meeting(self, index: int, name: str) -> None:
        others = {other: what for other, (what, _) in self._waiting.items() if what != name}
        others |= dict.fromkeys(self._ended, "the end of its training_step")
        if others:
            other, what = min(others.items())
            raise SeparateWaysError(
                f"replica {index} of {len(self._functions)} came to {name}, and replica {other} to"
                f" {what}: under memmap_dp all replicas must make the same calls to optimizers,"
                " schedulers and manual_backward in a step, whatever their rows"
            )

    def _start_thread(self, device: torch.device) -> None:
        self._futures.append(self._threads.submit(self._run_in_thread, device))

    def _run_in_thread(self, device: torch.device) -> None:
        with ExitStack() as stack:
            self._states[device].enter(stack)
            self._run_replicas(device)

    def _run_replicas(self, device: torch.device) -> None:
        """Run the replicas of a device that have not begun, one after the other."""
        while True:
            with self._changed:
                if self._errors or not self._not_begun[device]:
                    return
                index = self._not_begun[device].pop(0)
            self._await_turn(index)
            try:
                self._returned[index] = self._functions[index]()
            except BaseException as error:
                self._errors[index] = error
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
