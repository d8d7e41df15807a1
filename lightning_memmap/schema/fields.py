"""Fields: the name, dtype and shape of each leaf of a sample, and the rows of one."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from reprlib import repr as short_repr
from typing import Annotated, Any, NamedTuple
from unicodedata import normalize

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from lightning_memmap.errors import SchemaError, StoreError
from lightning_memmap.integers import Integers
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
MAX_NAME_LENGTH = 255 - len(".0123456789abcdef.tmp")
#: What may not be in a name, which is safe in files, in URLs and on a terminal, and what stands
#: before the bytes of it.
_UNSAFE, _ESCAPE = re.compile(r"[^\w (),-]"), "~"
_ESCAPED = re.compile(f"(?:{_ESCAPE}[0-9A-F]{{2}})+")
#: Torch has no index for these, and their bits do as well.
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_Size = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without ``torch.``, such as ``uint8``."""
    return str(dtype).removeprefix("torch.")


class Field(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """One leaf of a sample."""

    name: str
    dtype: torch.dtype
    #: Of one row. Leading dimensions that differ from row to row are None.
    shape: Annotated[tuple[_Size | None, ...], msgspec.Meta(max_length=64)]
    kind: AnyKind = NUMBERS

    @cached_property
    def num_variable(self) -> int:
        """The number of leading dimensions that differ from row to row."""
        return sum(size is None for size in self.shape)

    @property
    def is_text(self) -> bool:
        """Whether rows are returned as str or bytes."""
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
        """Return the field of windows of a number of steps over the rows of this one."""
        return replace(self, shape=(length, *self.shape[1:]))

    def varying(self, count: int) -> "Field":
        """Return the field with a number of leading dimensions that differ from row to row."""
        return replace(self, shape=(None,) * count + self.shape[count:])

    def admits(self, shape: tuple[int, ...]) -> bool:
        """Return whether a row may have a shape."""
        pairs = zip(shape, self.shape, strict=False)
        return len(shape) == len(self.shape) and all(b is None or a == b for a, b in pairs)

    @property
    def in_list(self) -> "Field":
        """The field of a list of records, whose rows each hold several rows of this field."""
        if isinstance(self.kind, Text):
            return replace(self, kind=replace(self.kind, many=True))
        return replace(self, shape=(None, *self.shape))

    @property
    def of_record(self) -> "Field":
        """The field of one record, for the field of a list of records."""
        if isinstance(self.kind, Text):
            return replace(self, kind=replace(self.kind, many=False))
        return replace(self, shape=self.shape[1:])

    def value(self, row: Tensor) -> Any:
        """Return what a store returns for a row on the CPU: the row itself, or its texts."""
        return self.decode(row.numpy().tobytes()) if self.is_text else row

    def decode(self, data: bytes) -> Any:
        """Convert the bytes of a row of text to a str, bytes, or a list of these."""
        assert isinstance(self.kind, Text)
        try:
            return self.kind.decode(data)
        except ValueError as error:
            raise StoreError(
                f"field {self.name!r}: a row is not {self.kind} ({error}): its store is damaged,"
                " build it again"
            ) from None

    @property
    def described(self) -> str:
        """The dtype and shape of rows, and what they mean if that is more than numbers."""
        return str(self) + f" ({self.kind})" * (self.kind != NUMBERS)

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} {tuple(self.shape)}"


def field_name(path: Iterable[str | int]) -> str:
    """Return the name of the field at a path of keys. It is safe as a file name."""
    return ".".join(map(_encode, path)) or "value"


def where(path: Iterable[str | int]) -> str:
    """Describe a path of keys in messages."""
    return f"field {field_name(path)!r}" if path else "the sample"


def name_as_stored(given: str) -> str:
    """Return the stored name of a field, from that name or from its keys joined by dots."""
    return given if _ESCAPE in given else field_name(given.split("."))


def name_as_given(name: str) -> str:
    """Return the keys of a field as a sample has them, where `name_as_stored` reverses this."""

    def decode(found: re.Match[str]) -> str:
        return bytes.fromhex(found[0].replace(_ESCAPE, "")).decode("utf-8", "replace")

    given = _ESCAPED.sub(decode, name)
    return given if name_as_stored(given) == name else name


def _encode(key: str | int) -> str:
    # A dot separates levels.
    return _UNSAFE.sub(_escaped, str(key)) or _ESCAPE


def _escaped(found: re.Match[str]) -> str:
    letter = found[0]
    # Others than those of ASCII are safe if they can be printed.
    if letter.isprintable() and not letter.isascii():
        return letter
    data = letter.encode("utf-8", "surrogatepass")
    return "".join(f"{_ESCAPE}{byte:02X}" for byte in data)


def check_names(names: Iterable[str]) -> None:
    """Check that each field's name leads to a file of its own."""
    seen: dict[str, str] = {}
    for name in names:
        if len(name.encode()) > MAX_NAME_LENGTH:
            raise SchemaError(
                f"field {short_repr(name)}: the name is longer than the {MAX_NAME_LENGTH} bytes"
                " that fit into a file name: use shorter keys in the dataset"
            )
        # Compared without case, and letters as they look, for file systems that do the same.
        folded = normalize("NFC", name).casefold()
        if folded in seen:
            raise SchemaError(
                f"the names of the fields {seen[folded]!r} and {name!r} are the same but for case,"
                " which not every file system tells apart, or one is the mask of what may be None:"
                " rename one of them in the dataset"
            )
        seen[folded] = name


class RowList(list[Any]):
    """A list with one entry for each row of a batch: a tensor, a str, bytes, or a list of records.

    It is a list like any other, but counts as one field and not as a container of fields.
    """


class Values(NamedTuple):
    """Rows of one field, in the dtype in which it is kept."""

    data: Tensor
    """Of shape (n, *field shape); of a field whose rows differ in length, the items of all rows one
    after the other, (items, *item shape)."""
    sizes: Integers | None = None
    """Of such a field, the sizes of each row in the dimensions that differ, int64 of shape (n,
    number of these)."""

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self.data if self.sizes is None else self.sizes)

    @classmethod
    def none(cls, field: Field) -> "Values":
        """Return no rows of a field."""
        count = field.num_variable
        data = torch.empty((0, *field.item_shape), dtype=field.dtype, device="cpu")
        return cls(data, np.empty((0, count), np.int64) if count else None)

    @classmethod
    def of_rows(cls, field: Field, rows: Sequence[Tensor]) -> "Values":
        """Concatenate rows of a field, at least one: on one device, of the field's dtype."""
        if not (count := field.num_variable):
            return cls(torch.stack(tuple(rows)))
        sizes = np.array([row.shape[:count] for row in rows], np.int64)
        return cls(torch.cat([row.reshape(-1, *field.item_shape) for row in rows]), sizes)

    def rows(self) -> Iterator[Tensor]:
        """Yield each row in its shape, as a view."""
        if self.sizes is None:
            yield from self.data
            return
        pieces = self.data.split_with_sizes(self.sizes.prod(axis=1).tolist())
        for piece, shape in zip(pieces, self.sizes.tolist(), strict=True):
            yield piece.view(*shape, *self.data.shape[1:])

    def take(self, rows: range | Integers) -> "Values":
        """Return rows by index: a range of step 1, or int64 of shape (n,) in any order."""
        if isinstance(rows, range) and rows == range(self.num_rows):
            return self
        rows = np.asarray(rows, np.int64)
        if self.sizes is None:
            return Values(take_rows(self.data, rows))
        lengths = self.sizes.prod(axis=1)
        starts, taken = np.cumsum(lengths) - lengths, lengths[rows]
        shifts = starts[rows] - (np.cumsum(taken) - taken)
        items = np.repeat(shifts, taken) + np.arange(taken.sum())
        return Values(take_rows(self.data, items), self.sizes[rows])

    def spread(self, mask: NDArray[np.bool_]) -> "Values":
        """Return more rows: these where a mask is True, and zeros or empty rows elsewhere."""
        if self.sizes is not None:
            sizes = np.zeros((len(mask), self.sizes.shape[1]), np.int64)
            sizes[mask] = self.sizes
            return Values(self.data, sizes)
        return Values(_spread_among_zeros(self.data, mask))

    def in_lists(self, lengths: Integers, mask: NDArray[np.bool_] | None = None) -> "Values":
        """Return one row for each list of records, where these are the records of all lists.

        Args:
            lengths: The number of records in each list, int64 of shape (n,).
            mask: False for the records that are None, which take the shape of others in the list.
        """
        if self.sizes is None:
            return Values(self.data, lengths[:, None])
        given = np.ones(len(self.sizes), np.bool_) if mask is None else mask
        rows = np.repeat(np.arange(len(lengths)), lengths)
        sizes = np.zeros((len(lengths), self.sizes.shape[1]), np.int64)
        sizes[rows[given]] = self.sizes[given]
        wrong = np.flatnonzero(given & (sizes[rows] != self.sizes).any(axis=1))
        if len(wrong):
            mine = self.sizes[(rows == rows[wrong[0]]) & given]
            shapes = sorted({(*shape, *self.data.shape[1:]) for shape in map(tuple, mine.tolist())})
            raise ValueError(f"found records of the shapes {shapes} in one list")
        data = self.data
        if not given.all():
            data = _spread_among_zeros(data, np.repeat(given, sizes[rows].prod(axis=1)))
        return Values(data, np.concatenate([lengths[:, None], sizes], axis=1))


def join_values(parts: Sequence[list[Values]], back: Integers | None = None) -> list[Values]:
    """Concatenate the rows of several reads, field by field, and reorder them."""
    found = []
    for values in zip(*parts, strict=True) if len(parts) > 1 else ():
        sizes = [each.sizes for each in values if each.sizes is not None]
        data = torch.cat([each.data for each in values])
        found.append(Values(data, np.concatenate(sizes) if sizes else None))
    found = found or parts[0]
    return found if back is None else [each.take(back) for each in found]


def take_rows(data: Tensor, rows: Integers) -> Tensor:
    """Copy rows of a tensor of any dtype, in any order, int64 of shape (n,)."""
    return select(data.detach(), torch.from_numpy(rows).to(data.device))


def select(data: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
    """Return rows like `torch.index_select`, which lacks some unsigned integers."""
    if (signed := SIGNED.get(data.dtype)) is None:
        return torch.index_select(data, 0, rows, out=out)
    memory = None if out is None else out.view(signed)
    return torch.index_select(data.view(signed), 0, rows, out=memory).view(data.dtype)


def _spread_among_zeros(data: Tensor, mask: NDArray[np.bool_]) -> Tensor:
    """Return rows of data where a mask is True, and zeros elsewhere."""
    spread = torch.zeros((len(mask), *data.shape[1:]), dtype=data.dtype, device="cpu")
    signed = SIGNED.get(data.dtype, data.dtype)
    spread.view(signed)[torch.from_numpy(mask)] = data.view(signed)
    return spread
