"""Fields: the name, dtype and shape of each leaf of a sample."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from reprlib import repr as short_repr
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.errors import SchemaError, StoreError

#: The dtypes that a store can hold. Others (float8 and sub-byte types, complex32) do not survive a
#: round trip through tensordict's memory-mapped files.
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32,
        torch.int32, torch.uint64, torch.int64, torch.float16, torch.bfloat16, torch.float32,
        torch.float64, torch.complex64, torch.complex128,
    )
}  # fmt: skip

#: Kinds of fields whose rows are given back as Python objects and not as tensors. A row may be a
#: list of texts.
TEXT_KINDS = ("text", "bytes", "text:list", "bytes:list")
#: Kinds that mean the same numbers. All others mean something of their own.
PLAIN_KINDS = ("tensor", "array", "number", "mask")
#: Units of times, as numpy names them.
TIME_UNITS = ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as")
TIME_KINDS = ("datetime", "timedelta")
#: The longest name of a field: what file systems allow, less the longest suffix of its files.
MAX_NAME_LENGTH = 255 - len(".memmap")
#: Several texts of one row are kept as one string of bytes: their number, the length of each in
#: bytes, as uint32 in little-endian order, and then one after the other. No texts have no bytes.
_LENGTH = np.dtype("<u4")
_MAX_BYTES = np.iinfo(_LENGTH).max


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without ``torch.``, such as ``uint8``.

    Args:
        dtype: Any dtype of torch, whether a store can hold it or not.
    """
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Field:
    """One leaf of a sample.

    Args:
        name: Where the leaf is in the sample: keys, names and positions joined by dots.
        dtype: The dtype of each row.
        shape: The shape of one row, without a batch dimension. Leading dimensions that differ from
            row to row are None; see `num_variable`.
        kind: What the dataset gave: ``tensor``, ``array``, ``number``, ``text``, ``bytes`` or, for
            PIL images, ``image:<mode>``. A list of numbers is an array, or a tensor where they are
            tensors. Text is stored as UTF-8, so both ``text`` and ``bytes`` are uint8 (None,), and
            so are ``text:list`` and ``bytes:list``, whose rows are several texts. Times are
            integers: ``datetime:<unit>`` counts from 1970, ``datetime:<unit>;UTC`` where times had
            a zone, and ``timedelta:<unit>`` is a duration, in a unit of `TIME_UNITS`.
            ``mask`` says which rows of another field are not None.
        given: The dtype in which the dataset gives it, if rows are kept in another one; else None.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int | None, ...]
    kind: str
    given: torch.dtype | None = None

    @property
    def sample_dtype(self) -> torch.dtype:
        """The dtype in which the dataset gives it."""
        return self.given or self.dtype

    @cached_property
    def num_variable(self) -> int:
        """How many leading dimensions differ from row to row."""
        return sum(size is None for size in self.shape)

    @property
    def is_text(self) -> bool:
        """Whether rows are given back as str or bytes."""
        return self.kind in TEXT_KINDS

    @cached_property
    def item_shape(self) -> tuple[int, ...]:
        """The dimensions that all rows share. What they hold is an item: rows have one or more, and
        exactly one where no dimension differs."""
        return tuple(size for size in self.shape if size is not None)

    @cached_property
    def item_bytes(self) -> int:
        """Bytes of one item."""
        return math.prod(self.item_shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of a field whose rows all have one shape."""
        assert not self.num_variable
        return self.item_bytes

    @property
    def step_bytes(self) -> int:
        """Bytes of one step of a field whose rows are series, along their first dimension."""
        return math.prod(self._step_shape) * self.dtype.itemsize

    @property
    def _step_shape(self) -> tuple[int, ...]:
        return tuple(size for size in self.shape[1:] if size is not None)

    def windowed(self, length: int) -> "Field":
        """The field as its batches have it, where its rows are cut into windows.

        Args:
            length: Steps of a window.
        """
        return replace(self, shape=(length, *self.shape[1:]))

    def admits(self, shape: tuple[int, ...]) -> bool:
        """Whether a row may have a shape."""
        pairs = zip(shape, self.shape, strict=False)
        return len(shape) == len(self.shape) and all(b is None or a == b for a, b in pairs)

    def is_kind(self, kind: str) -> bool:
        """Whether values of a kind may be rows of this field."""
        return kind == self.kind or (kind in PLAIN_KINDS and self.kind in PLAIN_KINDS)

    @property
    def in_list(self) -> "Field":
        """The field that has several rows of this one in each of its rows."""
        if self.is_text:
            return replace(self, kind=f"{self.kind}:list")
        return replace(self, shape=(None, *self.shape))

    @property
    def of_record(self) -> "Field":
        """The field that this one has several rows of in each of its own; see `in_list`."""
        if self.is_text:
            return replace(self, kind=self.kind.removesuffix(":list"))
        return replace(self, shape=self.shape[1:])

    def merged(self, other: "Field") -> "Field | None":
        """The field that has the rows of two.

        Args:
            other: The same field as another sample has it.

        Returns:
            A field whose leading dimensions, up to the last one that differs, are None. None where
            the two differ in more than their sizes.
        """
        is_alike = self.sample_dtype == other.sample_dtype and len(self.shape) == len(other.shape)
        if not is_alike or not self.is_kind(other.kind):
            return None
        differing = [a is None or a != b for a, b in zip(self.shape, other.shape, strict=True)]
        count = len(differing) - differing[::-1].index(True) if any(differing) else 0
        return replace(self, shape=(None,) * count + self.shape[count:])

    def value(self, row: Tensor) -> Any:
        """What a store gives back for a row.

        Args:
            row: The row as it is stored, on the CPU.

        Returns:
            The row itself; text as str, and bytes as such, or lists of them.

        Raises:
            StoreError: The row is no text.
        """
        return self.decode(row.numpy().tobytes()) if self.is_text else row

    def decode(self, data: bytes) -> str | bytes | list[str | bytes]:
        """Convert the bytes of a row of text to what a store gives back for it.

        Args:
            data: The bytes.

        Returns:
            A str, or the bytes themselves where the field's kind is ``bytes``; a list of them where
            a row has several.

        Raises:
            StoreError: The bytes are no text.
        """
        if not self.kind.endswith(":list"):
            return self._decode(data)
        try:
            texts = split_texts(data)
        except ValueError as error:
            raise StoreError(
                f"field {self.name!r}: a row is not a list of texts ({error}): its store is"
                " damaged, build it again"
            ) from None
        return [self._decode(text) for text in texts]

    def _decode(self, data: bytes) -> str | bytes:
        if self.kind.startswith("bytes"):
            return data
        try:
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise StoreError(
                f"field {self.name!r}: a row is not UTF-8 ({error.reason}): its store is damaged,"
                " build it again"
            ) from None

    def words(self, number: int | float | complex | bool) -> str:
        """Write a value of this field as a person would.

        Args:
            number: The value as it is stored.

        Returns:
            A time with its unit, or the number itself.
        """
        kind, _, unit = self.kind.partition(":")
        if kind in TIME_KINDS and isinstance(number, int):
            return str(np.array(number).astype(f"{kind}64[{unit.removesuffix(';UTC')}]"))
        return f"{number:.4g}" if isinstance(number, float) else str(number)

    def to_json(self) -> dict[str, Any]:
        """Convert this field to JSON values.

        Returns:
            A dict with the keys ``name``, ``dtype``, ``shape`` and ``kind``, as
            `lightning_memmap.schema.read_schema` reads it.
        """
        return {
            "name": self.name,
            "dtype": dtype_name(self.dtype),
            "shape": list(self.shape),
            "kind": self.kind,
            **({"given": dtype_name(self.given)} if self.given is not None else {}),
        }

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} {tuple(self.shape)}"


def field_name(path: Iterable[str | int]) -> str:
    """Return the name of the field at a path of keys, which is safe as the name of a file.

    Args:
        path: Keys, names and positions from the outermost container to the leaf. It is empty for a
            sample that is a leaf itself.

    Returns:
        The parts in percent-encoding with ``~`` in place of ``%``, joined by dots; ``value`` for an
        empty path.
    """
    return ".".join(map(_encode, path)) or "value"


def _encode(key: str | int) -> str:
    # Percent-encoding, with "~" for "%", keeps names unique and safe as file names; tensordict
    # encodes a "%" once more. A dot separates levels.
    encoded = quote(str(key), safe="", errors="surrogatepass")
    return encoded.replace(".", "%2E").replace("~", "%7E").replace("%", "~") or "~"


def check_name_length(name: str) -> None:
    """Check that a field's name fits into a file name.

    Args:
        name: The name, as `field_name` makes it.

    Raises:
        SchemaError: It has more than `MAX_NAME_LENGTH` characters.
    """
    if len(name) > MAX_NAME_LENGTH:
        raise SchemaError(
            f"field {short_repr(name)}: the name is longer than the {MAX_NAME_LENGTH} characters"
            " that fit into a file name: use shorter keys in the dataset"
        )


def check_names(names: Iterable[str]) -> None:
    """Check that each field's name leads to a file of its own.

    Args:
        names: The names of all fields of a schema.

    Raises:
        SchemaError: A name is too long, or two names differ at most in upper and lower case.
    """
    seen: dict[str, str] = {}
    for name in names:
        check_name_length(name)
        # Compared without case, for file systems that do the same.
        folded = name.casefold()
        if folded in seen:
            raise SchemaError(
                f"the fields {seen[folded]!r} and {name!r} would share one file name: rename one"
                " of them in the dataset"
            )
        seen[folded] = name


def join_texts(texts: Sequence[np.ndarray]) -> np.ndarray:
    """Join the bytes of texts.

    Args:
        texts: uint8 of shape (bytes,), one for each text.

    Returns:
        What `split_texts` takes, uint8 of shape (bytes,).

    Raises:
        ValueError: A text has 2**32 bytes or more.
    """
    if not texts:
        return np.empty(0, np.uint8)
    numbers = [len(texts), *map(len, texts)]
    if max(numbers) > _MAX_BYTES:
        raise ValueError(
            f"a text of {max(numbers)} bytes is too long for a list: at most 2**32 - 1"
        )
    return np.concatenate([np.array(numbers, _LENGTH).view(np.uint8), *texts])


def split_texts(data: bytes) -> list[bytes]:
    """Divide what `join_texts` has joined.

    Args:
        data: The bytes, which have not been checked.

    Returns:
        The bytes of each text.

    Raises:
        ValueError: They are no texts that were joined.
    """
    if not data:
        return []
    size = _LENGTH.itemsize
    count = int(np.frombuffer(data, _LENGTH, 1)[0]) if len(data) >= size else 0
    first = (1 + count) * size
    if not count or first > len(data):
        raise ValueError("they end before their lengths do")
    lengths = np.frombuffer(data, _LENGTH, count, offset=size)
    ends = first + np.cumsum(lengths, dtype=np.int64)
    if ends[-1] != len(data):
        raise ValueError("their lengths do not add up")
    starts = [first, *ends[:-1].tolist()]
    return [data[start:end] for start, end in zip(starts, ends.tolist(), strict=True)]
