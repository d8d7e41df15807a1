"""Which rows of a store are there while it is built, and which its readers wait for.

The building process and all readers on its machine share ``serving`` in the generation: ``present``
has a byte for each row, ``wanted-*`` the places that a reader needs next, one file for each reader.
"""

import fcntl
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import numpy as np
from numpy.typing import NDArray

from lightning_memmap.errors import StoreError
from lightning_memmap.sampling import Integers, Shards
from lightning_memmap.store.directory import JOURNAL, SERVING

#: Where the state is, and the time at which a reader last waited; the rows follow.
_STATE, _HEADER_BYTES = 8, 16
_BUILDING, _WHOLE, _ENDED = range(3)
_WANTED = "wanted-"
_SHORT_S, _LONG_S = 0.0005, 0.003
#: How often a waiting reader looks whether the building process is alive.
_LOOK_S = 1.0
#: Why builds of this process have ended, by generation: other processes are told the text alone.
_errors: dict[Path, BaseException] = {}


class Serving:
    """The rows of a store that is being built, as the processes of one machine share them.

    Args:
        generation: The generation of the store.
        num_rows: Its rows.
    """

    def __init__(self, generation: Path, num_rows: int) -> None:
        self.generation, self.path = generation, generation / SERVING
        self._header = np.memmap(self.path / "present", np.uint8, "r+", shape=_HEADER_BYTES)
        self._wait_time = self._header[:_STATE].view(np.float64)
        #: By place, whether the row is there.
        self.present: NDArray[np.uint8] = np.memmap(
            self.path / "present", np.uint8, "r+", _HEADER_BYTES, (num_rows,)
        )

        self._wanted = Wanted(self)

    @classmethod
    def make(cls, generation: Path, num_rows: int) -> "Serving":
        """Begin to share the rows of a build. What an interrupted one has left is removed."""
        path = generation / SERVING
        path.mkdir(exist_ok=True)
        for left in path.iterdir():
            left.unlink()
        _errors.pop(generation.resolve(), None)
        with open(path / "present", "xb") as file:
            file.truncate(_HEADER_BYTES + num_rows)
        return cls(generation, num_rows)

    def end(self, error: BaseException | None = None) -> None:
        """Tell the readers that the store is whole, or why it will not be."""
        if error is not None:
            _errors[self.generation.resolve()] = error
            text = str(error) or type(error).__name__
            with suppress(OSError):  # The disk may be full, which other processes are not told.
                (self.path / "failed").write_text(text, encoding="utf-8")
        self._header[_STATE] = _WHOLE if error is None else _ENDED

    @property
    def is_waited_for(self) -> bool:
        """Whether a reader waits for rows."""
        return monotonic() - float(self._wait_time[0]) < 0.1

    @property
    def is_whole(self) -> bool:
        """Whether the store is committed."""
        return bool(self._header[_STATE] == _WHOLE)

    @property
    def share(self) -> float:
        """How many of the rows are there, from 0 to 1."""
        return float(np.count_nonzero(self.present)) / len(self.present)

    @property
    def has_all(self) -> bool:
        """Whether all rows are there."""
        return bool(self.present.all())

    def wanted(self) -> list[Path]:
        """The files in which readers say which rows they need. None of them ever changes."""
        return list(self.path.glob(f"{_WANTED}*"))

    def want_rows(self, shards: Shards, rows: Integers) -> None:
        """Ask for rows, and wait until they are there."""
        places = shards.locate(rows)
        if not self.present.take(places).all():
            self._wanted.say(places)
        self.wait(places)

    def wait(self, places: Integers) -> None:
        """Wait until rows are there.

        Raises:
            StoreError: They will never be.
        """
        self._wait(lambda: bool(self.present.take(places).all()))

    def wait_for_commit(self) -> None:
        """Wait until the store is committed."""
        self._wait(lambda: self.is_whole)

    def _wait(self, is_there: Callable[[], bool]) -> None:
        looked, pause = monotonic(), _SHORT_S
        while True:
            if self._header[_STATE] == _ENDED:
                if (error := _errors.get(self.generation.resolve())) is not None:
                    raise error
                raise StoreError(f"the store is not whole, and its build has ended: {self._reason}")
            if is_there():
                return
            now = monotonic()
            self._wait_time[0] = now
            if now - looked > _LOOK_S:
                looked = now
                self._check_alive()
            sleep(pause)
            pause = min(2 * pause, _LONG_S)

    @property
    def _reason(self) -> str:
        """Why the build has ended, as its process could write it down."""
        try:
            text = (self.path / "failed").read_text(encoding="utf-8")
        except FileNotFoundError:
            text = ""
        return text or "see what the process with local rank 0 says"

    def _check_alive(self) -> None:
        """Check that a process builds the store: the building process holds the journal's lock."""
        try:
            descriptor = os.open(self.generation / JOURNAL, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return  # Just committed.
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        finally:
            os.close(descriptor)
        raise StoreError(
            f"the process that builds the store at {self.generation.parent} has died: start again,"
            " and it goes on with the rows that are there"
        )


class Wanted:
    """What one reader says that it needs next.

    Args:
        serving: The rows of the build.
    """

    def __init__(self, serving: Serving) -> None:
        self._directory = serving.path
        self._said: Path | None = None

    def say(self, places: Integers) -> None:
        """Ask for rows, in their order, instead of what was asked for before."""
        name = secrets.token_hex(8)
        with suppress(FileNotFoundError):  # The store has just been committed.
            (self._directory / name).write_bytes(places.tobytes())
            said = (self._directory / name).rename(self._directory / f"{_WANTED}{name}")
            if self._said is not None:
                self._said.unlink()
            self._said = said
