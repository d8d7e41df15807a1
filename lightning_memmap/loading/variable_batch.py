"""Collates a batch, with each field whose rows differ in length in its layout."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from lightning_memmap.loading.buffers import byte_pool
from lightning_memmap.loading.decoding import Scaled, decode_rows
from lightning_memmap.loading.variable_rows import VariableRows
from lightning_memmap.schema.fields import Field
from lightning_memmap.schema.forms import Decode, Layout, ListOfRows, Pad
from lightning_memmap.schema.schema import Schema
from lightning_memmap.schema.structure import Node, leaf_node, make_builder
from lightning_memmap.tensordict_types import tensordict_types

#: The key of the row numbers in a batch.
ROW_NUMBER = "row_number"
_PAD = Pad()
_LIST = ListOfRows()


class LayoutCollate:
    """Nests a batch like the dataset's samples, with each variable field in its layout.

    The leaves of the fields may be followed by row numbers, and by the scales and offsets of
    decoded images.
    """

    def __init__(
        self,
        schema: Schema,
        layout: Mapping[str, Layout] | None = None,
        decode: Mapping[str, Decode] | None = None,
        sample: Any = None,
        with_row_numbers: bool = False,
    ) -> None:
        self._with_row_numbers = with_row_numbers
        structure = schema.structure
        if with_row_numbers and structure.name:
            raise ValueError(
                "with_row_numbers=True: row numbers can't be added to samples of the class"
                f" {structure.name!r}: return a dict, or a field with the row, in the dataset"
            )
        if with_row_numbers and ROW_NUMBER in structure.keys:
            raise ValueError(
                f"with_row_numbers=True: the samples already have a key {ROW_NUMBER!r}: rename it,"
                " or remove the argument"
            )
        self._decode = decode or {}
        fields = {field.name: field for field in schema.fields}
        for name, form in self._decode.items():
            if name in schema.optional or name in schema.lists:
                raise ValueError(
                    f"decode: images of field {name!r} may be missing or several, but there must be"
                    " one in each row: leave it out, and decode the bytes in the transform"
                )
            schema.check_name("decode", name)
            form.check(fields[name])
        layouts = _layouts(schema, layout or {}, self._decode.keys())
        scaled = {name for name, value in self._decode.items() if value.with_scale}
        structure, self._masked = _with_masks(structure, layouts, scaled)
        field_indices = {field.name: i for i, field in enumerate(structure.fields)}
        self._build = make_builder(structure, sample, field_indices)
        self._fields = [
            (field.name, layouts.get(field.name, _LIST), byte_pool()) for field in schema.fields
        ]

    def __call__(self, leaves: Sequence[Tensor | VariableRows]) -> Any:
        """Return the batch of one step."""
        extra_leaves: Iterator[Any] = iter(leaves[len(self._fields) :])
        row_numbers = next(extra_leaves) if self._with_row_numbers else None
        batch_leaves: list[Any] = []
        for (name, layout, allocate), leaf in zip(self._fields, leaves, strict=False):
            decode = self._decode.get(name)
            if not isinstance(leaf, VariableRows):
                is_scaled = decode is not None and decode.with_scale
                batch_leaves.append(Scaled.of(leaf, next(extra_leaves)) if is_scaled else leaf)
            elif decode is not None:
                batch_leaves.append(decode_rows(leaf.replaced(allocate=allocate), decode))
            elif name in self._masked:
                padded = layout.batch(leaf.replaced(allocate=allocate))
                batch_leaves += [padded.values, padded.mask()]
            else:
                batch_leaves.append(layout.batch(leaf.replaced(allocate=allocate)))
        batch = self._build(batch_leaves)
        if not self._with_row_numbers:
            return batch
        if isinstance(batch, tensordict_types()):
            return batch.set(ROW_NUMBER, row_numbers)
        if type(batch) is dict:
            return {**batch, ROW_NUMBER: row_numbers}
        return [*batch, row_numbers] if type(batch) is list else [batch, row_numbers]


def _with_masks(
    node: Node, layouts: Mapping[str, Layout], scaled: Collection[str], is_record: bool = False
) -> tuple[Node, set[str]]:
    """Add a mask to the structure of a TensorDict, after each of its padded fields.

    Args:
        node: The structure of a sample.
        layouts: The layouts of the fields that differ in length.
        scaled: The fields that are decoded with their scales.
        is_record: Whether it is in a list of records.

    Returns:
        The structure, and the names of the fields that a mask follows.

    Raises:
        ValueError: A TensorDict cannot hold a field in its layout.
    """
    keys = [*node.keys]
    children: list[Node] = []
    masked: set[str] = set()
    is_record |= node.kind == "records"
    for index, child in enumerate(node.children):
        changed, names = _with_masks(child, layouts, scaled, is_record)
        children.append(changed)
        masked |= names
        if node.kind != "tensordict" or child.field is None:
            continue
        name = child.field.name
        layout = layouts.get(name)
        if isinstance(layout, Pad):
            keys.insert(len(children), mask := f"{node.keys[index]}_mask")
            children.append(leaf_node(Field(f"{name}_mask", torch.bool, (None,))))
            masked.add(name)
            if mask in node.keys:
                raise ValueError(
                    f"layout: field {name!r} is padded, but its mask {mask!r} is already a key of"
                    " the TensorDict: choose 'jagged', or rename the key in the"
                    " dataset"
                )
        elif name in scaled or (isinstance(layout, ListOfRows) and not is_record):
            what = "decode with with_scale=True" if name in scaled else "layout 'list'"
            raise ValueError(
                f"{what}: field {name!r} is in a TensorDict, which has tensors alone: choose"
                " another layout, leave with_scale out, or return a dict in the dataset"
            )
    return replace(node, keys=tuple(keys), children=tuple(children)), masked


def _layouts(
    schema: Schema, chosen: Mapping[str, Layout], decoded: Collection[str]
) -> dict[str, Layout]:
    """Return the layout of each field whose rows differ in length, checked."""
    fields = {field.name: field for field in schema.fields}
    lists = schema.lists
    for name in chosen.keys() - lists.keys():
        schema.check_name("layout", name)
        check_may_have_layout(name, fields.get(name), decoded)
    layouts: dict[str, Layout] = {}
    for name, field in fields.items():
        if field.num_variable:
            layouts[name] = _LIST if field.is_text else chosen.get(name, _PAD)
    masks = {*schema.optional.values()}
    for name, names in lists.items():
        numeric = [leaf for leaf in names if not fields[leaf].is_text]
        for leaf in numeric:
            layout = chosen.get(leaf, chosen.get(name, _LIST))
            layouts[leaf] = layout.for_mask() if leaf in masks else layout
        if len({isinstance(layouts[leaf], ListOfRows) for leaf in numeric}) > 1:
            raise ValueError(
                f"layout: some fields of the list {name!r} are lists of rows and others are not:"
                f" name a layout for all of them, such as layout={{{name!r}: 'pad'}}"
            )
    for name, layout in layouts.items():
        if not fields[name].is_text:
            layout.check(fields[name])
    return layouts


def check_may_have_layout(name: str, field: Field | None, decoded: Collection[str]) -> None:
    """Check that a layout may be chosen for a field that is not a list."""
    if field is None:
        raise ValueError(f"layout: {name!r} has several fields: name those")
    if name in decoded:
        raise ValueError(f"layout: images of field {name!r} are decoded: leave it out")
    if field.is_text:
        raise ValueError(
            f"layout: field {name!r} is {field.kind}, which is a list in any case: leave it out"
        )
    if not field.num_variable:
        raise ValueError(
            f"layout: in the store, all rows of field {name!r} have the shape {field.shape}: leave"
            " it out, or build the store again with overwrite=True"
        )
