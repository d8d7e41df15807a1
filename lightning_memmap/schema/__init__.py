"""Fields: what one sample consists of, and how a batch is put back together.

A sample is any nesting of tuple, list, dict, named tuple, dataclass, TensorDict and tensorclass
around leaves: tensors, numpy arrays and scalars, PIL images, numbers, bools, text and bytes. Each
leaf is a field with a dtype and a shape, which every row shares, except for leading dimensions that
are declared to differ from row to row or were found to. A long list or tuple of numbers of one
dtype is one field as well.
`Schema` is a value: it touches no file.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from reprlib import repr as short_repr
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.errors import SchemaError
from lightning_memmap.schema.fields import (
    DTYPES,
    TEXT_KINDS,
    Field,
    check_names,
    dtype_name,
    entry,
    field_name,
)
from lightning_memmap.schema.forms import Decode, Form, Jagged, Pad, Rows, read_forms
from lightning_memmap.schema.leaves import (
    MAX_NUMBERS,
    MIN_NUMBERS,
    array_dtype,
    describe_leaf,
    describe_rows,
    to_array,
)
from lightning_memmap.schema.narrowing import narrowed
from lightning_memmap.schema.structure import EMPTY, Node, builder, describe, flatten, merge

__all__ = [
    "DTYPES",
    "Decode",
    "Field",
    "Form",
    "Jagged",
    "Node",
    "Pad",
    "Rows",
    "Schema",
    "read_forms",
]

#: Each field is a file and a mapping, of which a process has at most some ten thousand.
_MAX_FIELDS = 4096


@dataclass(frozen=True)
class Schema:
    """The fields of a sample in the order of its leaves, and the nesting around them.

    Args:
        fields: The fields, in the order of the leaves.
        structure: The containers around the fields.
    """

    fields: tuple[Field, ...]
    structure: Node

    @classmethod
    def from_sample(cls, sample: Any, variable: Mapping[str, int] | None = None) -> "Schema":
        """Describe the samples of a dataset by one of them.

        Args:
            sample: Any nesting of the containers above around tensors, numpy arrays and scalars,
                PIL images, numbers, bools, text and bytes.
            variable: By the name of a field, how many of its leading dimensions may differ from
                this sample to the others.

        Returns:
            The schema that all other samples must fit.

        Raises:
            SchemaError: A leaf has a type or dtype that cannot be stored, the sample has no leaf or
                is nested too deeply, the name of a field cannot be the name of a file, or a field
                has fewer dimensions than may differ. The message names the field.
        """
        leaves: list[tuple[str, Any]] = []
        variable = variable or {}
        structure = describe(sample, leaves, number_ndim=0, variable=variable)
        if not leaves:
            raise SchemaError(
                f"the sample {short_repr(sample)} holds no tensor, array, image or number; an empty"
                " list has no dtype: give an empty array of one, or a first row with numbers"
            )
        fields = [describe_leaf(*leaf) for leaf in leaves]
        found = cls(tuple(fields), structure)
        for name in variable.keys() - {*(field.name for field in fields), *found.empty_lists}:
            raise SchemaError(f"variable: {found.why_no_field(name)}")
        for index, field in enumerate(fields):
            count = variable.get(field.name, 0)
            if count and field.is_text:
                raise SchemaError(
                    f"variable: field {field.name!r} is {field.kind}, which batches give as a list"
                    " in any case: leave it out"
                )
            if count > len(field.shape):
                raise SchemaError(
                    f"variable: field {field.name!r} is {field}, which has fewer than {count}"
                    f" dimension{'s' * (count > 1)}"
                )
            count = max(count, field.num_variable)
            fields[index] = replace(field, shape=(None,) * count + field.shape[count:])
        return cls._checked(structure, fields)

    def merged(self, other: "Schema") -> "Schema | None":
        """The schema that has the samples of two.

        Args:
            other: The schema of other samples of the same dataset.

        Returns:
            The schema, in which leading dimensions of fields that differ are None, and lists of
            numbers that differ in length are fields; or None if the two differ in more than that.

        Raises:
            SchemaError: They differ in the dtypes of a list of numbers. The message names it.
        """
        fields: list[Field] = []
        structure = merge(
            self.structure, other.structure, self._by_path(), other._by_path(), fields
        )
        return None if structure is None else Schema(tuple(fields), structure)

    @property
    def empty_lists(self) -> list[str]:
        """The names of lists without a value: what they hold is for other samples to show."""
        nodes = self.structure.walk()
        return [field_name(path) for path, node in nodes if node.is_list and not node.keys]

    def why_no_field(self, name: str) -> str:
        """Say why no field has a name.

        Args:
            name: The name.

        Returns:
            Words for a message, with the names that there are. A list of a few numbers counts as
            one, as it is where rows differ in length.
        """
        names, lists, fields = list[str](), set[tuple[str | int, ...]](), self._by_path()
        for path, node in self.structure.walk():
            within = [fields.get((*path, key)) for key in node.keys]
            if node.is_list and path and all(field and not field.shape for field in within):
                if field_name(path) == name:
                    dtypes = sorted({dtype_name(field.dtype) for field in within if field})
                    found = " and ".join(dtypes) or "nothing"
                    if len(dtypes) > 1:
                        return f"{name!r} is a list of {found}: give all numbers one dtype"
                    return f"{name!r} is a list of {found}, whose length is the same in all rows"
                lists.add(path)
                names.append(field_name(path))
            elif node.is_field and path[:-1] not in lists:
                names.append(field_name(path))
        return f"there is no field {name!r}, among {names}"

    def _by_path(self) -> dict[tuple[str | int, ...], Field]:
        paths = [path for path, node in self.structure.walk() if node.is_field]
        return dict(zip(paths, self.fields, strict=True))

    @classmethod
    def from_batch(cls, batch: Any) -> "Schema":
        """Describe the rows of a batch.

        Args:
            batch: Any nesting of tensors whose first dimension is the rows.

        Returns:
            The schema of one row. All its fields are of the kind ``tensor``.

        Raises:
            SchemaError: A leaf is not a tensor, has no dimension, or has a dtype that cannot be
                stored, or the name of a field cannot be the name of a file. The message names the
                field.
        """
        leaves: list[tuple[str, Any]] = []
        structure = describe(batch, leaves, number_ndim=1)
        if not leaves:
            raise SchemaError(f"{batch!r} holds no tensor")
        return cls._checked(structure, [describe_rows(*leaf) for leaf in leaves])

    @classmethod
    def _checked(cls, structure: Node, fields: list[Field]) -> "Schema":
        check_names(field.name for field in fields)
        return cls(tuple(fields), structure)

    def stored_as(self, dtypes: Mapping[str, torch.dtype]) -> "Schema":
        """Return this schema with other dtypes in which fields are kept.

        Args:
            dtypes: The dtypes by name of the field.

        Returns:
            The schema, which takes the same samples.

        Raises:
            SchemaError: There is no such field, or a complex one would lose its imaginary part.
        """
        names = [field.name for field in self.fields]
        for name in dtypes:
            if name not in names + self.empty_lists:
                raise SchemaError(
                    f"store_dtypes[{name!r}]: there is no such field; the fields are"
                    f" {', '.join(names)}"
                )
        fields = []
        for field in self.fields:
            dtype, given = dtypes.get(field.name, field.dtype), field.sample_dtype
            if field.is_text and dtype != given:
                raise SchemaError(
                    f"store_dtypes[{field.name!r}]: text is kept as UTF-8; leave it out"
                )
            if given.is_complex and not dtype.is_complex:
                raise SchemaError(
                    f"store_dtypes[{field.name!r}]={dtype_name(dtype)!r}: the field is"
                    f" {dtype_name(given)}; choose complex64 or complex128"
                )
            fields.append(replace(field, dtype=dtype, given=None if given == dtype else given))
        return replace(self, fields=tuple(fields))

    @property
    def has_classes(self) -> bool:
        """Whether a named tuple, dataclass or tensorclass is part of a sample."""
        return any(node.name for _, node in self.structure.walk())

    def flatten(self, sample: Any) -> list[Tensor | np.ndarray]:
        """Check a sample against this schema and return its leaves in the order of the fields.

        Args:
            sample: A sample of the dataset.

        Returns:
            One dense CPU tensor or numpy array per field, of the field's dtype and of a shape that
            it admits. It may share memory with the sample; a numpy array keeps its byte order.

        Raises:
            SchemaError: The sample has another structure, or a leaf another dtype, shape or image
                mode. The message names the field, what was found and what was expected.
        """
        leaves: list[Any] = []
        flatten(sample, self.structure, leaves, number_ndim=0)
        arrays: list[Tensor | np.ndarray] = []
        for field, leaf in zip(self.fields, leaves, strict=True):
            if leaf is EMPTY:
                arrays.append(torch.empty((0, *field.item_shape), dtype=field.dtype))
                continue
            try:
                array, kind = to_array(field.name, leaf)
                dtype, shape = array_dtype(field.name, array), tuple(array.shape)
            except SchemaError as error:
                raise SchemaError(f"{error}; expected {field} ({field.kind})") from error
            # Palette and grey images may have the same shape and dtype, but differ in meaning.
            has_mode = kind.startswith("image") or field.is_text or kind in TEXT_KINDS
            other_mode = has_mode and kind != field.kind
            if dtype != field.sample_dtype or not field.admits(shape) or other_mode:
                raise SchemaError(
                    f"field {field.name!r}: found {dtype_name(dtype)} {shape} ({kind}), expected"
                    f" {replace(field, dtype=field.sample_dtype)} ({field.kind})"
                )
            try:
                arrays.append(narrowed(field, array))
            except ValueError as error:
                raise SchemaError(str(error)) from error
        return arrays

    def flatten_batch(self, batch: Any) -> list[Tensor]:
        """Check a batch of rows against this schema and return its leaves, one per field.

        Args:
            batch: A batch with the structure of this schema, whose fields must all be of the kind
                ``tensor``, as those of `from_batch` are.

        Returns:
            One tensor of shape (B, *field shape) per field, detached, on the device of the given
            one.

        Raises:
            SchemaError: The batch has another structure, a leaf another dtype or row shape, or
                leaves differ in their number of rows. The message names the field, what was found
                and what was expected.
        """
        leaves: list[Any] = []
        flatten(batch, self.structure, leaves, number_ndim=1)
        for field, leaf in zip(self.fields, leaves, strict=True):
            found = describe_rows(field.name, leaf)
            if found != field:
                raise SchemaError(
                    f"field {field.name!r}: found rows of {found}, expected rows of {field}"
                )
            if len(leaf) != len(leaves[0]):
                raise SchemaError(
                    f"field {field.name!r}: found {len(leaf)} rows, and {len(leaves[0])} of field"
                    f" {self.fields[0].name!r}"
                )
        return [leaf.detach().resolve_conj().resolve_neg() for leaf in leaves]

    def builder(self, sample: Any = None) -> Callable[[Sequence[Any]], Any]:
        """Make a function that nests one value per field as ``default_collate`` would.

        Tuples become lists; every other container keeps its kind. A list of numbers becomes a list
        of tensors.

        Args:
            sample: A sample of the dataset, from which the classes of named tuples and dataclasses
                are taken. Without it, classes with the same names and fields are made.

        Returns:
            A function that takes one tensor, or what stands in its place, per field, in the order
            of the fields, and returns the nested sample or batch.
        """
        return builder(self.structure, sample, count())

    def to_json(self) -> dict[str, Any]:
        """Convert this schema to JSON values.

        Returns:
            A dict with the keys ``fields`` and ``structure``, as `from_json` reads it.
        """
        return {
            "fields": [field.to_json() for field in self.fields],
            "structure": self.structure.to_json(),
        }

    @classmethod
    def from_json(cls, value: Any) -> "Schema":
        """Read a schema from JSON values that have not been checked.

        Args:
            value: A dict with the keys ``fields`` and ``structure``. Other keys are ignored.

        Returns:
            The schema.

        Raises:
            SchemaError: The values describe no schema that `from_sample` could have made.
        """
        items = entry(value, "fields", list)
        if not 1 <= len(items) <= _MAX_FIELDS:
            raise SchemaError(f"{len(items)} fields: a store has 1 to {_MAX_FIELDS}")
        structure = Node.from_json(entry(value, "structure", dict))
        leaves = structure.fields()
        schema = cls._checked(structure, [Field.from_json(item) for item in items])
        if [field.name for field in schema.fields] != [name for name, _ in leaves]:
            raise SchemaError("the fields are not the leaves of the structure")
        for field, (name, node) in zip(schema.fields, leaves, strict=True):
            is_numbers = len(field.shape) == 1 and not field.is_text
            if node.kind == "numbers":
                size = field.shape[0] if is_numbers else None
                is_numbers = size is not None and MIN_NUMBERS <= size <= MAX_NUMBERS
            elif node.kind == "sequence":
                is_numbers = is_numbers and field.num_variable == 1
            if node.kind != "leaf" and not is_numbers:
                raise SchemaError(f"field {name!r}: {field} is not a list of numbers")
        _check_batch_sizes(schema)
        return schema


def _check_batch_sizes(schema: Schema) -> None:
    """Check that the fields of each TensorDict share its batch size."""
    if any(node.kind in ("tensordict", "tensorclass") for _, node in schema.structure.walk()):
        try:
            schema.builder()(
                [
                    torch.empty([size or 0 for size in f.shape], dtype=f.dtype, device="meta")
                    for f in schema.fields
                ]
            )
        except (RuntimeError, ValueError) as error:
            raise SchemaError(f"the fields do not fit into a TensorDict: {error}") from error
