"""Training sets for mixtures, whose rows say what they are."""

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

SIZES = {"a": 50, "b": 21, "c": 7}
SHARES = {"a": 0.5, "b": 0.3, "c": 0.2}
SAMPLES = 120


class NumberedSet(Dataset[dict[str, Any]]):
    """Rows that say what they are: of set ``code``, with ``row % 5`` to ``row % 5 + 3`` steps.

    Args:
        code: Number of the set.
        num_rows: Rows.
        steps: The least steps of a row.
        pad: Floats in each row.
    """

    def __init__(self, code: int, num_rows: int, steps: int = 0, pad: int = 3) -> None:
        self.code, self.num_rows, self.steps, self.pad = code, num_rows, steps, pad

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < self.num_rows:
            raise IndexError(row)
        number = 100 * self.code + row
        return {
            "number": number,
            "pad": torch.full((self.pad,), float(number)),
            "steps": np.arange(self.steps + row % 5, dtype=np.int32) + 1000 * number,
            "image": np.full((row % 3, 1 + row % 2, 2), number, np.int16),
            "name": f"row {number}",
        }


def mixed_sets(**options: Any) -> dict[str, NumberedSet]:
    return {
        name: NumberedSet(code, size, **options)
        for code, (name, size) in enumerate(SIZES.items(), 1)
    }


def checked_numbers(batch: Any) -> list[int]:
    """The numbers of the rows of a batch, once each field is seen to be theirs."""
    numbers: list[int] = batch["number"].tolist()
    for index, number in enumerate(numbers):
        code, row = divmod(number, 100)
        sample = NumberedSet(code, 100)[row]
        assert torch.equal(batch["pad"][index], sample["pad"])
        assert batch["steps"][index].tolist() == sample["steps"].tolist()
        assert batch["image"][index].tolist() == sample["image"].tolist()
        assert batch["name"][index] == sample["name"]
    return numbers
