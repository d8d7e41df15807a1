"""`Field`: the name, dtype and shape of a leaf of a sample. `Values`: rows of a field."""

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
from lightning_memmap.integers import Integers, elements_of, group_of, items_per_row
from lightning_memmap.schema.kinds import NUMBERS, AnyKind, Text

#: The dtypes that a store supports. Others (float8, sub-byte types and complex32) do not survive a
#: round trip through tensordict's memory-mapped files.
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32,
        torch.int32, torch.uint64, torch.int64, torch.float16, torch.bfloat16, torch.float32,
        torch.float64, torch.complex64, torch.complex128,
    )
}  # fmt: skip
#: The torch dtype of each numpy dtype, and the reverse. numpy has no bfloat16.
FROM_NUMPY = {np.dtype(name): dtype for name, dtype in DTYPES.items() if name != "bfloat16"}
TO_NUMPY = {dtype: numpy_dtype for numpy_dtype, dtype in FROM_NUMPY.items()}
#: The limit of file systems, less the longest suffix of the files of a field.
MAX_NAME_LENGTH = 255 - len(".0123456789abcdef.tmp")
#: Characters that are escaped in names, because names must be safe in files, URLs and terminals.
_UNSAFE = re.compile(r"[^\w (),-]")
#: Precedes each byte of an escaped character, which is written in hex.
_ESCAPE = "~"
_ESCAPED = re.compile(f"(?:{_ESCAPE}[0-9A-F]{{2}})+")
#: torch cannot index the unsigned dtypes, so they are viewed as signed ones of the same size.
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_Size = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without ``torch.``, such as ``uint8``."""
    return str(dtype).removeprefix("torch.")


class Field(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """One leaf of a sample."""

    name: str
    dtype: torch.dtype
    #: The shape of one row, with None for leading dimensions that vary from row to row.
    shape: Annotated[tuple[_Size | None, ...], msgspec.Meta(max_length=64)]
    kind: AnyKind = NUMBERS

    @cached_property
    def num_variable(self) -> int:
        """The number of leading dimensions that vary from row to row."""
        return sum(size is None for size in self.shape)

    @property
    def is_text(self) -> bool:
        """Whether rows are returned as str or bytes."""
        return self.kind.is_text

    @cached_property
    def item_shape(self) -> tuple[int, ...]:
        """The trailing dimensions, which are the same in all rows."""
        return tuple(size for size in self.shape if size is not None)

    @cached_property
    def item_bytes(self) -> int:
        """Bytes of one item, whose shape is `item_shape`."""
        return math.prod(self.item_shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one row. All rows must have the same shape."""
        assert not self.num_variable
        return self.item_bytes

    @property
    def step_bytes(self) -> int:
        """Bytes of one step of a series. Steps are the first dimension of a row."""
        return replace(self, shape=self.shape[1:]).item_bytes

    def windowed(self, length: int) -> "Field":
        """Return the field of windows of ``length`` steps over the rows of this field."""
        return replace(self, shape=(length, *self.shape[1:]))

    def with_variable_dims(self, count: int) -> "Field":
        """Return the field with ``count`` leading dimensions that vary from row to row."""
        return replace(self, shape=(None,) * count + self.shape[count:])

    def admits(self, shape: tuple[int, ...]) -> bool:
        """Return whether a row of this shape belongs to the field."""
        sizes = zip(shape, self.shape, strict=False)
        return len(shape) == len(self.shape) and all(
            expected in (None, size) for size, expected in sizes
        )

    @property
    def list_field(self) -> "Field":
        """The field of a list of records whose records have this field."""
        if isinstance(self.kind, Text):
            return replace(self, kind=replace(self.kind, many=True))
        return replace(self, shape=(None, *self.shape))

    @property
    def record_field(self) -> "Field":
        """The field of one record. The reverse of `list_field`."""
        if isinstance(self.kind, Text):
            return replace(self, kind=replace(self.kind, many=False))
        return replace(self, shape=self.shape[1:])

    def value(self, row: Tensor) -> Any:
        """Return the value of a stored row: decoded if it is text, otherwise the row itself."""
        return self.decode(row.numpy().tobytes()) if self.is_text else row

    def decode(self, data: bytes) -> Any:
        """Decode the bytes of a row of text to a str, bytes, or a list of these."""
        assert isinstance(self.kind, Text)
        try:
            return self.kind.decode(data)
        except ValueError as error:
            raise StoreError(
                f"field {self.name!r}: a row is not valid {self.kind} ({error}): the store is"
                " damaged, build it again"
            ) from None

    @property
    def description(self) -> str:
        """The dtype, shape and kind of the rows, such as ``int64 () (time in us)``."""
        return str(self) + f" ({self.kind})" * (self.kind != NUMBERS)

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} {tuple(self.shape)}"


def field_name(path: Iterable[str | int]) -> str:
    """Return the name of the field at a path of keys: escaped, and joined by dots."""
    return ".".join(map(_escape_key, path)) or "value"


def describe_path(path: Iterable[str | int]) -> str:
    """Describe a path of keys for a message, such as ``field 'a.b'``."""
    return f"field {field_name(path)!r}" if path else "the sample"


def stored_name(name: str) -> str:
    """Return the stored name of a field. ``name`` may be this name, or its keys joined by dots."""
    return name if _ESCAPE in name else field_name(name.split("."))


def readable_name(name: str) -> str:
    """Return a stored name without escapes, unless `stored_name` would not restore it."""

    def unescape(match: re.Match[str]) -> str:
        return bytes.fromhex(match[0].replace(_ESCAPE, "")).decode("utf-8", "replace")

    readable = _ESCAPED.sub(unescape, name)
    return readable if stored_name(readable) == name else name


def _escape_key(key: str | int) -> str:
    # Dots are escaped as well, because they separate keys.
    return _UNSAFE.sub(_escape_character, str(key)) or _ESCAPE


def _escape_character(match: re.Match[str]) -> str:
    character = match[0]
    if character.isprintable() and not character.isascii():
        return character
    data = character.encode("utf-8", "surrogatepass")
    return "".join(f"{_ESCAPE}{byte:02X}" for byte in data)


def check_file_names(names: Iterable[str]) -> None:
    """Check that the names of fields are short enough, and distinct on every file system."""
    seen: dict[str, str] = {}
    for name in names:
        if len(name.encode()) > MAX_NAME_LENGTH:
            raise SchemaError(
                f"field {short_repr(name)}: the name is longer than the {MAX_NAME_LENGTH} bytes"
                " that fit into a file name: use shorter keys in the dataset"
            )
        # Some file systems ignore case and Unicode normalization.
        folded = normalize("NFC", name).casefold()
        if folded in seen:
            raise SchemaError(
                f"fields {seen[folded]!r} and {name!r} would be stored in one file: their names"
                " differ only in case, or one is the mask of an optional field. Rename one of them"
                " in the dataset"
            )
        seen[folded] = name


class RowList(list[Any]):
    """A list with one entry for each row of a batch: a tensor, a str, bytes, or a list of records.

    In a batch, it is one field. Other lists are containers of fields.
    """


class Values(NamedTuple):
    """Rows of one field, in its stored dtype."""

    data: Tensor
    """(n, *field shape). If the field has variable dimensions, the concatenated items of all rows,
    (items, *item shape)."""
    sizes: Integers | None = None
    """The sizes of each row in the variable dimensions, int64 of shape (n, num_variable), or None
    without such dimensions."""

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self.data if self.sizes is None else self.sizes)

    @classmethod
    def empty(cls, field: Field) -> "Values":
        """Return zero rows of a field."""
        count = field.num_variable
        data = torch.empty((0, *field.item_shape), dtype=field.dtype, device="cpu")
        return cls(data, np.empty((0, count), np.int64) if count else None)

    @classmethod
    def from_rows(cls, field: Field, rows: Sequence[Tensor]) -> "Values":
        """Concatenate one or more rows, on one device and in the field's dtype."""
        if not (count := field.num_variable):
            return cls(torch.stack(tuple(rows)))
        sizes = np.array([row.shape[:count] for row in rows], np.int64)
        return cls(torch.cat([row.reshape(-1, *field.item_shape) for row in rows]), sizes)

    def rows(self) -> Iterator[Tensor]:
        """Yield a view of each row, in its shape."""
        if self.sizes is None:
            yield from self.data
            return
        items_of_rows = self.data.split_with_sizes(items_per_row(self.sizes).tolist())
        for items, sizes in zip(items_of_rows, self.sizes.tolist(), strict=True):
            yield items.view(*sizes, *self.data.shape[1:])

    def take(self, rows: range | Integers) -> "Values":
        """Return rows by index: a range of step 1, or int64 of shape (n,) in any order."""
        if isinstance(rows, range) and rows == range(self.num_rows):
            return self
        rows = np.asarray(rows, np.int64)
        if self.sizes is None:
            return Values(take_rows(self.data, rows))
        lengths = items_per_row(self.sizes)
        items = elements_of(rows, lengths)
        return Values(take_rows(self.data, items), self.sizes[rows])

    def scatter(self, mask: NDArray[np.bool_]) -> "Values":
        """Return one row per entry of ``mask``: the next of these rows where it is True, otherwise
        zeros or an empty row."""
        if self.sizes is not None:
            sizes = np.zeros((len(mask), self.sizes.shape[1]), np.int64)
            sizes[mask] = self.sizes
            return Values(self.data, sizes)
        return Values(_scatter_rows(self.data, mask))

    def group_into_lists(
        self, lengths: Integers, mask: NDArray[np.bool_] | None = None
    ) -> "Values":
        """Return one row for each list of records. These rows are the records of all lists.

        Args:
            lengths: The number of records in each list, int64 of shape (n,).
            mask: False for records that are None. They are stored as zeros in the shape of the
                other records of their list.

        Raises:
            ValueError: The records of a list differ in shape.
        """
        if self.sizes is None:
            return Values(self.data, lengths[:, None])
        is_present = np.ones(len(self.sizes), np.bool_) if mask is None else mask
        rows = group_of(lengths)
        sizes = np.zeros((len(lengths), self.sizes.shape[1]), np.int64)
        sizes[rows[is_present]] = self.sizes[is_present]
        wrong = np.flatnonzero(is_present & (sizes[rows] != self.sizes).any(axis=1))
        if len(wrong):
            in_list = self.sizes[(rows == rows[wrong[0]]) & is_present].tolist()
            shapes = sorted({(*shape, *self.data.shape[1:]) for shape in map(tuple, in_list)})
            raise ValueError(f"found records of the shapes {shapes} in one list")
        data = self.data
        if not is_present.all():
            data = _scatter_rows(data, np.repeat(is_present, items_per_row(sizes[rows])))
        return Values(data, np.concatenate([lengths[:, None], sizes], axis=1))


def join_values(reads: Sequence[list[Values]], order: Integers | None = None) -> list[Values]:
    """Concatenate the rows of several reads for each field, then take them in an order.

    Args:
        reads: One item per field from each read, at least one read.
        order: Indices into the concatenated rows, int64 of shape (n,). None keeps their order.
    """
    joined = []
    for values in zip(*reads, strict=True) if len(reads) > 1 else ():
        sizes = [read.sizes for read in values if read.sizes is not None]
        data = torch.cat([read.data for read in values])
        joined.append(Values(data, np.concatenate(sizes) if sizes else None))
    joined = joined or reads[0]
    return joined if order is None else [values.take(order) for values in joined]


def take_rows(data: Tensor, rows: Integers) -> Tensor:
    """Copy rows of a tensor by index, int64 of shape (n,), without gradients."""
    return select(data.detach(), torch.from_numpy(rows).to(data.device))


def select(data: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
    """Copy rows like `torch.index_select`, but also in unsigned dtypes, which that lacks."""
    if (signed := SIGNED.get(data.dtype)) is None:
        return torch.index_select(data, 0, rows, out=out)
    memory = None if out is None else out.view(signed)
    return torch.index_select(data.view(signed), 0, rows, out=memory).view(data.dtype)


def _scatter_rows(data: Tensor, mask: NDArray[np.bool_]) -> Tensor:
    """Return one row per entry of ``mask``: the next row of ``data`` where it is True, or zeros."""
    rows = torch.zeros((len(mask), *data.shape[1:]), dtype=data.dtype, device="cpu")
    signed = SIGNED.get(data.dtype, data.dtype)
    rows.view(signed)[torch.from_numpy(mask)] = data.view(signed)
    return rows
