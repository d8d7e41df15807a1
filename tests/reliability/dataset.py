"""A dataset whose editions differ where no probe looks, and what its rows must be."""

import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from lightning_memmap.store.probes import probe_rows
from tests.datasets import Numbered


@dataclass
class Files:
    """What stands for the files that a dataset reads: shared by all of a process, and by none of
    the arguments that a dataset is made with.

    Args:
        edition: Edition of the content.
        pause_s: How long a row takes.
        slow_from: From this row on, rows take ``slow_pause_s``.
        slow_pause_s: See ``slow_from``.
    """

    edition: int = 0
    pause_s: float = 0.0
    slow_from: int | None = None
    slow_pause_s: float = 0.0


files = Files()


class Edited(Dataset[dict[str, Any]]):
    """Rows like those of `Numbered`. All but the probe rows tell the edition: that of the
    arguments, plus that of `files`.

    Args:
        num_rows: Rows of the dataset.
        edition: Edition that can be seen from the arguments.
    """

    def __init__(self, num_rows: int, edition: int = 0) -> None:
        self.num_rows = num_rows
        self.edition = edition

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        pause_s = files.pause_s
        if files.slow_from is not None and row >= files.slow_from:
            pause_s = files.slow_pause_s
        is_probe = row in probe_rows(self.num_rows)
        if pause_s and not is_probe:
            time.sleep(pause_s)
        edition = 0 if is_probe else self.edition + files.edition
        return Numbered(self.num_rows, edition)[row]


def expected_rows(num_rows: int, edition: int) -> dict[str, Tensor]:
    """All rows of an edition in dataset order, by field."""
    rows = Numbered(num_rows, edition).expected()
    probes = probe_rows(num_rows)
    for name, unedited in Numbered(num_rows, 0).expected().items():
        rows[name][probes] = unedited[probes]
    return rows
