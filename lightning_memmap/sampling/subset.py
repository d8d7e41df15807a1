"""Index views: rows of a dataset that are treated as a dataset of their own. No row is copied."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lightning_memmap.sampling.identity import Numbers


class RowSubset(ABC):
    """Some rows of a dataset: a frozen value.

    The rows of a subset are numbered and treated as a dataset: they are divided into shards and
    steps, and permuted, as if they alone had been stored.
    """

    @property
    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What tells it from other subsets, as JSON values."""

    @abstractmethod
    def num_rows(self, num_rows: int) -> int:
        """Rows of the subset of a dataset.

        Args:
            num_rows: Rows of the dataset.
        """

    @abstractmethod
    def rows(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The dataset rows that the rows of the subset are.

        Args:
            numbers: Rows of the subset, int64 of shape (B,).

        Returns:
            Rows of the dataset, int64 of shape (B,).
        """


@dataclass(frozen=True)
class StridedRows(RowSubset):
    """Every ``count``-th row of a dataset from ``index`` on, or all rows but those, in its order.

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

    @property
    @override
    def identity(self) -> dict[str, Any]:
        return asdict(self)

    @override
    def num_rows(self, num_rows: int) -> int:
        part = -(-(num_rows - self.index) // self.count)
        return num_rows - part if self.excluded else part

    @override
    def rows(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        if not self.excluded:
            return numbers * self.count + self.index
        rounds, left = np.divmod(numbers, self.count - 1)
        return rounds * self.count + left + (left >= self.index)


@dataclass(frozen=True)
class ChosenRows(RowSubset):
    """Rows that are listed one by one, in this order.

    Args:
        chosen: Rows of the dataset, int64 of shape (N,), at least one and none twice.
    """

    chosen: Numbers

    @property
    @override
    def identity(self) -> dict[str, Any]:
        return {"rows": self.chosen.identity}

    @override
    def num_rows(self, num_rows: int) -> int:
        return len(self.chosen)

    @override
    def rows(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        found: NDArray[np.int64] = self.chosen.array[numbers]
        return found
