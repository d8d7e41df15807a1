"""Fields: the name, dtype and shape of each leaf of a sample."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from reprlib import repr as short_repr
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
import numpy as np
import torch
from torch import Tensor

from lightning_memmap.errors import SchemaError
from lightning_memmap.schema.kinds import NUMBERS, AnyKind, Text

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
#: The dtype of torch for each of numpy, which has no bfloat16; and the other way round.
FROM_NUMPY = {np.dtype(name): dtype for name, dtype in DTYPES.items() if name != "bfloat16"}
TO_NUMPY = {dtype: given for given, dtype in FROM_NUMPY.items()}
#: The longest name of a field: what file systems allow, less the longest suffix of its files.
MAX_NAME_LENGTH = 255 - len(".memmap")
_Size = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of any dtype without ``torch.``, such as ``uint8``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Field:
    """One leaf of a sample."""

    name: str
    dtype: torch.dtype
    #: Of one row. Leading dimensions that differ from row to row are None.
    shape: Annotated[tuple[_Size | None, ...], msgspec.Meta(max_length=64)]
    kind: AnyKind = NUMBERS

    @cached_property
    def num_variable(self) -> int:
        """How many leading dimensions differ from row to row."""
        return sum(size is None for size in self.shape)

    @property
    def is_text(self) -> bool:
        """Whether rows are given back as str or bytes."""
        return self.kind.is_text

    @cached_property
    def item_shape(self) -> tuple[int, ...]:
        """The dimensions that all rows share."""
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
        return replace(self, shape=self.shape[1:]).item_bytes

    def windowed(self, length: int) -> "Field":
        """The field as its batches have it, where its rows are cut into windows of some steps."""
        return replace(self, shape=(length, *self.shape[1:]))

    def admits(self, shape: tuple[int, ...]) -> bool:
        """Whether a row may have a shape."""
        pairs = zip(shape, self.shape, strict=False)
        return len(shape) == len(self.shape) and all(b is None or a == b for a, b in pairs)

    @property
    def in_list(self) -> "Field":
        """The field that has several rows of this one in each of its rows."""
        if isinstance(self.kind, Text):
            return replace(self, kind=msgspec.structs.replace(self.kind, many=True))
        return replace(self, shape=(None, *self.shape))

    @property
    def of_record(self) -> "Field":
        """The field that this one has several rows of in each of its own; see `in_list`."""
        if isinstance(self.kind, Text):
            return replace(self, kind=msgspec.structs.replace(self.kind, many=False))
        return replace(self, shape=self.shape[1:])

    def merged(self, other: "Field") -> "Field | None":
        """The field that has the rows of both: sizes that differ are None. None if more differs."""
        is_alike = self.dtype == other.dtype and len(self.shape) == len(other.shape)
        if not is_alike or not self.kind.takes(other.kind):
            return None
        differing = [a is None or a != b for a, b in zip(self.shape, other.shape, strict=True)]
        count = len(differing) - differing[::-1].index(True) if any(differing) else 0
        return replace(self, shape=(None,) * count + self.shape[count:])

    def value(self, row: Tensor) -> Any:
        """What a store gives back for a row on the CPU: the row itself, or its texts."""
        return self.decode(row.numpy().tobytes()) if self.is_text else row

    def decode(self, data: bytes) -> Any:
        """Convert the bytes of a row of text to what a store gives back for it."""
        assert isinstance(self.kind, Text)
        return self.kind.decode(self.name, data)

    def words(self, number: int | float | complex | bool) -> str:
        """Write a value of this field as a person would."""
        return self.kind.words(number)

    @property
    def described(self) -> str:
        """What the dataset gives, for messages."""
        return described(self.dtype, self.shape, self.kind)

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} {tuple(self.shape)}"


def described(dtype: torch.dtype, shape: tuple[int | None, ...], kind: AnyKind) -> str:
    """The dtype and shape of rows, and what they mean if that is more than numbers."""
    meaning = "" if kind == NUMBERS else f" ({kind})"
    return f"{dtype_name(dtype)} {tuple(shape)}{meaning}"


def field_name(path: Iterable[str | int]) -> str:
    """The name of the field at a path of keys, which is safe as the name of a file."""
    return ".".join(map(_encode, path)) or "value"


def where(path: Iterable[str | int]) -> str:
    """What is at a path of keys, for messages."""
    return f"field {field_name(path)!r}" if path else "the sample"


def _encode(key: str | int) -> str:
    # Percent-encoding, with "~" for "%", keeps names unique and safe as file names; tensordict
    # encodes a "%" once more. A dot separates levels.
    encoded = quote(str(key), safe="", errors="surrogatepass")
    return encoded.replace(".", "%2E").replace("~", "%7E").replace("%", "~") or "~"


def check_names(names: Iterable[str]) -> None:
    """Check that each field's name leads to a file of its own."""
    seen: dict[str, str] = {}
    for name in names:
        if len(name) > MAX_NAME_LENGTH:
            raise SchemaError(
                f"field {short_repr(name)}: the name is longer than the {MAX_NAME_LENGTH}"
                " characters that fit into a file name: use shorter keys in the dataset"
            )
        # Compared without case, for file systems that do the same.
        folded = name.casefold()
        if folded in seen:
            raise SchemaError(
                f"the fields {seen[folded]!r} and {name!r} would share one file name: rename one"
                " of them in the dataset"
            )
        seen[folded] = name
