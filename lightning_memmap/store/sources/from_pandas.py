"""Columns of a pandas DataFrame."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_memmap.store.sources.names import chosen


def columns_of(frame: Any, names: Sequence[str] | None) -> dict[str, Any]:
    """Return the columns of a DataFrame. Its index is left out.

    Args:
        frame: The DataFrame.
        names: The columns to use; None for all.

    Returns:
        One numpy array for each column, by name; see `to_numpy`.

    Raises:
        ValueError: A name is not among those of the table, or is there twice.
    """
    return {name: to_numpy(frame[name]) for name in chosen(names, list(frame.columns))}


def to_numpy(series: Any) -> np.ndarray:
    """Convert a column to a numpy array, in the order of its rows.

    Args:
        series: A Series, or an Index or array of pandas.

    Returns:
        For one of numpy's types the array itself. For one of pandas' own types an array of the
        numpy type that it stands for where no value is missing, and of objects otherwise; a missing
        value is then None.
    """
    if isinstance(series.dtype, np.dtype):
        return np.asarray(series)
    numbers = getattr(series.dtype, "numpy_dtype", None)
    missing = np.asarray(series.isna())
    if isinstance(numbers, np.dtype) and numbers.kind in "biufc" and not missing.any():
        return np.asarray(series, numbers)
    values: np.ndarray = series.to_numpy(dtype=object, copy=True)
    values[missing] = None
    return values
