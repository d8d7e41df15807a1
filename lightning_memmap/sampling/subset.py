"""Folds and parts: every ``count``-th row of a dataset, or all rows but those."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class RowSubset:
    """Every ``count``-th row of a dataset from ``index`` on, or all rows but those.

    The rows of a subset are numbered in dataset order and treated as a dataset: they are divided
    into shards and steps, and permuted, as if they alone had been stored.

    Args:
        index: Selects the rows ``i`` with ``i % count == index``.
        count: How many such subsets the dataset has.
        excluded: The subset is all rows but the selected ones.

    Raises:
        ValueError: ``count`` is below 1, or below 2 where its rows are excluded, or ``index`` is
            outside ``[0, count)``.
    """

    index: int
    count: int
    excluded: bool = False

    def __post_init__(self) -> None:
        if self.count < 1 + self.excluded:
            raise ValueError(f"count={self.count}: at least {1 + self.excluded} parts are needed")
        if not 0 <= self.index < self.count:
            raise ValueError(f"index={self.index}: the parts are 0 to {self.count - 1}")

    def num_rows(self, num_rows: int) -> int:
        """Rows of the subset of a dataset.

        Args:
            num_rows: Rows of the dataset.

        Returns:
            The number of rows.
        """
        part = -(-(num_rows - self.index) // self.count)
        return num_rows - part if self.excluded else part

    def rows(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The dataset rows that the rows of the subset are.

        Args:
            numbers: Rows of the subset, int64 of shape (B,).

        Returns:
            Rows of the dataset, int64 of shape (B,).
        """
        if not self.excluded:
            return numbers * self.count + self.index
        rounds, left = np.divmod(numbers, self.count - 1)
        return rounds * self.count + left + (left >= self.index)
