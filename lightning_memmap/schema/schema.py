"""`Schema`: the structure of a sample and its fields."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from reprlib import repr as short_repr
from typing import Any

from torch import Tensor

from lightning_memmap.errors import SchemaError, nearest
from lightning_memmap.schema.fields import (
    Field,
    Values,
    check_file_names,
    field_name,
    readable_name,
)
from lightning_memmap.schema.forms import Declared
from lightning_memmap.schema.infer import Inference, merge_shapes, widen_fields
from lightning_memmap.schema.shared_memory import SharedMemoryCheck
from lightning_memmap.schema.stack import Batch, Samples, stack
from lightning_memmap.schema.structure import Node, make_builder

#: Each field is a mapped file, and a process can map about ten thousand files.
MAX_FIELDS = 4096
_NO_DECLARATION = Declared()


@dataclass(frozen=True)
class Schema:
    """The structure of a sample, whose leaves are its fields."""

    structure: Node

    def __post_init__(self) -> None:
        check_file_names(field.name for field in self.fields)

    def check_values(self) -> None:
        """Raise a SchemaError if the rows of a field can have a length but no values."""
        for field in self.fields:
            if field.num_variable and not field.item_bytes:
                raise SchemaError(
                    f"field {field.name!r}: its rows are {field}, so they have a length but no"
                    " values. Return the length as a number, or leave the field out"
                )

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """The stored fields, in the order of the leaves of a sample."""
        return self.structure.fields

    @classmethod
    def infer(cls, samples: Sequence[Any], declared: Declared = _NO_DECLARATION) -> "Schema":
        """Infer the schema that samples have in common; other samples may differ as declared."""
        structure = Inference(declared).infer(samples, ())
        if not structure.fields and not cls(structure).unknown.keys() - {"value"}:
            raise SchemaError(
                f"the sample {short_repr(samples[0])} holds no tensor, array or number"
            )
        return cls.of(structure, declared)

    @classmethod
    def of(cls, structure: Node, declared: Declared) -> "Schema":
        """Return the schema of a structure that was inferred from samples or from a table."""
        schema = cls(structure)._with_declared(declared)
        schema.check_values()
        return schema

    def _with_declared(self, declared: Declared) -> "Schema":
        """Return the schema with variable dimensions as declared.

        Raises:
            SchemaError: A declared name does not exist, or its field cannot vary as declared.
        """
        unknown = tuple(f"{name}." for name in self.unknown)
        names = {field.name for field in self.fields} | {*self.unknown, *self.lists, *self.optional}
        for name in declared.names:
            if name not in names and not name.startswith(unknown):
                argument = "nullable" if name in declared.nullable else "variable"
                raise SchemaError(f"{argument}: {self.missing_field_message(name)}")
        for field in self.fields:
            count = declared.variable.get(field.name, 0)
            if count and field.is_text and field.name not in self.lists:
                raise SchemaError(
                    f"variable: field {field.name!r} is {field.kind}, whose rows may always vary in"
                    " length: leave it out"
                )
            if count > len(field.shape):
                raise SchemaError(
                    f"variable: field {field.name!r} is {field}, which has fewer than {count}"
                    f" dimension{'s' * (count > 1)}"
                )
        return Schema(widen_fields(self.structure, declared.variable))

    def check_declared(self, declared: Declared) -> None:
        """Check that the declared parts of a store may vary or be None.

        Raises:
            ValueError: A name does not exist, or its rows may not vary or be None.
        """
        fields = {field.name: field for field in self.fields}
        again = "or build the store again with overwrite=True"
        for name in declared.nullable - self.optional.keys():
            self.check_name("nullable", name)
            raise ValueError(
                f"nullable: in the store, no row of field {name!r} may be None. Leave it out,"
                f" {again}"
            )
        for name in declared.variable.keys() - self.lists.keys():
            self.check_name("variable", name)
            if name in fields and not fields[name].num_variable:
                raise ValueError(
                    f"variable: in the store, all rows of field {name!r} have the shape"
                    f" {fields[name].shape}. Leave it out, {again}"
                )

    def check_name(self, argument: str, name: str) -> None:
        """Raise a ValueError unless a field, a list or an optional part of a store has the name.

        ``argument`` is the user's argument that the message names.
        """
        names = {field.name for field in self.fields} | {*self.lists, *self.optional}
        if name not in names:
            raise ValueError(
                f"{argument}: in the store, {self.missing_field_message(name)}. If the dataset"
                " has it now, build the store again with overwrite=True"
            )

    def windowed(self, names: Collection[str], length: int) -> "Schema":
        """Return the schema of rows whose ``names`` fields are cut into windows of ``length``."""
        return Schema(
            self.structure.map_fields(lambda f: f.windowed(length) if f.name in names else f)
        )

    @property
    def unknown(self) -> dict[str, str]:
        """The parts that are None or empty in all samples, so that their fields are unknown.

        Maps their names to ``"None"``, ``"an empty list"`` or ``"an empty tuple"``.
        """
        nodes = self.structure.walk()
        return {
            field_name(path): "None" if node.kind == "none" else f"an empty {node.kind}"
            for path, node in nodes
            if node.kind == "none" or (node.is_list and not node.keys)
        }

    @property
    def lists(self) -> dict[str, tuple[str, ...]]:
        """The fields of each list of records, by the name of the list."""
        return {
            field_name(path): tuple(field.name for field in node.fields)
            for path, node in self.structure.walk()
            if node.kind == "records"
        }

    @property
    def optional(self) -> dict[str, str]:
        """The mask of each field or container that may be None, by the name of the latter."""
        return {field_name(path): node.mask for path, node in self.structure.walk() if node.mask}

    @property
    def declared(self) -> Declared:
        """The declaration that a build needs to admit all samples of this schema."""
        lists = self.lists
        in_lists = {name for names in lists.values() for name in names}
        variable = dict.fromkeys(lists, 1)
        for field in self.fields:
            if field.num_variable > (field.name in in_lists) and not field.is_text:
                variable[field.name] = field.num_variable
        return Declared(variable, frozenset(self.optional))

    def missing_field_message(self, name: str) -> str:
        """Return a message that no field has this stored name. It suggests the nearest name."""
        stored = [field.name for field in self.fields]
        inner = [readable_name(field) for field in stored if field.startswith(f"{name}.")]
        names = [*map(readable_name, stored)]
        name = readable_name(name)
        if inner:
            return f"{name!r} is a container, not a field: name its fields {inner} instead"
        near = nearest(name, names)
        return f"there is no field {name!r}, among {names}{near or ': leave it out'}"

    def admitting(self, others: Sequence["Schema"]) -> "Schema":
        """Return this schema with shapes that also admit the rows of other schemas."""
        by_name = [{field.name: field for field in schema.fields} for schema in others]

        def widen(field: Field) -> Field:
            same_name = (fields[field.name] for fields in by_name if field.name in fields)
            return merge_shapes([field, *same_name])

        return Schema(self.structure.map_fields(widen))

    @classmethod
    def from_batch(cls, batch: Any, declared: Declared = _NO_DECLARATION) -> "Schema":
        """Infer the schema of the rows of a batch; other batches may differ as declared."""
        schema = cls(Inference(_NO_DECLARATION, is_batch=True).infer([batch], ()))
        if not schema.fields:
            raise SchemaError(f"{batch!r} holds no tensor")
        return schema._with_declared(declared)

    @property
    def has_classes(self) -> bool:
        """Whether a named tuple, dataclass or tensorclass is part of a sample."""
        return any(node.name for _, node in self.structure.walk())

    def stack(
        self, samples: Sequence[Any], sharing: SharedMemoryCheck | None = None
    ) -> list[Values]:
        """Check samples, and stack their leaves into one `Values` per field.

        ``sharing`` records whether the samples share memory.
        """
        return stack(Samples(samples, sharing), self.structure)

    def flatten(self, sample: Any) -> list[Tensor]:
        """Convert a sample to one tensor per field, as they are stored."""
        return [next(values.rows()) for values in self.stack([sample])]

    def stack_batch(self, batch: Any) -> list[Values]:
        """Check a batch, and copy its rows to the CPU as one `Values` per field."""
        stacked = stack(Batch(batch), self.structure)
        num_rows = stacked[0].num_rows
        for field, values in zip(self.fields, stacked, strict=True):
            if values.num_rows != num_rows:
                raise SchemaError(
                    f"field {field.name!r} has {values.num_rows} rows, but field"
                    f" {self.fields[0].name!r} has {num_rows}. Each item of a plain list is a"
                    " separate field; return rows that vary in length as a"
                    " lightning_memmap.loading.RowList"
                )
        return stacked

    def make_builder(
        self, sample: Any = None, *, is_row: bool = False
    ) -> Callable[[Sequence[Any]], Any]:
        """Return a function that nests one value per field into a batch or a row.

        Args:
            sample: A sample whose named tuples and dataclasses are used. By default, classes with
                the stored names are created.
            is_row: Whether to nest one row like a sample of the dataset, instead of a batch like
                ``default_collate``.
        """
        index = {field.name: number for number, field in enumerate(self.fields)}
        return make_builder(self.structure, sample, index, is_row=is_row)
