"""What a batch has for fields whose rows differ in length, and how it is put together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from lightning_memmap._compat.tensors import jagged_tensor
from lightning_memmap.loading.buffers import GrowingPool
from lightning_memmap.loading.decoding import ImageDecoder
from lightning_memmap.loading.device_streams import send
from lightning_memmap.loading.variable_padding import padded_step
from lightning_memmap.loading.variable_rows import Allocate, VariableRows
from lightning_memmap.schema import (
    Decode,
    FetchedRows,
    Form,
    Masked,
    Nesting,
    Pad,
    RowList,
    Rows,
    Schema,
)
from lightning_memmap.schema.build import Build, Leaves
from lightning_memmap.schema.kinds import Mask


class Padded(NamedTuple):
    """What a batch has for rows that differ in length: padded values, and the lengths."""

    values: Tensor
    """The padded rows, of shape (B, *padded lengths, *item shape)."""
    lengths: Tensor
    """How much of each row is not padding: int64 of shape (B,), or (B, k) where ``k`` dimensions
    differ. On the device of ``values``."""

    def rows(self) -> list[Tensor]:
        """The rows without their padding, views of ``values``."""
        sizes = self.lengths.view(len(self.lengths), -1).tolist()
        return [
            row[tuple(slice(size) for size in each)]
            for row, each in zip(self.values, sizes, strict=True)
        ]


class Scaled(NamedTuple):
    """What a batch has for images decoded with ``Decode(size=..., with_scale=True)``.

    A point ``(x, y)`` of the upright image file, in pixels, lies at ``(x, y) * scale + offset`` of
    its values, or outside of them if it was cut off.
    """

    values: Tensor
    """The images, uint8 of shape (B, channels, height, width)."""
    scale: Tensor
    """By how much each was scaled, float32 of shape (B,)."""
    offset: Tensor
    """Where its left upper corner lies: x and y, not above 0, float32 of shape (B, 2)."""


#: The key of the row numbers in a batch.
ROW_NUMBER = "row_number"


@dataclass(frozen=True, slots=True)
class FieldRows(FetchedRows):
    """The rows of one field in a step, as its form gets them."""

    rows: VariableRows
    allocate: Allocate

    @override
    def padded(self, value: float, multiple: int) -> Padded:
        rows = self.rows
        sizes = rows.sizes[:, 0] if len(rows.widths) == 1 else rows.sizes
        lengths = send(torch.from_numpy(sizes.copy()), rows.device)
        return Padded(padded_step(rows, multiple, value, self.allocate), lengths)

    @override
    def jagged(self) -> Tensor:
        rows = self.rows
        offsets = send(torch.from_numpy(np.append(0, np.cumsum(rows.lengths))), rows.device)
        return jagged_tensor(rows.packed_together(self.allocate), offsets)

    @override
    def listed(self) -> RowList:
        rows, field = self.rows, self.rows.field
        packed = rows.packed_together(self.allocate)
        if field.is_text:
            data, ends = packed.numpy().tobytes(), np.cumsum(rows.lengths).tolist()
            pieces = zip([0, *ends], ends, strict=False)
            return RowList(field.decode(data[begin:end]) for begin, end in pieces)
        parts = packed.split_with_sizes(rows.lengths.tolist())
        if rows.sizes.shape[1] > 1:
            shapes, item = rows.sizes.tolist(), field.item_shape
            return RowList(p.view(*shape, *item) for p, shape in zip(parts, shapes, strict=True))
        return RowList(parts)

    @override
    def decoded(self, form: Decode) -> Tensor | Scaled:
        images = np.split(self.rows.packed().numpy(), np.cumsum(self.rows.lengths)[:-1])
        decoder = ImageDecoder.like(self.rows.field.name, form, images[0])
        return _with_scale(form, *decoder.decoded(images))


class FormedCollate:
    """Nests a batch like the dataset's samples, with each variable field in its form."""

    def __init__(
        self, schema: Schema, variable: Mapping[str, Form] | None = None, sample: Any = None
    ) -> None:
        forms = _forms_of_fields(schema, variable or {})
        self._build = schema.builder(sample, _NESTING)
        self._forms = [
            (form, GrowingPool().get) if (form := forms.get(field.name)) else None
            for field in schema.fields
        ]

    def __call__(self, leaves: Sequence[Tensor | VariableRows]) -> Any:
        """Make a batch."""
        places, made = iter(leaves[len(self._forms) :]), list[Any]()
        for formed, leaf in zip(self._forms, leaves, strict=False):
            if formed is None:
                made.append(leaf)
                continue
            form, allocate = formed
            if isinstance(leaf, VariableRows):
                made.append(form.batch(FieldRows(leaf, allocate)))
            elif isinstance(form, Decode) and form.with_scale and not leaf.is_meta:
                made.append(_with_scale(form, leaf, next(places)))
            else:
                made.append(leaf)
        return self._build(made)


def _with_scale(form: Decode, images: Tensor, places: Any) -> Tensor | Scaled:
    return Scaled(images, places[:, 0], places[:, 1:]) if form.with_scale else images


def _forms_of_fields(schema: Schema, variable: Mapping[str, Form]) -> dict[str, Form]:
    """The form of each field whose rows differ in length, checked; see `FormedCollate`."""
    fields = {field.name: field for field in schema.fields}
    optional, lists = schema.optional, schema.lists
    given = {name: form for name, form in variable.items() if not form.is_default}
    for name, form in variable.items():
        if form.takes_bytes and name in {**optional, **lists}:
            raise ValueError(
                f"variable: images of field {name!r} may be missing or several, and 'decode' is"
                " for one in each row: leave it out, and decode the bytes in the transform"
            )
        if name in lists or (form.nullable and name in optional):
            continue
        if form.nullable and name in fields:
            raise ValueError(
                f"variable: in the store, no row of field {name!r} may be None: leave that out,"
                " or build the store again with overwrite=True"
            )
        if name not in fields:
            raise ValueError(
                f"variable: in the store, {schema.why_no_field(name)}: leave it out,"
                " or build the store again with overwrite=True"
            )
        form.check(fields[name])
    forms: dict[str, Form] = {}
    for name, field in fields.items():
        if field.num_variable:
            form = given.get(name, Pad())
            forms[name] = Rows() if field.is_text and not form.takes_bytes else form
    for name, inner in lists.items():
        numbers = [each for each in inner if not fields[each].is_text]
        for each in numbers:
            form = given.get(each, given.get(name, Rows()))
            forms[each] = form.of_mask() if isinstance(fields[each].kind, Mask) else form
        if len({isinstance(forms[each], Rows) for each in numbers}) > 1:
            raise ValueError(
                f"variable: some fields of the list {name!r} are given row by row and others"
                f" are not: name a form for all of them, such as variable={{{name!r}: 'pad'}}"
            )
    for name, form in forms.items():
        if not fields[name].is_text:
            form.check(fields[name])
    return forms


def _records(record: Build, leaves: Mapping[int, Any]) -> Any:
    """The records of all rows: row by row where their fields are lists of rows."""
    if not all(isinstance(leaf, RowList) for leaf in leaves.values()):
        return record(leaves)
    rows = zip(*leaves.values(), strict=True)
    return RowList(record(dict(zip(leaves, row, strict=True))) for row in rows)


def _masked(part: Build, leaves: Leaves, mask: Any) -> Masked:
    return Masked(part(leaves), mask)


_NESTING = Nesting(_records, _masked)


class NumberedCollate:
    """Adds row numbers to batches: under the key `ROW_NUMBER`, or behind what a list has."""

    def __init__(self, collate: Callable[[Sequence[Any]], Any], schema: Schema) -> None:
        node = schema.structure
        if node.name:
            raise ValueError(
                f"with_row_numbers=True: the samples are of the class {node.name!r}, which has no"
                f" place for row numbers: give a dict, or a field of your own with the row"
            )
        if ROW_NUMBER in node.keys:
            raise ValueError(
                f"with_row_numbers=True: the samples have a key {ROW_NUMBER!r} of their own: rename"
                " it, or leave the argument out"
            )
        self._collate = collate

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Make a batch."""
        *others, numbers = leaves
        batch = self._collate(others)
        if isinstance(batch, TensorDictBase):
            return batch.set(ROW_NUMBER, numbers)
        if type(batch) is dict:
            return {**batch, ROW_NUMBER: numbers}
        return [*batch, numbers] if type(batch) is list else [batch, numbers]
