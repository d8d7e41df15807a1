"""Narrowing: fields that are kept in another dtype than the dataset gives, without any loss."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.schema.fields import DTYPES, Field, dtype_name


def check_store_dtypes(given: Any) -> dict[str, torch.dtype]:
    """Check the dtypes in which a user wants fields to be kept.

    Args:
        given: Names of dtypes, or dtypes, by name of the field; None for none.

    Returns:
        The dtypes by name of the field.

    Raises:
        TypeError: It is not a mapping.
        ValueError: A store has no such dtype.
    """
    if not isinstance(given, Mapping | None):
        raise TypeError(f"store_dtypes={given!r}: give a dict such as {{'image': 'uint8'}}")
    dtypes = {}
    for name, dtype in (given or {}).items():
        key = dtype_name(dtype) if isinstance(dtype, torch.dtype) else dtype
        if not isinstance(key, str) or key not in DTYPES:
            raise ValueError(f"store_dtypes[{name!r}]={dtype!r}: choose one of {', '.join(DTYPES)}")
        dtypes[name] = DTYPES[key]
    return dtypes


def narrowed(field: Field, values: Tensor | np.ndarray) -> Tensor | np.ndarray:
    """Convert values to the dtype in which a field is kept.

    Args:
        field: The field.
        values: Rows or one row of it, in the dtype in which the dataset gives it.

    Returns:
        The values in the field's dtype: unchanged where that is the same.

    Raises:
        ValueError: A value would change. The message names the first one.
    """
    if field.given is None:
        return values
    if isinstance(values, Tensor):
        tensor = values
    else:
        tensor = torch.from_numpy(np.array(values, values.dtype.newbyteorder("=")))
    kept = tensor.to(field.dtype)
    before, after, back = map(_comparable, (tensor, kept, kept.to(field.given)))
    # Compared both ways: -1 becomes 65535 and then -1 again, and 2**53 + 1 equals the double 2**53.
    is_kept = ((before == after) & (before == back)) | (np.isnan(before) & np.isnan(after))
    if not is_kept.all():
        value = before[~is_kept].reshape(-1)[0] if before.ndim else before
        raise ValueError(
            f"field {field.name!r}: {value} cannot be kept as {dtype_name(field.dtype)}: leave the"
            " field out of store_dtypes, or give a dtype that holds all its values"
        )
    return kept


def _comparable(values: Tensor) -> np.ndarray:
    """As a numpy array: torch cannot compare all kinds of integers, and numpy has no bfloat16."""
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
