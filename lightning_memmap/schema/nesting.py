"""Nesting: how lists of records, and what is None in some rows, are put together again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from lightning_memmap.errors import StoreError

#: The leaves of a sample or batch by the index of their field.
Leaves: TypeAlias = Sequence[Any] | Mapping[int, Any]
#: Puts leaves into a structure.
Build: TypeAlias = Callable[[Leaves], Any]


class Masked(NamedTuple):
    """What a batch has for rows of which some are None: values and a mask."""

    values: Any
    """What a batch has where no row is None. Rows that are None are zeros, or as short as possible
    if rows differ in length."""
    mask: Tensor
    """True for each row that is not None: bool of shape (B,), on the device of ``values``."""

    def rows(self) -> list[Any]:
        """The rows, with None for those that have no value.

        Raises:
            TypeError: The rows have more than one field.
        """
        values = self.values
        if isinstance(values, Mapping) or not (
            hasattr(values, "rows") or len(values) == len(self.mask)
        ):
            raise TypeError(
                f"Masked: the rows of a {type(values).__name__} are in its parts: take them from"
                " there, with `mask`"
            )
        found = values.rows() if hasattr(values, "rows") else values
        given = self.mask.tolist()
        return [row if is_given else None for row, is_given in zip(found, given, strict=True)]


@dataclass(frozen=True)
class Nesting:
    """How the leaves of lists of records, and of what is None in some rows, are put together.

    Args:
        records: Given what puts together one record, and the leaves of the list: for each field the
            values of all records.
        optional: Given what puts together the part that may be None, all leaves, and the leaf that
            says where it is not.
    """

    records: Callable[[Build, Mapping[int, Any]], Any]
    optional: Callable[[Build, Leaves, Any], Any]


def _stacked(record: Build, leaves: Mapping[int, Any]) -> Any:
    return record(leaves)


def _masked(part: Build, leaves: Leaves, mask: Any) -> Masked:
    return Masked(part(leaves), mask)


def _list(record: Build, leaves: Mapping[int, Any]) -> list[Any]:
    lengths = {len(leaf) for leaf in leaves.values()}
    if len(lengths) > 1:
        raise StoreError(
            f"the records of a row have {' and '.join(map(str, sorted(lengths)))} values: the store"
            " is damaged, build it again"
        )
    count = lengths.pop() if lengths else 0
    return [record({at: leaf[row] for at, leaf in leaves.items()}) for row in range(count)]


def _or_none(part: Build, leaves: Leaves, mask: Any) -> Any:
    return part(leaves) if mask else None


#: A batch whose leaves have all rows in one tensor.
BATCH = Nesting(_stacked, _masked)
#: One sample, as the dataset gives it.
SAMPLE = Nesting(_list, _or_none)
