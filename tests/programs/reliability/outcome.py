"""What a case of the program is, what may go wrong in it, and what is tested."""

import enum
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_memmap.store import Store, build_store, open_store, verify_store
from tests.programs.reliability.forks import LIMIT_S, Ending, Raised


class Fault(enum.Enum):
    """The columns of the table. All of them must be 0."""

    WRONG_ROWS = "wrong rows"
    HALF_STORE = "half stores"
    LEFTOVER = "left over"
    ORPHAN = "orphans"
    HANG = "hangs"
    FOREIGN_ERROR = "foreign errors"


@dataclass(frozen=True)
class Subject:
    """What is tested. A test of the checks themselves puts something faulty here."""

    build: Callable[..., Store] = build_store
    open: Callable[[Path], Store] = open_store
    verify: Callable[[Path], list[Any]] = verify_store
    limit_s: float = LIMIT_S


@dataclass
class Outcome:
    """What came of one case."""

    faults: list[tuple[Fault, str]] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)
    runs: int = 1
    seconds: float = 0.0

    def add(self, fault: Fault, text: str) -> None:
        """Note a fault."""
        self.faults.append((fault, text))

    def add_ending(self, ending: Ending, what: str, *, allowed: bool = False) -> bool:
        """Note what is wrong with the end of a call."""
        if ending.hung:
            self.add(Fault.HANG, f"{what} did not end\n{ending.output}")
        elif ending.status != 0:
            self.add(Fault.FOREIGN_ERROR, f"{what} ended with {ending.status}\n{ending.output}")
        elif isinstance(ending.value, Raised):
            error = ending.value
            if not allowed or not (error.ours or error.is_os_error):
                self.add(Fault.FOREIGN_ERROR, f"{what} raised {error.text}")
        else:
            return True
        return False
