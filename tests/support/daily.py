"""A part of many cases: another part on each day, so that all have their turn."""

from collections.abc import Iterator
from datetime import date
from itertools import count


def numbers_of_today(step: int) -> Iterator[int]:
    """Count in steps, from a number below ``step`` that changes from day to day."""
    return count(date.today().toordinal() % step, step)


def slice_of_today(step: int) -> slice:
    """Return a slice of every ``step``-th item, from one that changes from day to day."""
    return slice(date.today().toordinal() % step, None, step)
