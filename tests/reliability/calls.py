"""Stand between a build and the file system: count its calls, and let one of them go wrong.

The functions of `os` and the files that `open` gives are replaced in this process. So a call is
one that Python code makes below one directory; what a library does there in C is not seen, but
comes to lie between two calls that are.
"""

import builtins
import errno
import functools
import io
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

Mode = Literal["count", "before", "after", "torn", "short", "ENOSPC", "EIO"]

_CALLS = (
    "chmod", "close", "fchmod", "fdatasync", "fsync", "ftruncate", "link", "mkdir", "open",
    "posix_fallocate", "pread", "preadv", "pwrite", "pwritev", "read", "remove", "rename",
    "replace", "rmdir", "symlink", "truncate", "unlink", "write", "writev",
)  # fmt: skip
#: Calls of which a part may be done when the power goes.
WRITES = ("pwrite", "write")
#: Calls that change nothing on the disk.
_READS = ("close", "pread", "preadv", "read")


def makes_sense(mode: Mode, name: str) -> bool:
    """Whether it makes a difference to let a call go wrong in this way."""
    if mode in ("torn", "short"):
        return name in WRITES
    if mode == "after":
        return name not in _READS
    return True


class Calls:
    """The calls of this process, and what happens at one of them.

    Args:
        root: Only what lies below this directory counts.
        number: Number of the call that goes wrong, counted from 0.
        mode: ``before``: this process is killed before the call; ``after``: after it; ``torn``:
            after one half of the bytes is written; ``short``: the call writes one half of the
            bytes, and the next one that writes finds the disk full; ``ENOSPC`` and ``EIO``: the
            call fails; ``count``: nothing happens.
        who: Whose calls count: those of the process that installs this, or of its workers, each
            with a number of its own.
        log: Directory in which the names of the calls are noted, a file for each process.
    """

    def __init__(
        self,
        root: Path,
        number: int = -1,
        mode: Mode = "count",
        who: Literal["parent", "worker"] = "parent",
        log: Path | None = None,
    ) -> None:
        self._next = 0
        self._is_full = False
        self._log = log
        self._root = os.path.realpath(root)
        self._number = number
        self._mode = mode
        self._pid = 0
        self._who = who
        self._lock = threading.RLock()
        self._open = io.open

    def install(self) -> None:
        """Replace the functions of this process, for good."""
        self._pid = os.getpid()
        calls = self
        for name in _CALLS:
            setattr(os, name, self._replacement(name, getattr(os, name)))

        class File(io.FileIO):
            def write(self, data: Any) -> int:
                whole = super().write
                return int(calls.perform("write", lambda part: whole(part), data))

            def readinto(self, buffer: Any) -> Any:
                whole = super().readinto
                return calls.perform("read", lambda: whole(buffer))

            def readall(self) -> Any:
                whole = super().readall
                return calls.perform("read", lambda: whole())

            def truncate(self, size: int | None = None) -> int:
                whole = super().truncate
                return int(calls.perform("ftruncate", lambda: whole(size)))

            def close(self) -> None:
                if self.closed:
                    return
                whole = super().close
                calls.perform("close", lambda: whole())

        original = self._open

        def opened(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: str | None = None,
            errors: str | None = None,
            newline: str | None = None,
            closefd: bool = True,
            opener: Any = None,
        ) -> Any:
            if not self._concerns((file,), {}):
                return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
            raw_mode = mode.replace("b", "").replace("t", "")
            raw = self.perform("open", lambda: File(file, raw_mode, closefd, opener))
            if buffering == 0:
                return raw
            if raw.readable() and raw.writable():
                buffered: Any = io.BufferedRandom(raw)
            else:
                buffered = (io.BufferedReader if raw.readable() else io.BufferedWriter)(raw)
            if "b" in mode:
                return buffered
            return io.TextIOWrapper(buffered, encoding, errors, newline)

        builtins.open = opened
        io.open = opened

    def _replacement(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*arguments: Any, **options: Any) -> Any:
            if not self._concerns(arguments, options):
                return original(*arguments, **options)
            if name in WRITES:
                place, data, *rest = arguments
                return self.perform(name, lambda part: original(place, part, *rest), data)
            return self.perform(name, lambda: original(*arguments, **options))

        return replacement

    def _concerns(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Whether a call is about something below the root."""
        what: Any = arguments[0] if arguments else options.get("path", options.get("src"))
        directory = options.get("dir_fd", options.get("src_dir_fd"))
        try:
            if isinstance(what, int):
                path = os.readlink(f"/proc/self/fd/{what}")
            elif directory is not None:
                path = os.readlink(f"/proc/self/fd/{directory}") + "/"
            else:
                path = os.path.abspath(os.fsdecode(what))
        except (OSError, TypeError, ValueError):
            return False
        return path.startswith(self._root)

    def perform(self, name: str, original: Callable[..., Any], *data: Any) -> Any:
        """Make one call, or let it go wrong."""
        if (os.getpid() == self._pid) != (self._who == "parent"):
            return original(*data)
        with self._lock:
            number = self._next
            self._next += 1
            if self._log is not None:
                with self._open(self._log / str(os.getpid()), "a") as file:
                    file.write(f"{name}\n")
            is_full = self._is_full and bool(data)
            self._is_full = self._is_full and not is_full
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if number != self._number or self._mode == "count":
            return original(*data)
        if self._mode in ("ENOSPC", "EIO"):
            if name == "close":
                # As the system does: the descriptor is gone whatever the answer.
                original()
            code = getattr(errno, self._mode)
            raise OSError(code, os.strerror(code))
        if self._mode == "after":
            original(*data)
        if self._mode in ("torn", "short") and data:
            part = memoryview(data[0]).cast("B")
            done = original(part[: len(part) // 2])
            if self._mode == "short":
                self._is_full = True
                return done
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("a killed process goes on")
