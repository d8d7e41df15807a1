"""Leaves: what a dataset gives for a field, as a dense CPU tensor or numpy array."""

import sys
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.errors import SchemaError, with_article
from lightning_memmap.schema.fields import DTYPES, TEXT_KINDS, Field, dtype_name

#: A list or tuple of at least this many numbers of one dtype is one field. In a shorter one, such
#: as ``(image, label)``, each is a field of its own.
MIN_NUMBERS = 16
#: A longer list would cost seconds a batch, since each of its numbers becomes a tensor.
MAX_NUMBERS = 2**20

_FROM_PYTHON: dict[type, np.dtype[Any]] = {
    bool: np.dtype(np.bool_),
    int: np.dtype(np.int64),
    float: np.dtype(np.float64),
    complex: np.dtype(np.complex128),
}
#: numpy has no bfloat16.
_FROM_NUMPY = {np.dtype(name): dtype for name, dtype in DTYPES.items() if name != "bfloat16"}
_TO_NUMPY = {dtype: name for name, dtype in _FROM_NUMPY.items()}


def describe_leaf(name: str, leaf: Any) -> Field:
    """Describe the field that a leaf of a sample belongs to.

    Args:
        name: Name of the field.
        leaf: The value in one sample.

    Returns:
        The field, with the leaf's dtype, shape and kind.

    Raises:
        SchemaError: The leaf has a type or dtype that cannot be stored. The message names the
            field.
    """
    array, kind = to_array(name, leaf)
    shape = (None,) if kind in TEXT_KINDS else tuple(array.shape)
    return Field(name, array_dtype(name, array), shape, kind)


def describe_rows(name: str, leaf: Any) -> Field:
    """Describe the field whose rows a tensor holds along its first dimension.

    Args:
        name: Name of the field.
        leaf: A dense tensor of shape (B, *field shape), on any device.

    Returns:
        The field, of the kind ``tensor``.

    Raises:
        SchemaError: The leaf is no such tensor, or its dtype cannot be stored. The message names
            the field.
    """
    if not isinstance(leaf, Tensor):
        raise SchemaError(
            f"field {name!r}: found {type(leaf).__name__}; give tensors whose first dimension is"
            " the rows of the batch"
        )
    if leaf.ndim == 0:
        raise SchemaError(
            f"field {name!r}: found a tensor without dimensions; its first dimension must be the"
            " rows of the batch"
        )
    _check_dense(name, leaf)
    return Field(name, array_dtype(name, leaf), tuple(leaf.shape[1:]), "tensor")


def to_array(name: str, leaf: Any) -> tuple[Tensor | np.ndarray, str]:
    """Convert a leaf to a dense CPU tensor or numpy array.

    Args:
        name: Name of the field, for messages.
        leaf: The value in one sample.

    Returns:
        The values, which may share memory with the leaf, and their kind (see `Field`). An image has
        shape (channels, height, width).

    Raises:
        SchemaError: The leaf cannot be stored. The message names the field and the way out.
    """
    if isinstance(leaf, Tensor):
        _check_dense(name, leaf)
        leaf = leaf.detach()
        if leaf.is_conj() or leaf.is_neg():
            leaf = leaf.resolve_conj().resolve_neg()
        return leaf.cpu(), "tensor"
    if isinstance(leaf, np.ma.MaskedArray):
        raise SchemaError(
            f"field {name!r}: found a masked array, whose mask would be lost: give filled() and"
            " the mask as two arrays"
        )
    # Before numpy's scalars, of which strings are some.
    if isinstance(leaf, (str, PurePath)):
        return np.frombuffer(str(leaf).encode("utf-8", "surrogatepass"), np.uint8), "text"
    if isinstance(leaf, (bytes, bytearray)):
        return np.frombuffer(leaf, np.uint8), "bytes"
    if isinstance(leaf, (np.ndarray, np.generic)):
        return np.asarray(leaf), "array"
    number = _python_dtype(type(leaf))
    if number is not None:
        return _number_array(name, leaf, number), "number"
    image = sys.modules.get("PIL.Image")
    if image is not None and isinstance(leaf, image.Image):
        return _image_array(name, leaf), f"image:{leaf.mode}"
    if leaf is None:
        raise SchemaError(
            f"field {name!r}: found NoneType, which cannot be stored: give a value that stands for"
            " it, such as nan or -1, or leave the row out"
        )
    raise SchemaError(
        f"field {name!r}: found {type(leaf).__name__}, which cannot be stored; give a tensor, a"
        " numpy array, a PIL image, a number, a bool, a str or bytes"
    )


def array_dtype(name: str, array: Tensor | np.ndarray) -> torch.dtype:
    """Return the dtype in which an array or tensor is stored.

    Args:
        name: Name of the field, for messages.
        array: A dense tensor or numpy array, the latter in either byte order.

    Returns:
        The dtype, one of those in `DTYPES`.

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
    dtype = _FROM_NUMPY.get(array.dtype.newbyteorder("="))
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
            dtype = np.dtype(kind) if issubclass(kind, np.generic) else _python_dtype(kind)
            dtypes.add(None if dtype is None else _FROM_NUMPY.get(dtype))
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
        return _number_array(name, values, _TO_NUMPY[dtype])
    try:
        tensors = [torch.as_tensor(value, dtype=dtype) for value in values]
    except (ValueError, RuntimeError, OverflowError) as error:
        raise SchemaError(f"field {name!r}: a number does not fit into {dtype}: {error}") from error
    if len({tensor.shape for tensor in tensors}) != 1:
        raise SchemaError(f"field {name!r}: found a list of tensors of different lengths")
    return torch.stack(tensors, ndim)


def _python_dtype(kind: type) -> np.dtype[Any] | None:
    """The dtype of Python's own numbers of a type, or None where it is not of numbers."""
    return next((dtype for base, dtype in _FROM_PYTHON.items() if issubclass(kind, base)), None)


def _number_array(name: str, value: Any, dtype: np.dtype[Any]) -> np.ndarray:
    try:
        return np.asarray(value, dtype)
    except OverflowError:
        raise SchemaError(
            f"field {name!r}: found an integer that does not fit into {dtype}: give it as a float,"
            " or split it into several"
        ) from None


def _image_array(name: str, image: Any) -> np.ndarray:
    """The pixels of a PIL image, channels first."""
    if image.mode in ("P", "PA"):
        raise SchemaError(
            f"field {name!r}: found an image of mode {image.mode!r}, whose palette would be lost."
            " For its colours give image.convert('RGB'), or 'RGBA' where it has transparency; for"
            " its palette indices, such as class labels, numpy.asarray(image)"
        )
    try:
        pixels = np.asarray(image)
    except Exception as error:  # Files are decoded here; each format has its own errors.
        raise SchemaError(
            f"field {name!r}: the image cannot be read: {type(error).__name__}: {error}"
        ) from error
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(np.moveaxis(pixels, -1, 0))


def _check_dense(name: str, leaf: Tensor) -> None:
    if leaf.is_nested:
        found, remedy = "a nested tensor", "pad it to one shape"
    elif leaf.layout is not torch.strided:
        found, remedy = f"a {leaf.layout} tensor", "convert it with to_dense()"
    elif leaf.is_quantized:
        found, remedy = "a quantized tensor", "give its int_repr(), or dequantize() it"
    elif leaf.is_meta:
        found, remedy = "a tensor on the meta device, which has no values", "move it to the CPU"
    # Subclasses with their own dispatch contain more than values, such as a mask.
    elif type(leaf).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        found, remedy = with_article(type(leaf).__name__), "give what it holds as plain tensors"
    else:
        return
    raise SchemaError(f"field {name!r}: found {found}; only dense tensors are stored: {remedy}")
