"""Kinds: the meaning of the rows of a field, such as text or time.

To add a kind, write a class here, list it in `AnyKind`, and convert its leaves in `to_array`.
"""

import datetime
import enum
import sys
from collections.abc import Sequence
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from lightning_memmap.errors import SchemaError, describe_error, with_article

#: The numpy dtype of each type of Python number. A bool is an int too, so it comes first.
FROM_PYTHON: dict[type, np.dtype[Any]] = {
    bool: np.dtype(np.bool_),
    int: np.dtype(np.int64),
    float: np.dtype(np.float64),
    complex: np.dtype(np.complex128),
}
#: Replacements for values of types that cannot be stored, and for columns of them.
_REPLACEMENTS = {
    "Decimal": "float(value), such as by .astype('float64') in pandas, .cast(polars.Float64),"
    " .cast(pyarrow.float64()), or cast_column(name, datasets.Value('float64'))",
    "time": "the time since midnight, such as by pandas.to_timedelta(column.astype(str)),"
    " .cast(polars.Duration), .cast(pyarrow.int64()), or cast_column(name,"
    " datasets.Value('int64')); in Arrow, time32 is cast to int32",
    "Period": "value.to_timestamp(), or .dt.to_timestamp() of a column",
}
Array = Tensor | np.ndarray
Unit = Literal["Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as"]


class Kind(
    msgspec.Struct, frozen=True, tag_field="type", tag=str.lower, forbid_unknown_fields=True
):
    """The meaning of the rows of a field. In JSON, ``type`` is the lower-case class name."""

    #: Whether rows are returned as Python objects instead of tensors.
    is_text: ClassVar[bool] = False
    #: The dtype and shape of all fields of this kind; None if they may vary.
    dtype: ClassVar[torch.dtype | None] = None
    shape: ClassVar[tuple[int | None, ...] | None] = None

    def accepts(self, other: "Kind") -> bool:
        """Return whether an array of another kind may hold rows of this kind."""
        return self == other

    def format_value(self, number: int | float | complex | bool) -> str:
        """Format a stored number for display."""
        return f"{number:.4g}" if isinstance(number, float) else str(number)

    def __str__(self) -> str:
        return type(self).__name__.lower()


class Numbers(Kind, frozen=True):
    """Plain numbers and bools, in tensors, arrays or Python."""


class Text(Kind, frozen=True):
    """Text, stored as UTF-8."""

    #: Whether each row is a list of texts.
    many: bool = False

    is_text = True
    dtype = torch.uint8
    shape = (None,)
    #: The types that `encode` accepts without conversion.
    types: ClassVar[set[type]] = {str, np.str_}

    @staticmethod
    def encode(text: Any) -> bytes:
        """Encode a value of one of ``types``."""
        return text.encode("utf-8", "surrogatepass")  # type: ignore[no-any-return]

    def decode(self, data: bytes) -> Any:
        """Decode the bytes of a row. Raises a ValueError if they are invalid."""
        return list(map(self._decode, split_texts(data))) if self.many else self._decode(data)

    def _decode(self, data: bytes) -> Any:
        return data.decode("utf-8", "surrogatepass")

    @override
    def __str__(self) -> str:
        return f"list of {super().__str__()}" if self.many else super().__str__()


class Bytes(Text, frozen=True):
    """Bytes."""

    types = {bytes, bytearray, np.bytes_}

    @override
    @staticmethod
    def encode(text: Any) -> bytes:
        return text  # type: ignore[no-any-return]

    @override
    def _decode(self, data: bytes) -> Any:
        return data


class Duration(Kind, frozen=True):
    """Durations, stored as integers in a unit."""

    unit: Unit

    dtype = torch.int64
    _numpy: ClassVar[str] = "timedelta64"

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The numpy dtype for these values, such as ``timedelta64[us]``."""
        return np.dtype(f"{self._numpy}[{self.unit}]")

    @override
    def format_value(self, number: int | float | complex | bool) -> str:
        return str(np.array(number).astype(self.numpy_dtype))

    @override
    def __str__(self) -> str:
        return f"{super().__str__()} in {self.unit}"


class Time(Duration, frozen=True):
    """Times, stored as integers that count from 1970 in a unit."""

    #: Whether the times had a time zone, and were converted to UTC.
    utc: bool = False

    _numpy = "datetime64"

    @override
    def accepts(self, other: Kind) -> bool:
        # numpy arrays of times have no time zone.
        return other in (self, Time(self.unit))

    @override
    def __str__(self) -> str:
        return f"{super().__str__()}{', UTC' * self.utc}"


class Image(Kind, frozen=True):
    """Pillow images, stored decoded, channels first."""

    # Restricted because it is printed, and an untrusted store may contain terminal codes.
    mode: Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9;]{1,16}\Z")]

    @override
    def __str__(self) -> str:
        return f"{self.mode} image"


AnyKind = Numbers | Text | Bytes | Duration | Time | Image
NUMBERS = Numbers()


def to_array(leaf: Any) -> tuple[Array, AnyKind]:
    """Convert a leaf to a dense CPU tensor or numpy array, and return it with its kind.

    The array may share memory with the leaf.

    Raises:
        SchemaError: The leaf cannot be stored. The message does not name the field.
    """
    if isinstance(leaf, np.ma.MaskedArray):
        raise SchemaError(
            "found a masked array, whose mask would be lost. Return filled() and the mask as two"
            " arrays"
        )
    # Checked before numbers and text, because members of an enum may be those too.
    if isinstance(leaf, enum.Enum):
        raise SchemaError(
            f"found {leaf!r}, a member of an enum. Its class is not stored, so return its .value or"
            " its .name in the dataset"
        )
    # Checked before arrays, because numpy strings are numpy scalars too.
    if isinstance(leaf, (str, PurePath)):
        return np.frombuffer(Text.encode(str(leaf)), np.uint8), Text()
    if isinstance(leaf, (bytes, bytearray)):
        return np.frombuffer(leaf, np.uint8), Bytes()
    if isinstance(leaf, Tensor):
        check_dense(leaf)
        return leaf.detach().resolve_conj().resolve_neg().cpu(), NUMBERS
    if isinstance(leaf, (datetime.date, datetime.timedelta)):
        zone = leaf.tzinfo if isinstance(leaf, datetime.datetime) else None
        return _times(_numpy_time(leaf), utc=zone is not None)
    if isinstance(leaf, (np.ndarray, np.generic)):
        array = np.asarray(leaf)
        return _times(array) if array.dtype.kind in "mM" else (array, NUMBERS)
    if (dtype := python_dtype(type(leaf))) is not None:
        return number_array(leaf, dtype), NUMBERS
    pillow = sys.modules.get("PIL.Image")
    if pillow is not None and isinstance(leaf, pillow.Image):
        return _pixels(leaf), Image(leaf.mode)
    if is_null(leaf):
        raise SchemaError(f"found {leaf}")
    name = type(leaf).__name__
    replacement = _REPLACEMENTS.get(
        name,
        "a tensor, a numpy array, a PIL image, a number, a bool, a str, bytes, a date, a datetime"
        " or a timedelta",
    )
    raise SchemaError(f"found {name}, which cannot be stored. Return {replacement} instead")


def is_null(value: Any) -> bool:
    """Return whether a value is None, NaT or pandas' NA. NaN is a number."""
    if value is None:
        return True
    if isinstance(value, (np.datetime64, np.timedelta64)):
        return bool(np.isnat(value))
    is_named_alike = type(value).__name__ in ("NAType", "NaTType")
    return is_named_alike and type(value).__module__.startswith("pandas.")


def check_dense(leaf: Tensor) -> None:
    """Raise a SchemaError unless a tensor is dense, and consists of its values alone."""
    if leaf.is_nested:
        problem = "a nested tensor. Pad it to one shape"
    elif leaf.layout is not torch.strided:
        problem = f"a {leaf.layout} tensor. Convert it with to_dense()"
    elif leaf.is_quantized:
        problem = "a quantized tensor. Return its int_repr(), or dequantize() it"
    elif leaf.is_meta:
        problem = "a tensor on the meta device, without values. Move it to the CPU"
    # Subclasses with a dispatch method hold more than values, such as a mask.
    elif type(leaf).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        problem = f"{with_article(type(leaf).__name__)}. Return its contents as plain tensors"
    else:
        return
    raise SchemaError(f"only dense tensors can be stored, but found {problem}")


def python_dtype(python_type: type) -> np.dtype[Any] | None:
    """Return the numpy dtype for a type of Python number, or None for any other type."""
    dtypes = (dtype for base, dtype in FROM_PYTHON.items() if issubclass(python_type, base))
    return next(dtypes, None)


def number_array(value: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """Convert a Python number, or nested lists of them, to an array."""
    try:
        return np.asarray(value, dtype)
    except OverflowError:
        raise SchemaError(
            f"found an integer that does not fit into {dtype}. Return it as a float, or split it"
            " into several; return a timedelta as numpy.timedelta64 in a coarser unit"
        ) from None


def _times(times: np.ndarray, *, utc: bool = False) -> tuple[Array, AnyKind]:
    """Convert numpy times or durations to int64, and return them with their kind."""
    unit, count = np.datetime_data(times.dtype)
    if unit not in Unit.__args__ or count != 1:  # type: ignore[attr-defined]
        raise SchemaError(
            f"found times of dtype {times.dtype}. Convert them to another unit, such as with"
            " astype('datetime64[us]') or astype('timedelta64[us]')"
        )
    if np.isnat(times).any():
        advice = " in an array, which cannot be stored. Return a mask as well, or leave the row out"
        raise SchemaError(f"found NaT{advice * bool(times.ndim)}")
    kind = Time(unit, utc) if times.dtype.kind == "M" else Duration(unit)  # type: ignore[arg-type]
    return times.astype(times.dtype.newbyteorder("=")).view(np.int64), kind


def _numpy_time(time: Any) -> np.ndarray:
    """Convert a time or duration of Python or pandas to numpy, in UTC."""
    if hasattr(time, "asm8"):  # A pandas type, whose unit is kept.
        return np.asarray(time.asm8)
    if isinstance(time, datetime.timedelta):
        # numpy would overflow silently.
        microseconds = time // datetime.timedelta(microseconds=1)
        return number_array(microseconds, np.dtype(np.int64)).view("timedelta64[us]")
    if not isinstance(time, datetime.datetime):
        return np.asarray(time, "datetime64[D]")
    if time.tzinfo is not None:
        time = time.astimezone(datetime.timezone.utc).replace(tzinfo=None)
    return np.asarray(time, "datetime64[us]")


def _pixels(image: Any) -> np.ndarray:
    """Return the pixels of a Pillow image, channels first."""
    if image.mode in ("P", "PA"):
        raise SchemaError(
            f"found an image of mode {image.mode!r}, whose palette would be lost. To store its"
            " colours, return image.convert('RGB'), or 'RGBA' if it has transparency. To store its"
            " palette indices, such as class labels, return numpy.asarray(image)"
        )
    try:
        pixels = np.asarray(image)
    except Exception as error:  # Image files are decoded here, and may raise any error.
        raise SchemaError(f"the image cannot be read: {describe_error(error)}") from error
    if pixels.ndim == 2:
        return pixels[None]
    return np.ascontiguousarray(np.moveaxis(pixels, -1, 0))


def join_texts(texts: Sequence[bytes]) -> bytes:
    """Encode the texts of a row as MessagePack, and an empty list as no bytes."""
    return msgspec.msgpack.encode(texts) if texts else b""


def split_texts(data: bytes) -> list[bytes]:
    """Return the texts that `join_texts` encoded. Safe for untrusted data."""
    return msgspec.msgpack.decode(data, type=list[bytes]) if data else []
