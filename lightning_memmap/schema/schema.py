"""The schema of a store: its fields, and the nesting of a sample around them."""

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
from lightning_memmap.schema.held import CheckedSamples, SharedMemoryCheck
from lightning_memmap.schema.infer import Inference, merge_shapes
from lightning_memmap.schema.stack import Batch, Samples, stack
from lightning_memmap.schema.structure import Node, builder

#: Each field is a file and a mapping, of which a process has at most some ten thousand.
MAX_FIELDS = 4096
_NOTHING = Declared()


@dataclass(frozen=True)
class Schema:
    """The structure of a sample, whose leaves are its fields."""

    structure: Node

    def __post_init__(self) -> None:
        check_file_names(field.name for field in self.fields)
        for field in self.fields:
            if field.num_variable and not field.item_bytes:
                raise SchemaError(
                    f"field {field.name!r}: its rows are {field}, which have a length and no"
                    " values: give the length as a number, or leave the field out"
                )

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """The fields that are stored, in the order of the leaves of a sample."""
        return self.structure.fields

    @classmethod
    def infer(cls, samples: Sequence[Any], declared: Declared = _NOTHING) -> "Schema":
        """Find the schema that samples have in common."""
        found = cls(Inference(declared).infer(samples, ()))
        if not found.fields and not found.unknown.keys() - {"value"}:
            raise SchemaError(
                f"the sample {short_repr(samples[0])} holds no tensor, array or number"
            )
        return found._declaring(declared)

    def _declaring(self, declared: Declared) -> "Schema":
        """Return the schema of samples that may differ from those of this one as declared."""
        unknown = tuple(f"{name}." for name in self.unknown)
        names = {field.name for field in self.fields} | {*self.unknown, *self.lists, *self.optional}
        for name in declared.names:
            if name not in names and not name.startswith(unknown):
                argument = "nullable" if name in declared.nullable else "variable"
                raise SchemaError(f"{argument}: {self.why_no_field(name)}")
        counts = dict[str, int]()
        for field in self.fields:
            count = declared.variable.get(field.name, 0)
            if count and field.is_text and field.name not in self.lists:
                raise SchemaError(
                    f"variable: field {field.name!r} is {field.kind}, whose rows may always differ"
                    " in length, and which is a list in a batch: leave it out"
                )
            if count > len(field.shape):
                raise SchemaError(
                    f"variable: field {field.name!r} is {field}, which has fewer than {count}"
                    f" dimension{'s' * (count > 1)}"
                )
            counts[field.name] = max(count, field.num_variable)
        return Schema(self.structure.map_fields(lambda f: f.with_variable_dims(counts[f.name])))

    def check_declared(self, declared: Declared) -> None:
        """Check that the rows of a store may differ as declared.

        Raises:
            ValueError: They may not.
        """
        fields = {field.name: field for field in self.fields}
        again = "or build the store again with overwrite=True"
        for name in declared.nullable - self.optional.keys():
            self.check_name("nullable", name)
            raise ValueError(
                f"nullable: in the store, no row of field {name!r} may be None: leave it out,"
                f" {again}"
            )
        for name in declared.variable.keys() - self.lists.keys():
            self.check_name("variable", name)
            if name in fields and not fields[name].num_variable:
                raise ValueError(
                    f"variable: in the store, all rows of field {name!r} have the shape"
                    f" {fields[name].shape}: leave it out, {again}"
                )

    def check_name(self, argument: str, name: str) -> None:
        """Check that a field, a list or an optional part of a store has the name."""
        names = {field.name for field in self.fields} | {*self.lists, *self.optional}
        if name not in names:
            raise ValueError(
                f"{argument}: in the store, {self.why_no_field(name)}. If the dataset has it now,"
                " build the store again with overwrite=True"
            )

    def windowed(self, names: Collection[str], length: int) -> "Schema":
        """Return the schema of windows over rows, where some fields are cut into windows."""
        return Schema(
            self.structure.map_fields(lambda f: f.windowed(length) if f.name in names else f)
        )

    @property
    def unknown(self) -> dict[str, str]:
        """By name, the empty lists and tuples, and None, whose fields other samples must show."""
        nodes = self.structure.walk()
        return {
            field_name(path): "None" if node.kind == "none" else f"an empty {node.kind}"
            for path, node in nodes
            if node.kind == "none" or (node.is_list and not node.keys)
        }

    @property
    def lists(self) -> dict[str, tuple[str, ...]]:
        """The names of the fields of each list of records, by the name of the list."""
        return {
            field_name(path): tuple(field.name for field in node.fields)
            for path, node in self.structure.walk()
            if node.kind == "records"
        }

    @property
    def optional(self) -> dict[str, str]:
        """The name of the mask of each field or container that may be None, by its name."""
        return {field_name(path): node.mask for path, node in self.structure.walk() if node.mask}

    @property
    def declared(self) -> Declared:
        """What must be declared to admit all samples of this schema."""
        lists = self.lists
        in_lists = {name for names in lists.values() for name in names}
        variable = dict.fromkeys(lists, 1)
        for field in self.fields:
            if field.num_variable > (field.name in in_lists) and not field.is_text:
                variable[field.name] = field.num_variable
        return Declared(variable, frozenset(self.optional))

    def why_no_field(self, name: str) -> str:
        """Explain that no field has a name, and suggest the nearest one."""
        stored = [field.name for field in self.fields]
        inner = [readable_name(other) for other in stored if other.startswith(f"{name}.")]
        names, name = [*map(readable_name, stored)], readable_name(name)
        if inner:
            return f"{name!r} is not a field, but has the fields {inner}: name those"
        near = nearest(name, names)
        return f"there is no field {name!r}, among {names}{near or ': leave it out'}"

    def admitting(self, others: Sequence["Schema"]) -> "Schema":
        """Return a schema that also admits the rows of others which differ in shapes alone."""
        by_name = [{field.name: field for field in other.fields} for other in others]

        def merged(field: Field) -> Field:
            named = (fields[field.name] for fields in by_name if field.name in fields)
            return merge_shapes([field, *named])

        return Schema(self.structure.map_fields(merged))

    @classmethod
    def from_batch(cls, batch: Any, declared: Declared = _NOTHING) -> "Schema":
        """Describe the rows of a batch; other batches may differ from it as declared."""
        found = cls(Inference(_NOTHING, is_batch=True).infer([batch], ()))
        if not found.fields:
            raise SchemaError(f"{batch!r} holds no tensor")
        return found._declaring(declared)

    @property
    def has_classes(self) -> bool:
        """Whether a named tuple, dataclass or tensorclass is part of a sample."""
        return any(node.name for _, node in self.structure.walk())

    def stack(
        self, samples: Sequence[Any], sharing: SharedMemoryCheck | None = None
    ) -> list[Values]:
        """Check samples, and stack their leaves. Note whether they have memory in common."""
        held = Samples(samples) if sharing is None else CheckedSamples(samples, sharing)
        return stack(held, self.structure)

    def flatten(self, sample: Any) -> list[Tensor]:
        """Convert a sample to the tensors that are stored, in the order of the fields."""
        return [next(values.rows()) for values in self.stack([sample])]

    def stack_batch(self, batch: Any) -> list[Values]:
        """Check the rows of a batch, and copy them to the CPU."""
        found = stack(Batch(batch), self.structure)
        for field, values in zip(self.fields, found, strict=True):
            if values.num_rows != found[0].num_rows:
                raise SchemaError(
                    f"field {field.name!r}: found {values.num_rows} rows, and {found[0].num_rows}"
                    f" of field {self.fields[0].name!r}; a list is a field for each of its items:"
                    " give rows that differ in length as a lightning_memmap.loading.RowList"
                )
        return found

    def builder(
        self, sample: Any = None, *, is_row: bool = False
    ) -> Callable[[Sequence[Any]], Any]:
        """Make a function that nests one value per field, as ``default_collate`` would or as the
        dataset gives a row."""
        index = {field.name: number for number, field in enumerate(self.fields)}
        return builder(self.structure, sample, index, is_row=is_row)
