"""What a batch has for fields whose rows differ in length, and how it is put together."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from lightning_memmap.loading.buffers import byte_pool
from lightning_memmap.loading.image_decoder import Scaled
from lightning_memmap.loading.variable_rows import VariableRows
from lightning_memmap.schema.fields import Field
from lightning_memmap.schema.forms import Decode, Form, Pad, Rows
from lightning_memmap.schema.schema import Schema
from lightning_memmap.schema.structure import Node, builder, leaf_node
from lightning_memmap.tensordict_types import tensordict_types

#: The key of the row numbers in a batch.
ROW_NUMBER = "row_number"


class FormedCollate:
    """Nests a batch like the dataset's samples, with each variable field in its form.

    The leaves of the fields may be followed by row numbers, and by the places of decoded images.
    """

    def __init__(
        self,
        schema: Schema,
        variable: Mapping[str, Form] | None = None,
        sample: Any = None,
        with_row_numbers: bool = False,
    ) -> None:
        self._with_row_numbers = with_row_numbers
        if with_row_numbers:
            _check_has_place(schema.structure)
        forms = _forms_of_fields(schema, variable or {})
        structure, self._masked = _with_masks(schema.structure, forms)
        index = {field.name: number for number, field in enumerate(structure.fields)}
        self._build = builder(structure, sample, index)
        self._names = [field.name for field in schema.fields]
        self._forms = [
            (form, byte_pool()) if (form := forms.get(field.name)) else None
            for field in schema.fields
        ]

    def __call__(self, leaves: Sequence[Tensor | VariableRows]) -> Any:
        """Make a batch."""
        others: Iterator[Any] = iter(leaves[len(self._forms) :])
        numbers = next(others) if self._with_row_numbers else None
        made = list[Any]()
        for name, formed, leaf in zip(self._names, self._forms, leaves, strict=False):
            if formed is None:
                made.append(leaf)
                continue
            form, allocate = formed
            if name in self._masked and isinstance(leaf, VariableRows):
                padded = form.batch(leaf.replaced(allocate=allocate))
                made += [padded.values, padded.mask()]
            elif isinstance(leaf, VariableRows):
                made.append(form.batch(leaf.replaced(allocate=allocate)))
            elif isinstance(form, Decode) and form.with_scale:
                made.append(Scaled.of(leaf, next(others)))
            else:
                made.append(leaf)
        batch = self._build(made)
        return _numbered(batch, numbers) if self._with_row_numbers else batch


def _with_masks(
    node: Node, forms: Mapping[str, Form], is_record: bool = False
) -> tuple[Node, set[str]]:
    """Add a mask to the structure of a TensorDict, after each of its padded fields.

    Args:
        node: The structure of a sample.
        forms: The forms of the fields that differ in length.
        is_record: Whether it is in a list of records.

    Returns:
        The structure, and the names of the fields that a mask follows.

    Raises:
        ValueError: A TensorDict has no place for what a form makes.
    """
    keys, children, masked = [*node.keys], list[Node](), set[str]()
    is_record |= node.kind == "records"
    for index, child in enumerate(node.children):
        changed, names = _with_masks(child, forms, is_record)
        children.append(changed)
        masked |= names
        if node.kind != "tensordict" or child.field is None:
            continue
        name = child.field.name
        form = forms.get(name)
        if isinstance(form, Pad):
            keys.insert(len(children), mask := f"{node.keys[index]}_mask")
            children.append(leaf_node(Field(f"{name}_mask", torch.bool, (None,))))
            masked.add(name)
            if mask in node.keys:
                raise ValueError(
                    f"variable: field {name!r} is padded, and the TensorDict has a key"
                    f" {mask!r} of its own, where its mask would be: choose 'jagged', or rename"
                    " the key in the dataset"
                )
        elif isinstance(form, Rows if not is_record else ()) or getattr(form, "with_scale", False):
            raise ValueError(
                f"variable: field {name!r} as {type(form).__name__}, and a TensorDict has"
                " tensors alone: choose 'pad' or 'jagged', or give a dict in the dataset"
            )
    return replace(node, keys=tuple(keys), children=tuple(children)), masked


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
                f"variable: in the store, {schema.why_no_field(name)}. If the dataset has it now,"
                " build the store again with overwrite=True"
            )
        form.check(fields[name])
    forms: dict[str, Form] = {}
    for name, field in fields.items():
        if field.num_variable:
            form = given.get(name, Pad())
            forms[name] = Rows() if field.is_text and not form.takes_bytes else form
    masks = {*optional.values()}
    for name, inner in lists.items():
        numbers = [each for each in inner if not fields[each].is_text]
        for each in numbers:
            form = given.get(each, given.get(name, Rows()))
            forms[each] = form.of_mask() if each in masks else form
        if len({isinstance(forms[each], Rows) for each in numbers}) > 1:
            raise ValueError(
                f"variable: some fields of the list {name!r} are given row by row and others"
                f" are not: name a form for all of them, such as variable={{{name!r}: 'pad'}}"
            )
    for name, form in forms.items():
        if not fields[name].is_text:
            form.check(fields[name])
    return forms


def _check_has_place(node: Node) -> None:
    """Check that samples have a place for row numbers."""
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


def _numbered(batch: Any, numbers: Any) -> Any:
    """A batch with row numbers: under the key `ROW_NUMBER`, or behind what a list has."""
    if isinstance(batch, tensordict_types()):
        return batch.set(ROW_NUMBER, numbers)
    if type(batch) is dict:
        return {**batch, ROW_NUMBER: numbers}
    return [*batch, numbers] if type(batch) is list else [batch, numbers]
