"""The schema of a store: its fields, and the nesting of a sample around them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from reprlib import repr as short_repr
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.errors import SchemaError
from lightning_memmap.schema.building import builder
from lightning_memmap.schema.fields import PLAIN_KINDS, Field, dtype_name
from lightning_memmap.schema.forms import Form
from lightning_memmap.schema.leaves import (
    RowList,
    describe_leaf,
    describe_rows,
    leaf_array,
    native_tensor,
    rows_apart,
)
from lightning_memmap.schema.merging import Part, declared, field_paths, merge
from lightning_memmap.schema.names import check_names, field_name
from lightning_memmap.schema.nesting import BATCH, Nesting
from lightning_memmap.schema.structure import Node, Path, describe, flatten


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
    def from_sample(cls, sample: Any, variable: Mapping[str, Form] | None = None) -> "Schema":
        """Describe the samples of a dataset by one of them.

        Args:
            sample: Any nesting of the containers above around tensors, numpy arrays and scalars,
                PIL images, numbers, bools, text, bytes, times and members of enums.
            variable: By name, the form of each field and list that may differ in length, or be
                None, in other samples.

        Returns:
            The schema that all other samples must fit.

        Raises:
            SchemaError: A leaf has a type or dtype that cannot be stored, the sample has no leaf or
                is nested too deeply, the name of a field cannot be the name of a file, or a field
                has fewer dimensions than may differ, or is not there, unless it may be one of the
                records of a list; see `declaring`. The message names the field.
        """
        leaves: list[tuple[str, Any]] = []
        variable = variable or {}
        structure = describe(sample, leaves, number_ndim=0, variable=variable)
        if not leaves and not cls((), structure).unknown.keys() - {"value"}:
            raise SchemaError(f"the sample {short_repr(sample)} holds no tensor, array or number")
        found = cls(tuple(describe_leaf(*leaf) for leaf in leaves), structure)
        lists = [field_name(path) for path, node in structure.walk() if node.is_list and path]
        return found.declaring(variable, lists)

    def declaring(self, variable: Mapping[str, Form], lists: Sequence[str] = ()) -> "Schema":
        """The schema of samples that may differ from those of this one as forms say.

        Args:
            variable: As of `from_sample`.
            lists: Lists of which other samples may show that they consist of records, and what
                these have: forms of their parts may wait for that.

        Raises:
            SchemaError: As of `from_sample`, or there is no such field in the records of a list.
        """
        optional = [name for name, form in variable.items() if form.nullable]
        found = self._of(declared(self._part, variable, optional))
        waiting = tuple(f"{name}." for name in (*lists, *found.unknown))
        for name in variable:
            if not found._has(name) and not name.startswith(waiting):
                raise SchemaError(f"variable: {found.why_no_field(name)}")
        fields = []
        for field in found.fields:
            form = variable.get(field.name)
            count = form.dims if form is not None else 0
            if count and field.is_text and field.name not in found.lists:
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
            fields.append(replace(field, shape=(None,) * count + field.shape[count:]))
        return self._checked(found.structure, fields)

    def _has(self, name: str) -> bool:
        """Whether a field or another part of samples that may differ has a name."""
        names = {field.name for field in self.fields}
        return name in {*names, *self.unknown, *self.lists, *self.optional}

    def merged(self, other: "Schema") -> "Schema | None":
        """The schema that has the samples of two.

        Args:
            other: The schema of other samples of the same dataset.

        Returns:
            The schema, in which leading dimensions of fields that differ are None, lists of numbers
            that differ in length are fields, other lists that do are lists of records, and what is
            None in one of the two is optional; or None if the two differ in more than that.

        Raises:
            SchemaError: They differ in the dtypes of a list of numbers. The message names it.
        """
        found = merge(self._part, other._part)
        return None if found is None else self._of(found)

    @property
    def unknown(self) -> dict[str, str]:
        """What samples have of which the fields are for other samples to show: lists without a
        value, and None. By name, what it is."""
        nodes = self.structure.walk()
        return {
            field_name(path): "None" if node.kind == "none" else "an empty list"
            for path, node in nodes
            if node.kind == "none" or (node.is_list and not node.keys)
        }

    def _is_unknown(self, name: str) -> bool:
        return any(f"{name}.".startswith(f"{unknown}.") for unknown in self.unknown)

    @property
    def lists(self) -> dict[str, tuple[str, ...]]:
        """The lists of records, by name, each with the names of its fields."""
        return {
            field_name(path): tuple(map(field_name, field_paths(node, path)))
            for path, node in self.structure.walk()
            if node.kind == "records"
        }

    @property
    def mixed_numbers(self) -> dict[str, tuple[str, ...]]:
        """Lists of numbers in records that differ in dtype, by name, with the fields of these."""
        fields = {field.name: field for field in self.fields}
        found = dict[str, tuple[str, ...]]()
        for path, node in self.structure.walk():
            for inner, part in node.children[0].walk(path) if node.kind == "records" else ():
                names = [field_name(each) for each in part.paths(inner)]
                if (
                    part.kind == "list"
                    and part.keys
                    and all(
                        child.kind == "leaf" and fields[name].kind == "number"
                        for name, child in zip(names, part.children, strict=True)
                    )
                ):
                    found[field_name(inner)] = tuple(names)
        return found

    @property
    def optional(self) -> dict[str, tuple[str, ...]]:
        """What may be None, by name, with the names of its fields and last of the one that says
        where it is not."""
        return {
            field_name(path): tuple(map(field_name, field_paths(node, path)))
            for path, node in self.structure.walk()
            if node.kind == "optional"
        }

    @property
    def same_lengths(self) -> dict[str, str]:
        """By the name of a field, another one of the same list whose rows have as many items."""
        found, fields = dict[str, str](), {field.name: field for field in self.fields}
        for names in self.lists.values():
            alike = [n for n in names if fields[n].num_variable == 1 and not fields[n].is_text]
            found |= dict.fromkeys(alike[1:], alike[0]) if alike else {}
        return found

    def arguments(self) -> dict[str, Any]:
        """The argument ``variable`` that admits all samples of this schema.

        Returns:
            By name, the name of a form, or a dict with it and its arguments.
        """
        lists, found = self.lists, dict[str, dict[str, Any]]()
        in_lists = {name for names in lists.values() for name in names}
        for name in lists:
            found[name] = {"form": "list"}
        for field in self.fields:
            count = field.num_variable
            if count > (field.name in in_lists) and not field.is_text:
                form = "list" if field.name in in_lists else "pad"
                found[field.name] = {"form": form} if count == 1 else {"form": form, "dims": count}
        for name in self.optional:
            found[name] = (
                {**found[name], "nullable": True} if name in found else {"form": "nullable"}
            )
        return {name: each if len(each) > 1 else each["form"] for name, each in found.items()}

    def why_no_field(self, name: str) -> str:
        """Say why no field has a name.

        Returns:
            Words for a message, with the names that there are. A list of a few numbers counts as
            one, as it is where rows differ in length.
        """
        names, lists, fields = list[str](), set[Path](), self._part.fields
        for path, node in self.structure.walk():
            within = [fields.get((*path, key)) for key in node.keys]
            if node.is_list and path and field_name(path) == name and len(node.keys) > 1:
                differ = {field.kind for field in within if field} - set(PLAIN_KINDS)
                if differ or None in within:
                    return (
                        f"{name!r} is a list of parts that differ in more than their values: give"
                        " all of them the same fields"
                    )
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

    @property
    def _part(self) -> Part:
        paths = field_paths(self.structure)
        return Part(self.structure, dict(zip(paths, self.fields, strict=True)))

    @classmethod
    def _of(cls, part: Part) -> "Schema":
        return cls(tuple(part.fields[path] for path in field_paths(part.node)), part.node)

    @classmethod
    def from_batch(cls, batch: Any) -> "Schema":
        """Describe the rows of a batch.

        Args:
            batch: Any nesting of tensors whose first dimension is the rows, of nested tensors, and
                of `RowList`.

        Returns:
            The schema of one row.

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
            if name not in names and not self._is_unknown(name):
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
        return [leaf_array(*pair) for pair in zip(self.fields, leaves, strict=True)]

    def flatten_batch(self, batch: Any) -> list[Tensor | RowList]:
        """Check a batch of rows against this schema and return its leaves, one per field.

        Args:
            batch: A batch with the structure of this schema, which is one of `from_batch`.

        Returns:
            One tensor of shape (B, *field shape) per field, detached, on the device of the given
            one; for rows that differ in length, a dense tensor of each on the CPU.

        Raises:
            SchemaError: The batch has another structure, a leaf another dtype or row shape, or
                leaves differ in their number of rows. The message names the field, what was found
                and what was expected.
        """
        leaves: list[Any] = []
        flatten(batch, self.structure, leaves, number_ndim=1)
        found_leaves = list[Tensor | RowList]()
        for field, leaf in zip(self.fields, leaves, strict=True):
            found = describe_rows(field.name, leaf)
            if found != field:
                raise SchemaError(
                    f"field {field.name!r}: found rows of {found}, expected rows of {field}"
                )
            if len(leaf) != len(leaves[0]):
                raise SchemaError(
                    f"field {field.name!r}: found {len(leaf)} rows, and {len(leaves[0])} of field"
                    f" {self.fields[0].name!r}; a list is a field for each of its items: give rows"
                    " that differ in length as a lightning_memmap.loading.RowList"
                )
            if (rows := rows_apart(leaf)) is None:
                found_leaves.append(leaf.detach().resolve_conj().resolve_neg())
            else:
                arrays = (leaf_array(field, row) for row in rows)
                found_leaves.append(RowList(map(native_tensor, arrays)))
        return found_leaves

    def builder(
        self, sample: Any = None, nesting: Nesting = BATCH
    ) -> Callable[[Sequence[Any]], Any]:
        """Make a function that nests one value per field as ``default_collate`` would.

        Tuples become lists; every other container keeps its kind. A list of numbers becomes a list
        of tensors.

        Args:
            sample: A sample of the dataset, from which the classes of named tuples and dataclasses
                are taken. Without it, classes with the same names and fields are made.
            nesting: How lists of records, and what may be None, are put together.

        Returns:
            A function that takes one tensor, or what stands in its place, per field, in the order
            of the fields, and returns the nested sample or batch.
        """
        return builder(self.structure, sample, count(), nesting)

    def to_json(self) -> dict[str, Any]:
        """Convert this schema to JSON values.

        Returns:
            A dict with the keys ``fields`` and ``structure``, as `read_schema` reads it.
        """
        return {
            "fields": [field.to_json() for field in self.fields],
            "structure": self.structure.to_json(),
        }
