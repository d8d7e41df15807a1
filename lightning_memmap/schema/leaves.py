"""Leaves: what a dataset gives for a field, as a dense CPU tensor or numpy array."""

import datetime
import enum
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.errors import MismatchError, SchemaError, with_article
from lightning_memmap.schema.fields import (
    DTYPES,
    TEXT_KINDS,
    TIME_UNITS,
    Field,
    dtype_name,
    join_texts,
)

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
#: The leaf of a list without records, and of a field that is None.
EMPTY = object()
#: The leaf of a list without numbers.
EMPTY_LIST = object()


class Records(list[Any]):
    """The leaves of one field in the records of one list."""


class RowList(list[Any]):
    """A list with one entry for each row of a batch: a tensor, a str, bytes, or what a row has of a
    list of records.

    It is a list like any other, but counts as one field and not as a container of fields.
    """


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
    """Describe the field whose rows a leaf of a batch holds.

    Args:
        name: Name of the field.
        leaf: A dense tensor of shape (B, *field shape), on any device. For rows that differ in
            their first dimension, a nested tensor of torch, or a `RowList` of tensors, str or
            bytes.

    Raises:
        SchemaError: The leaf is no such tensor, or its dtype cannot be stored. The message names
            the field.
    """
    if isinstance(leaf, Tensor) and leaf.is_nested and leaf.layout is not torch.jagged:
        raise SchemaError(
            f"field {name!r}: found a nested tensor of layout {leaf.layout}: make it with"
            " torch.nested.nested_tensor(..., layout=torch.jagged)"
        )
    if (rows := rows_apart(leaf)) is not None:
        if not rows:
            raise SchemaError(f"field {name!r}: found no rows: give one for each row of the batch")
        first = describe_leaf(name, rows[0])
        if not first.shape:
            raise SchemaError(
                f"field {name!r}: found a list of numbers: give a tensor of one number for each row"
            )
        return replace(first, shape=(None, *first.shape[1:]))
    if not isinstance(leaf, Tensor):
        raise SchemaError(
            f"field {name!r}: found {type(leaf).__name__}; give tensors whose first dimension is"
            " the rows of the batch, and a lightning_memmap.loading.RowList of text, or of rows"
            " that differ in length"
        )
    if leaf.ndim == 0:
        raise SchemaError(
            f"field {name!r}: found a tensor without dimensions; its first dimension must be the"
            " rows of the batch"
        )
    _check_dense(name, leaf)
    return Field(name, array_dtype(name, leaf), tuple(leaf.shape[1:]), "tensor")


def rows_apart(leaf: Any) -> list[Any] | None:
    """The rows of a leaf of a batch that has them one by one.

    Returns:
        The rows of a `RowList` or of a nested tensor; None for any other leaf.
    """
    if isinstance(leaf, Tensor):
        return list(leaf.unbind()) if leaf.is_nested else None
    return leaf if isinstance(leaf, RowList) else None


def leaf_array(field: Field, leaf: Any) -> Tensor | np.ndarray:
    """Check a leaf, and convert it to what is stored of it.

    Args:
        field: Its field.
        leaf: What a sample has, `Records`, or `EMPTY`.

    Returns:
        A dense CPU tensor or numpy array of the field's dtype, and of a shape that it admits.

    Raises:
        SchemaError: The leaf does not fit. The message names the field, what was found and what was
            expected.
    """
    if leaf is EMPTY:
        return torch.zeros([size or 0 for size in field.shape], dtype=field.dtype)
    if leaf is EMPTY_LIST:
        if field.shape[:1] == (None,):
            return torch.zeros(0, dtype=field.dtype)
        raise MismatchError(
            f"field {field.name!r}: found an empty list, expected {field} ({field.kind})"
        )
    if isinstance(leaf, Records):
        return _records_array(field, leaf)
    try:
        array, kind = to_array(field.name, leaf)
        dtype, shape = array_dtype(field.name, array), tuple(array.shape)
    except SchemaError as error:
        kind_of_error = MismatchError if is_missing(leaf) else SchemaError
        raise kind_of_error(f"{error}; expected {field} ({field.kind})") from error
    # Palette and grey images may have the same shape and dtype, but differ in meaning.
    if dtype != field.sample_dtype or not field.admits(shape) or not field.is_kind(kind):
        raise MismatchError(
            f"field {field.name!r}: found {dtype_name(dtype)} {shape} ({kind}), expected"
            f" {replace(field, dtype=field.sample_dtype)} ({field.kind})"
        )
    try:
        return narrowed(field, array)
    except ValueError as error:
        raise SchemaError(str(error)) from error


def _records_array(field: Field, leaves: Records) -> Tensor | np.ndarray:
    """What the records of a list have for a field, stacked."""
    record = field.of_record
    arrays = [leaf_array(record, leaf) for leaf in leaves]
    if field.is_text:
        try:
            return join_texts([np.asarray(array) for array in arrays])
        except ValueError as error:
            raise SchemaError(f"field {field.name!r}: {error}") from error
    shapes = {
        tuple(array.shape) for array, leaf in zip(arrays, leaves, strict=True) if leaf is not EMPTY
    }
    if len(shapes) > 1:
        raise SchemaError(
            f"field {field.name!r}: found records of the shapes {sorted(shapes)} in one list; the"
            " records of a list have one shape: pad them in the dataset, or join them into one"
            " array, with their lengths in another field"
        )
    for shape in shapes if record.num_variable else ():
        missing = torch.zeros(shape, dtype=field.dtype)
        pairs = zip(arrays, leaves, strict=True)
        arrays = [missing if leaf is EMPTY else array for array, leaf in pairs]
    if not any(isinstance(array, Tensor) for array in arrays):
        return np.stack(arrays)
    return torch.stack(list(map(native_tensor, arrays)))


def native_tensor(array: Tensor | np.ndarray) -> Tensor:
    """An array as a tensor, in the byte order of this machine.

    Args:
        array: The array, or the tensor itself.

    Returns:
        A tensor that shares no memory with an array.
    """
    if isinstance(array, Tensor):
        return array
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))


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
    # Before numbers and text, which members of an enum may be as well.
    if isinstance(leaf, enum.Enum):
        raise SchemaError(
            f"field {name!r}: found {leaf!r}, a member of an enum, whose class a store does not"
            " keep: give its .value or its .name in the dataset"
        )
    # Before numpy's scalars, of which strings are some.
    if isinstance(leaf, (str, PurePath)):
        return np.frombuffer(str(leaf).encode("utf-8", "surrogatepass"), np.uint8), "text"
    if isinstance(leaf, (bytes, bytearray)):
        return np.frombuffer(leaf, np.uint8), "bytes"
    if isinstance(leaf, (datetime.date, datetime.timedelta)):
        return _time_array(name, *_numpy_time(name, leaf))
    if isinstance(leaf, (np.ndarray, np.generic)):
        array = np.asarray(leaf)
        return _time_array(name, array) if array.dtype.kind in "mM" else (array, "array")
    number = python_dtype(type(leaf))
    if number is not None:
        return number_array(name, leaf, number), "number"
    image = sys.modules.get("PIL.Image")
    if image is not None and isinstance(leaf, image.Image):
        return _image_array(name, leaf), f"image:{leaf.mode}"
    if is_missing(leaf):
        raise SchemaError(f"field {name!r}: found {leaf}")
    raise SchemaError(
        f"field {name!r}: found {type(leaf).__name__}, which cannot be stored; give a tensor, a"
        " numpy array, a PIL image, a number, a bool, a str, bytes or a time"
    )


def is_missing(value: Any) -> bool:
    """Whether a value stands for one that is missing: None, NaT, and pandas' NA.

    NaN is a number.

    Args:
        value: Any part of a sample.
    """
    if value is None:
        return True
    if isinstance(value, (np.datetime64, np.timedelta64)):
        return bool(np.isnat(value))
    kind = type(value)
    return kind.__name__ in ("NAType", "NaTType") and kind.__module__.startswith("pandas.")


def _time_array(name: str, times: np.ndarray, zone: str = "") -> tuple[np.ndarray, str]:
    """Times as integers, and their kind."""
    unit, count = np.datetime_data(times.dtype)
    if unit not in TIME_UNITS or count != 1:
        raise SchemaError(
            f"field {name!r}: found times of dtype {times.dtype}: convert them to a unit of numpy,"
            " such as with astype('datetime64[us]') or astype('timedelta64[us]')"
        )
    if np.isnat(times).any():
        raise SchemaError(
            f"field {name!r}: found NaT in an array, for which there is no integer: give a mask"
            " beside it, or leave the row out"
            if times.ndim
            else f"field {name!r}: found NaT"
        )
    what = "datetime" if times.dtype.kind == "M" else "timedelta"
    return times.astype(times.dtype.newbyteorder("=")).view(np.int64), f"{what}:{unit}{zone}"


def _numpy_time(name: str, time: datetime.date | datetime.timedelta) -> tuple[np.ndarray, str]:
    """A time of Python or pandas as one of numpy, and its zone."""
    is_aware = isinstance(time, datetime.datetime) and time.tzinfo is not None
    if hasattr(time, "asm8"):  # Of pandas, in its own unit, and with a zone in UTC.
        return np.asarray(time.asm8), ";UTC" * is_aware
    if isinstance(time, datetime.datetime) and is_aware:
        time = time.astimezone(datetime.timezone.utc).replace(tzinfo=None)
    if isinstance(time, datetime.timedelta):
        # numpy would wrap around what int64 does not hold.
        microseconds = time // datetime.timedelta(microseconds=1)
        if abs(microseconds) >= 2**63:
            raise SchemaError(
                f"field {name!r}: found {time!r}, which has more microseconds than an int64 holds:"
                " give numpy.timedelta64 in a coarser unit, such as seconds"
            )
        return np.asarray(np.timedelta64(microseconds, "us")), ""
    unit = "us" if isinstance(time, datetime.datetime) else "D"
    return np.asarray(time, f"datetime64[{unit}]"), ";UTC" * is_aware


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
