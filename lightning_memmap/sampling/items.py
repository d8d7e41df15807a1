"""The items that a loss is a mean over, such as tokens, if the plan of an epoch knows them."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_memmap.sampling.factory import Fields
from lightning_memmap.sampling.packed import PackedSampler
from lightning_memmap.sampling.rows import Integers
from lightning_memmap.sampling.sampler import Sampler

#: Counts the items at consecutive positions of an epoch, of shape (len(positions),).
CountItems: TypeAlias = Callable[[int, range], NDArray[Any]]


def make_item_counter(name: str, order: Sampler, fields: Fields) -> CountItems:
    """Return a function that counts the items at positions by a field of their rows.

    Args:
        name: A field with one number in each row, or with rows of different lengths, whose items
            are counted.
        order: The order of the rows.
        fields: The fields of the dataset.

    Raises:
        ValueError: The field doesn't exist, is text, is None in a row, or has a negative or
            non-finite number; or the order cuts rows.
    """
    if isinstance(order, PackedSampler) and order.cuts_rows:
        raise ValueError(
            f"weight={name!r}: rows are cut by the sampler, and the items of their pieces are"
            " unknown: pass a function of the batch, or pack with overflow='error' or 'drop'"
        )
    rows = order.pool.dataset_rows(order.pool.index())
    items = _numbers_of(name, rows, fields)
    is_valid = np.isfinite(items) & (items >= 0)
    if not is_valid.all():
        wrong = int(np.argmin(is_valid))
        raise ValueError(
            f"weight={name!r}: row {rows[wrong]} has {items[wrong]!r}: numbers of items must be"
            " finite and not negative"
        )
    return partial(order.sums_at, items)


def _numbers_of(name: str, rows: Integers, fields: Fields) -> NDArray[Any]:
    """Return the number in a field of each row, or the length of its values."""
    try:
        values = fields.values(name, rows)
    except ValueError as error:
        try:
            return fields.lengths(name)[rows]
        except ValueError:
            raise ValueError(f"weight={name!r}: {error}") from error
    if values.dtype.kind not in "biuf":
        raise ValueError(
            f"weight={name!r}: the field is text: choose a field of numbers, or pass a function of"
            " the batch"
        )
    return values
