"""Columns of a polars DataFrame as arrays."""

from typing import Any

import numpy as np

from lightning_memmap.store.sources.field_array import NullableRows, object_array


def to_numpy(series: Any) -> np.ndarray | NullableRows:
    """Convert a column to a numpy array.

    Returns:
        The values. Numbers and times of which some are missing are `NullableRows`; of anything else
        an array of objects, in which a missing value is None.
    """
    if not series.null_count():
        values: np.ndarray = series.to_numpy()
        return values
    # As an array of numbers, the column would have NaN in place of what is missing.
    is_bool = str(series.dtype) == "Boolean"
    if series.dtype.is_numeric() or series.dtype.is_temporal() or is_bool:
        zero = False if is_bool else 0
        filled = series.to_physical().fill_null(zero).cast(series.dtype)
        return NullableRows(filled.to_numpy(), series.is_not_null().to_numpy())
    return object_array(series.to_list())
