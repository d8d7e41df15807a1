"""Columns of a pandas DataFrame as arrays."""

from typing import Any

import numpy as np

from lightning_memmap.store.sources.field_array import NullableRows


def to_numpy(series: Any) -> np.ndarray | NullableRows:
    """Convert a column to a numpy array, in the order of its rows.

    Args:
        series: A Series, or an Index or array of pandas.

    Returns:
        For one of numpy's types the array itself, in which NaN is a number. For one of pandas' own
        types an array of the numpy type that it stands for, or of objects; times are in UTC.
        Numbers and times of which some are missing are `NullableRows`; among objects, a missing
        value is None.
    """
    numbers = series.dtype if isinstance(series.dtype, np.dtype) else _numpy_dtype(series.dtype)
    missing = np.asarray(series.isna())
    is_number = isinstance(numbers, np.dtype) and numbers.kind in "biufc"
    if not missing.any():
        return np.asarray(series, numbers)
    if numbers is series.dtype and is_number:
        return np.asarray(series)
    if is_number:
        return NullableRows(series.to_numpy(dtype=numbers, na_value=0), ~missing)
    if isinstance(numbers, np.dtype) and numbers.kind in "mM":
        times = np.array(series, numbers)
        times[missing] = np.zeros((), numbers)
        return NullableRows(times, ~missing)
    values: np.ndarray = series.to_numpy(dtype=object, copy=True)
    values[missing] = None
    return values


def _numpy_dtype(dtype: Any) -> np.dtype[Any] | None:
    """The type of numpy that one of pandas' own stands for, if there is one."""
    unit = getattr(dtype, "unit", None)
    if getattr(dtype, "tz", None) is not None and unit is not None:
        return np.dtype(f"datetime64[{unit}]")
    found = getattr(dtype, "numpy_dtype", None)
    is_known = isinstance(found, np.dtype) and found.kind in "biufcmM"
    return found if is_known else None
