"""Numbers of Python, numpy and torch: their dtypes, and lists of them as one array."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.errors import SchemaError
from lightning_memmap.schema.fields import DTYPES, dtype_name

#: A list or tuple of at least this many numbers of one dtype is one field. In a shorter one, such
#: as ``(image, label)``, each is a field of its own.
MIN_NUMBERS = 16
#: A longer list would cost seconds a batch, since each of its numbers becomes a tensor.
MAX_NUMBERS = 2**20

#: Of the numbers of Python itself. A bool is an int too.
FROM_PYTHON: dict[type, np.dtype[Any]] = {
    bool: np.dtype(np.bool_),
    int: np.dtype(np.int64),
    float: np.dtype(np.float64),
    complex: np.dtype(np.complex128),
}
#: The dtype of torch for each of numpy, which has no bfloat16; and the other way round.
FROM_NUMPY = {np.dtype(name): dtype for name, dtype in DTYPES.items() if name != "bfloat16"}
TO_NUMPY = {dtype: given for given, dtype in FROM_NUMPY.items()}


def array_dtype(name: str, array: Tensor | np.ndarray) -> torch.dtype:
    """Return the dtype in which an array or tensor is stored.

    Args:
        name: Name of the field, for messages.
        array: A dense tensor or numpy array, the latter in either byte order.

    Raises:
        SchemaError: A store has no such dtype. The message names the field.
    """
    if isinstance(array, Tensor):
        if array.dtype in DTYPES.values():
            return array.dtype
        raise SchemaError(
            f"field {name!r}: found dtype {dtype_name(array.dtype)}, which does not survive in a"
            f" memory-mapped file; convert it in the dataset to one of {', '.join(DTYPES)}"
        )
    dtype = FROM_NUMPY.get(array.dtype.newbyteorder("="))
    if dtype is None:
        raise SchemaError(
            f"field {name!r}: found a numpy array of dtype {array.dtype}; convert it in the"
            f" dataset to one of {', '.join(DTYPES)}"
        )
    return dtype


def number_dtype(values: Sequence[Any], ndim: int) -> torch.dtype | None:
    """Find the dtype that numbers share.

    Args:
        values: Python or numpy numbers, or tensors.
        ndim: Dimensions of a tensor that counts as one number: 0 in a sample, 1 in a batch.

    Returns:
        The dtype; None if a value is not a number, if dtypes differ, or if a store has no such
        dtype.
    """
    dtypes: set[torch.dtype | None] = set()
    for kind in set(map(type, values)):
        if kind is Tensor:
            dtypes |= {
                value.dtype if value.ndim == ndim and value.layout is torch.strided else None
                for value in values
                if isinstance(value, Tensor)
            }
        else:
            dtype = np.dtype(kind) if issubclass(kind, np.generic) else python_dtype(kind)
            dtypes.add(None if dtype is None else FROM_NUMPY.get(dtype))
    found = dtypes.pop() if len(dtypes) == 1 else None
    return found if found in DTYPES.values() else None


def stack_numbers(name: str, values: Sequence[Any], ndim: int) -> Tensor | np.ndarray:
    """Stack numbers along a new last dimension.

    Args:
        name: Name of their field, for messages.
        values: Python or numpy numbers, or tensors.
        ndim: Dimensions of a tensor that counts as one number: 0 in a sample, 1 in a batch.

    Returns:
        A tensor where some values are tensors, else a numpy array, of shape (..., number of
        values).

    Raises:
        SchemaError: The values are not all numbers of one dtype and shape, or there are more than
            `MAX_NUMBERS`.
    """
    dtype = number_dtype(values, ndim)
    if dtype is None:
        kinds = ", ".join(sorted({type(value).__name__ for value in values})) or "nothing"
        raise SchemaError(f"field {name!r}: found a list of {kinds}, expected numbers of one dtype")
    if len(values) > MAX_NUMBERS:
        raise SchemaError(
            f"field {name!r}: found a list of {len(values)} numbers, more than {MAX_NUMBERS}:"
            " make it one array or tensor in the dataset"
        )
    if not any(isinstance(value, Tensor) for value in values):
        return number_array(name, values, TO_NUMPY[dtype])
    try:
        tensors = [torch.as_tensor(value, dtype=dtype) for value in values]
    except (ValueError, RuntimeError, OverflowError) as error:
        raise SchemaError(f"field {name!r}: a number does not fit into {dtype}: {error}") from error
    if len({tensor.shape for tensor in tensors}) != 1:
        raise SchemaError(f"field {name!r}: found a list of tensors of different lengths")
    return torch.stack(tensors, ndim)


def python_dtype(kind: type) -> np.dtype[Any] | None:
    """The dtype of Python's own numbers of a type, or None where it is not of numbers.

    Args:
        kind: The type.
    """
    return next((dtype for base, dtype in FROM_PYTHON.items() if issubclass(kind, base)), None)


def number_array(name: str, value: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """Convert numbers of Python to an array.

    Args:
        name: Name of their field, for messages.
        value: A number, or several.
        dtype: The dtype that they are to have.

    Raises:
        SchemaError: An integer does not fit into it.
    """
    try:
        return np.asarray(value, dtype)
    except OverflowError:
        raise SchemaError(
            f"field {name!r}: found an integer that does not fit into {dtype}: give it as a float,"
            " or split it into several"
        ) from None
