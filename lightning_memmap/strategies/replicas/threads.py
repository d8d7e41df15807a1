"""Runs the replicas of a step, one after the other or side by side, with barriers inside."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import torch

from lightning_memmap.loading.device_streams import stream_module


class ReplicaThreads:
    """Runs the replicas of a step: one after the other on one device, devices side by side.

    The order on a device is fixed, because its replicas draw random numbers from one generator and
    a run must be repeatable. They share one thread, because each thread that computes on a CPU
    starts its own OpenMP team; for the first device it is the caller's thread. Only where a
    replica waits at a barrier does the next one start in another thread.

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

        Args:
            functions: One per replica, at most as many as devices; function ``i`` runs for device
                ``i``.

        Returns:
            What each function returned.

        Raises:
            Exception: That of the first replica that failed, once all that had started have ended.
                A failure that is not `DivergedReplicasError` comes first, since the others diverge
                as a consequence.
        """
        self._step = step = _Step(functions, self._devices, self._threads)
        try:
            return step.run()
        finally:
            self._step = None

    def barrier(self, index: int, name: str, value: Any, action: Callable[[list[Any]], Any]) -> Any:
        """Wait for all replicas of the step; replica 0 then runs an action once for all.

        Outside of a step there is nobody to wait for, and the caller runs it.

        Args:
            index: The replica that calls, from 0.
            name: What the replicas wait for; all must name the same.
            value: This replica's value for the action.
            action: Called by replica 0 with the values of all, in the order of the replicas.

        Returns:
            What the action returned, on all replicas.

        Raises:
            DivergedReplicasError: Another replica ended its step, or waits for something else.
        """
        if self._step is None:
            return action([value])
        return self._step.barrier(index, name, value, action)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()


class DivergedReplicasError(RuntimeError):
    """The replicas of a step did not reach the same barriers."""


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
        # Everything below is changed only with this lock.
        self._changed = threading.Condition()
        self._queues: dict[torch.device, list[int]] = {}
        for index in range(len(functions)):
            self._queues.setdefault(devices[index], []).append(index)
        self._not_started = {device: list(indices) for device, indices in self._queues.items()}
        self._states = {device: _ThreadState(device) for device in self._queues}
        self._waiting: dict[int, tuple[str, Any]] = {}
        self._ended: dict[int, bool] = {}
        self._returned: dict[int, Any] = {}
        self._errors: dict[int, BaseException] = {}
        self._num_barriers = 0
        self._result: Any = None

    def run(self) -> list[Any]:
        here, *others = self._queues
        for device in others:
            self._start_thread(device)
        self._run_replicas(here)
        for future in self._futures:  # The list grows at barriers.
            future.result()
        errors = [self._errors[index] for index in sorted(self._errors)]
        if errors:
            # Where one replica failed, the others diverge as a consequence.
            raise next((e for e in errors if not isinstance(e, DivergedReplicasError)), errors[0])
        return [self._returned[index] for index in range(len(self._functions))]

    def barrier(self, index: int, name: str, value: Any, action: Callable[[list[Any]], Any]) -> Any:
        device = self._devices[index]
        self._leave(index)
        if self._not_started[device]:
            self._start_thread(device)
        with self._changed:
            passed = self._num_barriers
            self._waiting[index] = (name, value)
            self._changed.notify_all()
            if index == 0:
                self._changed.wait_for(lambda: self._all_waiting or self._ended)
            else:
                self._changed.wait_for(lambda: self._num_barriers > passed or self._ended)
            if self._num_barriers == passed:
                self._check_barrier(index, name)
            result = self._result
        if index == 0:
            # All others wait.
            result = action([self._waiting[other][1] for other in range(len(self._functions))])
            with self._changed:
                self._waiting, self._result = {}, result
                self._num_barriers += 1
                self._changed.notify_all()
        self._enter(index)
        return result

    @property
    def _all_waiting(self) -> bool:
        return len(self._waiting) == len(self._functions)

    def _check_barrier(self, index: int, name: str) -> None:
        others = {
            other: reached for other, (reached, _) in self._waiting.items() if reached != name
        }
        others |= dict.fromkeys(self._ended, "the end of its training_step")
        if others:
            other, reached = min(others.items())
            raise DivergedReplicasError(
                f"replica {index} of {len(self._functions)} reached {name}, and replica {other}"
                f" reached {reached}: under memmap_dp all replicas must make the same calls to"
                " optimizers, schedulers and manual_backward in a step, whatever their rows"
            )

    def _start_thread(self, device: torch.device) -> None:
        self._futures.append(self._threads.submit(self._run_in_thread, device))

    def _run_in_thread(self, device: torch.device) -> None:
        with ExitStack() as stack:
            self._states[device].enter(stack)
            self._run_replicas(device)

    def _run_replicas(self, device: torch.device) -> None:
        """Run the replicas of a device that have not started, one after the other."""
        while True:
            with self._changed:
                if self._errors or not self._not_started[device]:
                    return
                index = self._not_started[device].pop(0)
            self._enter(index)
            try:
                self._returned[index] = self._functions[index]()
            except BaseException as error:
                self._errors[index] = error
            finally:
                self._leave(index, for_good=True)

    def _enter(self, index: int) -> None:
        queue = self._queues[self._devices[index]]
        with self._changed:
            self._changed.wait_for(lambda: queue[0] == index)

    def _leave(self, index: int, for_good: bool = False) -> None:
        queue = self._queues[self._devices[index]]
        with self._changed:
            queue.remove(index)
            if for_good:
                self._ended[index] = True
            else:
                queue.append(index)
            self._changed.notify_all()


class _ThreadState:
    """The modes that torch keeps per thread: those of this thread, to enter in another."""

    def __init__(self, device: torch.device) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._cache = torch.is_autocast_cache_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in sorted({"cpu", device.type})
        ]
        self._module = stream_module(device)
        self._stream = self._module.current_stream(device)

    def enter(self, stack: ExitStack) -> None:
        stack.enter_context(torch.inference_mode(self._inference))
        stack.enter_context(torch.set_grad_enabled(self._grad))
        for kind, dtype, enabled in self._autocast:
            stack.enter_context(
                torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._cache)
            )
        # This makes its device the current one, too.
        stack.enter_context(self._module.stream(self._stream))
