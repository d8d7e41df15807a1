"""Distributions of the values and lengths of a field, as bars."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_memmap.store import Store
from lightning_memmap.store.columns.column import OpenColumn

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


def distributions(store: Store, column: OpenColumn, name: str) -> Iterator[Distribution]:
    """Count the values of a field, and their number in a row where that differs.

    Args:
        store: The store.
        column: The field's column.
        name: The field's name.

    Yields:
        The distributions. Of many rows, some are looked at that are evenly spaced.
    """
    if not column.row(0).dim():
        rows, note = _spaced(store.num_rows, _MAX_ROWS)
        yield _distribution(name, column.fetch(rows.numpy()), note)
        return
    rows, note = _spaced(store.num_rows, _MAX_ARRAYS)
    values = [column.row(int(row)).reshape(-1) for row in rows]
    lengths = torch.tensor([len(each) for each in values])
    if len(lengths.unique()) > 1:
        yield _distribution(f"{name}: values in a row", lengths, note)
    yield _distribution(name, torch.cat(values)[:_MAX_VALUES], note)


def _spaced(num_rows: int, most: int) -> tuple[Tensor, str]:
    """Evenly spaced rows, and a note where these are not all."""
    if num_rows <= most:
        return torch.arange(num_rows), ""
    return torch.linspace(0, num_rows - 1, most).long(), f"of {most:,} of {num_rows:,} rows"


def _distribution(title: str, values: Tensor, note: str) -> Distribution:
    if values.is_complex():
        title, values = f"{title} (absolute)", values.abs()
    is_whole = not values.is_floating_point()
    # numpy and torch lack some operations for bfloat16 and unsigned types.
    numbers = values.double()
    finite = numbers[numbers.isfinite()]
    notes = [note] if note else []
    if len(finite) < len(numbers):
        notes.append(f"{len(numbers) - len(finite):,} not finite")
    if not len(finite):
        return Distribution(title, (), ", ".join(["no values", *notes]))
    low, high = float(finite.min()), float(finite.max())
    notes.insert(0, f"{low:g} to {high:g}, mean {float(finite.mean()):.4g}")
    known, counts = finite.unique(return_counts=True)
    if len(known) > _NUM_BARS or not is_whole:
        # Ranges of whole numbers begin at whole numbers.
        width = (high - low + is_whole) / _NUM_BARS or 1.0
        bins = ((finite - low) / width).long().clamp(max=_NUM_BARS - 1)
        counts = torch.bincount(bins, minlength=_NUM_BARS)
        known = low + width * torch.arange(_NUM_BARS)
        known = known.ceil() if is_whole else known
    largest = int(counts.max())
    bars = tuple(
        Bar(f"{value:.6g}", count, count / largest)
        for value, count in zip(known.tolist(), counts.tolist(), strict=True)
    )
    return Distribution(title, bars, ", ".join(notes))
