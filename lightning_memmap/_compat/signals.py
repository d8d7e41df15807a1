"""Defers signals that come while an optimizer updates the weights."""

import signal
import threading
from types import FrameType
from typing import Any

from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
#: Every ``optimizer.step`` runs in the first. The Trainer runs training steps within it, in the
#: second.
_STEP = Optimizer.profile_hook_step(lambda *_: None).__code__
_TRAINING_STEP = Precision._wrap_closure.__code__


class SignalDeferral:
    """Delays the handlers of signals until the optimizer has updated all weights.

    A handler that raises, like the one for Ctrl-C, or that saves a checkpoint would otherwise leave
    or save weights of which only some are updated.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._pending: list[int] = []
        self._is_closed = False
        self._is_updated = True

    def install(self) -> None:
        """Replace the current handlers. The Trainer restores the handlers it found."""
        if threading.current_thread() is not threading.main_thread():
            return
        for name in _NAMES:
            signum = getattr(signal, name, None)
            handler = None if signum is None else signal.getsignal(signum)
            if signum is not None and callable(handler):
                self._handlers[signum] = handler
                signal.signal(signum, self._handle)

    def close(self) -> None:
        """Defer no more signals."""
        self._is_closed = True

    def begin(self) -> None:
        """Note that an optimizer's step begins, which may compute gradients before its update."""
        self._is_updated = False

    def end(self) -> None:
        """Note that an update has ended, and run the handlers of signals received during it."""
        self._is_updated = True
        while self._pending:
            signum = self._pending.pop(0)
            self._handlers[signum](signum, None)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._is_closed or self._is_updated or not _is_in_update(frame):
            self._handlers[signum](signum, frame)
        else:
            self._pending.append(signum)


def _is_in_update(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is _TRAINING_STEP:
            return False
        if frame.f_code is _STEP:
            return True
        frame = frame.f_back
    return False
