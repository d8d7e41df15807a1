"""What a batch has for fields whose rows differ in length, and how it is put together."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.loading.buffers import GrowingPool
from lightning_memmap.loading.device_streams import send
from lightning_memmap.loading.image_decoder import ImageDecoder
from lightning_memmap.loading.nested import named_leaves, rebuilt
from lightning_memmap.loading.variable_rows import VariableRows
from lightning_memmap.schema import (
    Decode,
    Field,
    Form,
    Jagged,
    Masked,
    Nesting,
    Nullable,
    Pad,
    RowList,
    Rows,
    Schema,
    Windows,
)
from lightning_memmap.schema.fields import dtype_name
from lightning_memmap.schema.nesting import Build, Leaves


class Padded(NamedTuple):
    """Rows that were padded to one length."""

    values: Tensor
    """Of shape (B, *padded lengths, *item shape)."""
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


class Former:
    """Puts one field of a batch together.

    Args:
        field: The field, whose rows differ in length.
        form: How the batch gives it. Text is always given as a list of str or bytes, unless they
            are decoded.

    Raises:
        ValueError: The field cannot have this form.
    """

    def __init__(self, field: Field, form: Form) -> None:
        if isinstance(form, Jagged) and field.num_variable > 1:
            raise ValueError(
                f"variable: field {field.name!r} differs in {field.num_variable} dimensions, and a"
                " jagged tensor in one: choose 'pad' or 'list'"
            )
        if isinstance(form, Pad):
            try:
                torch.tensor([form.value]).to(field.dtype)
                fits = torch.tensor([form.value], dtype=field.dtype).item() == form.value
            except (RuntimeError, OverflowError):
                fits = False
            if not fits and field.dtype not in _INEXACT:
                raise ValueError(
                    f"variable: field {field.name!r} is {dtype_name(field.dtype)}, which does not"
                    f" have the value {form.value!r} to pad with: choose another value"
                )
        self._field = field
        self._form = form
        self._memory = GrowingPool().get

    def form(self, rows: VariableRows) -> Any:
        """Copy rows into what the batch has for them.

        Args:
            rows: The rows, where they lie.

        Returns:
            A `Padded`, a nested tensor, a `RowList`, or decoded images, on the device of the rows.
        """
        if isinstance(self._form, Decode):
            images = np.split(rows.packed().numpy(), np.cumsum(rows.lengths)[:-1])
            return ImageDecoder.like(self._field.name, self._form, images[0]).decoded(images)
        if self._field.is_text:
            return RowList(self._texts(rows))
        if isinstance(self._form, Pad):
            multiple = self._form.multiple
            widths = tuple(-(-width // multiple) * multiple for width in rows.widths)
            sizes = rows.sizes[:, 0] if len(widths) == 1 else rows.sizes
            lengths = send(torch.from_numpy(sizes.copy()), rows.device)
            return Padded(rows.padded(widths, self._form.value, self._memory), lengths)
        if isinstance(self._form, Jagged):
            offsets = send(torch.from_numpy(np.append(0, np.cumsum(rows.lengths))), rows.device)
            return torch.nested.nested_tensor_from_jagged(rows.packed(self._memory), offsets)
        parts = rows.packed(self._memory).split_with_sizes(rows.lengths.tolist())
        if rows.sizes.shape[1] > 1:
            shapes, item = rows.sizes.tolist(), self._field.item_shape
            return RowList(p.view(*shape, *item) for p, shape in zip(parts, shapes, strict=True))
        return RowList(parts)

    def _texts(self, rows: VariableRows) -> Iterable[str | bytes | list[str | bytes]]:
        data = rows.packed().numpy().tobytes()
        ends = np.cumsum(rows.lengths).tolist()
        for begin, end in zip([0, *ends], ends, strict=False):
            yield self._field.decode(data[begin:end])


#: Dtypes that round what they are padded with.
_INEXACT = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128
)  # fmt: skip


class FormedCollate:
    """Nests a batch like the dataset's samples, with each variable field in its form.

    Args:
        schema: The fields of the store.
        variable: The form of each variable field, and of each list of records, by its name. By
            default, fields are padded with 0, and a list of records is given row by row: what the
            records of a row have of each field, stacked. A field of a list may have a form of its
            own where the list is not given row by row.
        sample: A sample of the dataset for its classes; see `Schema.builder`.

    Raises:
        ValueError: A name is of no field, or of one whose rows have one shape, or a field cannot
            have its form.
    """

    def __init__(
        self, schema: Schema, variable: dict[str, Form] | None = None, sample: Any = None
    ) -> None:
        variable = variable or {}
        fields = {field.name: field for field in schema.fields}
        optional, lists = schema.optional, schema.lists
        for name, form in variable.items():
            if isinstance(form, Decode) and name in {**optional, **lists}:
                raise ValueError(
                    f"variable: images of field {name!r} may be missing or several, and 'decode' is"
                    " for one in each row: leave it out, and decode the bytes in the transform"
                )
            if name in lists or (form.nullable and name in optional):
                continue
            if form.nullable and name in fields:
                raise ValueError(
                    f"variable: in the store, no row of field {name!r} may be None: leave that out,"
                    " or build the store anew with overwrite=True"
                )
            if name not in fields:
                raise ValueError(
                    f"variable: in the store, {schema.why_no_field(name)}: leave it out,"
                    " or build the store anew with overwrite=True"
                )
            if isinstance(variable[name], Decode):
                check_encoded(fields[name])
            elif fields[name].is_text:
                raise ValueError(
                    f"variable: field {name!r} is {fields[name].kind}, which batches give as a list"
                    " in any case: leave it out"
                )
            elif not (fields[name].num_variable or isinstance(variable[name], Windows)):
                raise ValueError(
                    f"variable: in the store, all rows of field {name!r} have the shape"
                    f" {fields[name].shape}: leave it out, or build the store anew with"
                    " overwrite=True"
                )
        forms: dict[str, Form | None] = {
            field.name: _form(variable, field.name, Pad()) if field.num_variable else None
            for field in schema.fields
        }
        for name, inner in lists.items():
            of_list = _form(variable, name, Rows())
            forms |= {field: _form(variable, field, of_list) for field in inner}
            for field in inner:
                of_field = forms[field]
                if fields[field].is_text:
                    forms[field] = Rows()
                # What the values are padded with is no value of what says where they are.
                if fields[field].kind == "mask" and isinstance(of_field, Pad):
                    forms[field] = replace(of_field, value=0)
            kinds = {isinstance(forms[n], Rows) for n in inner if not fields[n].is_text}
            if len(kinds) > 1:
                raise ValueError(
                    f"variable: some fields of the list {name!r} are given row by row and others"
                    f" are not: name a form for all of them, such as variable={{{name!r}: 'pad'}}"
                )
        self._build = schema.builder(sample, _NESTING)
        self._formers = [
            Former(field, of_field) if (of_field := forms[field.name]) is not None else None
            for field in schema.fields
        ]

    def __call__(self, leaves: Sequence[Tensor | VariableRows]) -> Any:
        """Make a batch.

        Args:
            leaves: One for each field of the schema, with the same rows. Images may be decoded
                already, and windows have one shape.

        Returns:
            The nested batch.
        """
        return self._build(
            [
                leaf if former is None or isinstance(leaf, Tensor) else former.form(leaf)
                for former, leaf in zip(self._formers, leaves, strict=True)
            ]
        )


def check_encoded(field: Field) -> None:
    """Check that a field may hold encoded images.

    Args:
        field: The field, which a `Decode` is given for.

    Raises:
        ValueError: It does not hold bytes.
    """
    if field.kind == "bytes":
        return
    if field.kind.startswith("image") or (len(field.shape) == 3 and not field.num_variable):
        remedy = "its images are stored decoded: leave it out"
    else:
        remedy = "give bytes in the dataset, such as pathlib.Path(...).read_bytes()"
    raise ValueError(
        f"variable: field {field.name!r} is {field}, and 'decode' is for the bytes of image files:"
        f" {remedy}"
    )


def _form(variable: dict[str, Form], name: str, default: Form) -> Form:
    form = variable.get(name, default)
    return default if isinstance(form, Nullable) else form


def _records(record: Build, leaves: Mapping[int, Any]) -> Any:
    """The records of all rows: row by row where their fields are lists of rows."""
    if not all(isinstance(leaf, RowList) for leaf in leaves.values()):
        return record(leaves)
    rows = zip(*leaves.values(), strict=True)
    return RowList(record(dict(zip(leaves, row, strict=True))) for row in rows)


def _masked(part: Build, leaves: Leaves, mask: Any) -> Masked:
    return Masked(part(leaves), mask)


_NESTING = Nesting(_records, _masked)


def is_variable(leaf: Any) -> bool:
    """Whether a leaf of a batch has rows that differ in length: a nested tensor or a `RowList`.

    Args:
        leaf: The leaf.
    """
    return isinstance(leaf, RowList) or (isinstance(leaf, Tensor) and leaf.is_nested)


def dense_tensors(leaf: Any) -> list[Tensor]:
    """The tensors in a leaf of a batch that have memory.

    Args:
        leaf: A tensor, a `RowList`, or anything else, which has none.
    """
    if isinstance(leaf, RowList):
        return [part for row in leaf for _, part in named_leaves(row) if isinstance(part, Tensor)]
    if isinstance(leaf, Tensor) and leaf.is_nested:
        nested: Any = leaf
        return [nested.values(), nested.offsets()]
    return [leaf] if isinstance(leaf, Tensor) else []


def is_on(leaf: Any, device: torch.device) -> bool:
    """Whether a leaf of a batch is on a device. Text is, on each of them.

    Args:
        leaf: A tensor or a `RowList`.
        device: The device.
    """
    tensors = dense_tensors(leaf) if isinstance(leaf, RowList) else [leaf]
    return all(tensor.device == device for tensor in tensors if isinstance(tensor, Tensor))


def sent_leaf(leaf: Any, device: torch.device) -> Any:
    """A leaf of a batch on a device; see `send`.

    Args:
        leaf: A tensor or a `RowList`.
        device: Where it goes.
    """
    if not isinstance(leaf, RowList):
        return leaf.to(device) if leaf.is_nested else send(leaf, device)
    if is_on(leaf, device):
        return leaf
    parts = [[part for _, part in named_leaves(row)] for row in leaf]
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in dense_tensors(leaf):
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    sent = {dtype: iter(_sent(tensors, device)) for dtype, tensors in by_dtype.items()}
    return RowList(
        rebuilt(row, iter([next(sent[p.dtype]) if isinstance(p, Tensor) else p for p in each]))
        for row, each in zip(leaf, parts, strict=True)
    )


def _sent(tensors: Sequence[Tensor], device: torch.device) -> Iterable[Tensor]:
    """Tensors of one dtype on a device, in one copy."""
    flat = send(torch.cat([tensor.flatten() for tensor in tensors]), device)
    parts = flat.split_with_sizes([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def interleaved(leaves: Sequence[Any], first: int, num_rows: int, device: torch.device) -> Any:
    """Assemble the rows of one field, which differ in length.

    Args:
        leaves: The nested tensor or `RowList` of each data device.
        first: The data device that has the first row; see `SuperBatch`.
        num_rows: Rows of all of them together.
        device: Where they are assembled.

    Returns:
        The rows in order, as a leaf of the same kind.
    """
    count = len(leaves)
    sent = [sent_leaf(leaf, device) for leaf in leaves]
    if isinstance(sent[0], RowList):
        rows: list[Any] = [None] * num_rows
        for index, leaf in enumerate(sent):
            rows[(index - first) % count :: count] = leaf
        return RowList(rows)
    # Where each row of the result is among those of all leaves, one after the other.
    places = np.concatenate(
        [np.arange((index - first) % count, num_rows, count) for index in range(count)]
    )
    order = send(torch.from_numpy(np.argsort(places)), device)
    values = torch.cat([leaf.values() for leaf in sent])
    lengths = torch.cat([leaf.offsets().diff() for leaf in sent])
    starts = (lengths.cumsum(0) - lengths)[order]
    lengths = lengths[order]
    ends = lengths.cumsum(0)
    shifts = (starts - ends + lengths).repeat_interleave(lengths, output_size=len(values))
    values = values.index_select(0, shifts + torch.arange(len(values), device=device))
    offsets = torch.cat([ends.new_zeros(1), ends])
    return torch.nested.nested_tensor_from_jagged(values, offsets)
