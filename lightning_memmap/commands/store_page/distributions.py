"""Distributions of the values and lengths of a field, as bars."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.sampling import Integers
from lightning_memmap.schema import Field
from lightning_memmap.store import Store
from lightning_memmap.store.open_columns import OpenColumn

#: The most rows of numbers that are looked at, of arrays, and the most values of these.
_MAX_ROWS, _MAX_ARRAYS, _MAX_VALUES = 2**18, 256, 2**20
_NUM_BARS = 24


@dataclass(frozen=True)
class Bar:
    """A value or a range of values, and how many there are.

    Args:
        label: The value, or where the range begins.
        count: How many there are.
        share: ``count`` relative to the largest one of the distribution.
    """

    label: str
    count: int
    share: float


@dataclass(frozen=True)
class Distribution:
    """The distribution of something.

    Args:
        title: What is counted.
        bars: The counts; without any where there is nothing to count.
        note: Range, and what was left out.
    """

    title: str
    bars: tuple[Bar, ...]
    note: str


def distributions(store: Store, field: Field, column: OpenColumn) -> Iterator[Distribution]:
    """Count the values of a field, and their number in a row where that differs. Of text and
    bytes, only the lengths are counted.

    Yields:
        The distributions, of rows that are not None. Of many rows, some are looked at that are
        evenly spaced.
    """
    name, given = field.name, np.flatnonzero(store.given(field.name))
    if not field.shape:
        rows, note = _spaced(given, _MAX_ROWS)
        numbers = column.fetch(rows)
        yield _distribution(name, torch.as_tensor(numbers), note)
        return
    rows, note = _spaced(given, _MAX_ARRAYS)
    values = [column.row(row).reshape(-1) for row in rows.tolist()]
    if field.num_variable:
        what = "bytes" if field.is_text else "values"
        lengths = torch.tensor([len(each) for each in values])
        yield _distribution(f"{name}: {what} in a row", lengths, note)
    if not field.is_text:
        every = torch.cat(values) if values else torch.empty(0)
        yield _distribution(name, every[:: 1 + len(every) // _MAX_VALUES], note)


def _spaced(rows: Integers, most: int) -> tuple[Integers, str]:
    """Evenly spaced rows of some, and a note where these are not all."""
    if len(rows) <= most:
        return rows, ""
    places = torch.linspace(0, len(rows) - 1, most).long().numpy()
    return rows[places], f"of {most:,} of {len(rows):,} rows"


def _distribution(title: str, values: Tensor, note: str) -> Distribution:
    if values.is_complex():
        title, values = f"{title} (absolute)", values.abs()
    is_whole = not values.is_floating_point()
    # numpy has no bfloat16.
    numbers = values.double().numpy()
    finite = numbers[np.isfinite(numbers)]
    notes = [note] if note else []
    if len(finite) < len(numbers):
        notes.append(f"{len(numbers) - len(finite):,} not finite")
    if not len(finite):
        return Distribution(title, (), ", ".join(["no values", *notes]))
    low, high = finite.min(), finite.max()
    notes.insert(0, f"{low:g} to {high:g}, mean {finite.mean():.4g}")
    starts, counts = np.unique(finite, return_counts=True)
    if len(starts) > _NUM_BARS or not is_whole:
        # Ranges of whole numbers have whole numbers in them: the last one ends after the largest.
        counts, edges = np.histogram(finite, _NUM_BARS, (low, high + is_whole))
        starts = np.ceil(edges[:-1]) if is_whole else edges[:-1]
    largest = counts.max()
    bars = tuple(
        Bar(f"{start:.6g}", int(count), float(count / largest))
        for start, count in zip(starts, counts, strict=True)
    )
    return Distribution(title, bars, ", ".join(notes))
