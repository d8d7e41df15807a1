"""The state of a callback that writes results, for objects that read them in the same run."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class ResultWriter(ABC):
    """A callback that writes results per row."""

    keys: Sequence[str]
    split: str

    @abstractmethod
    def path_in(self, trainer: Any) -> Path:
        """Return the folder that it writes to in a run, with the member filled in."""
