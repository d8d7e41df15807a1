"""The rows of one field: the only form between what reads a dataset and what writes a store."""

from typing import NamedTuple

from torch import Tensor

from lightning_memmap.sampling import Integers


class Values(NamedTuple):
    """Rows of one field, in the dtype in which it is kept."""

    data: Tensor
    """Of shape (n, *field shape); of a field whose rows differ in length, the items of all rows one
    after the other, (items, *item shape)."""
    sizes: Integers | None = None
    """Of such a field, the sizes of each row in the dimensions that differ, int64 of shape (n,
    number of these)."""

    @property
    def num_rows(self) -> int:
        """How many rows these are."""
        return len(self.data if self.sizes is None else self.sizes)
