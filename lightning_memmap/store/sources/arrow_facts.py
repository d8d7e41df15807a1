"""Facts about Arrow columns that decide their fields: types, None, and lengths of lists."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from lightning_memmap.errors import SchemaError
from lightning_memmap.integers import Integers
from lightning_memmap.schema.fields import Field, field_name
from lightning_memmap.schema.forms import Declared
from lightning_memmap.schema.infer import MIN_NUMBERS, leaf_field, optional_node
from lightning_memmap.schema.structure import NONE, Node, Path, leaf_node
from lightning_memmap.store.sources.arrow_rows import (
    TEXT_KINDS,
    ArrowRows,
    decode,
    is_list,
    take_column_rows,
    zero_array,
)

#: Rows of a nested column that are examined at once.
_BLOCK_ROWS = 2**14


class ArrowFacts(NamedTuple):
    """The facts about some rows of an Arrow column that decide the fields of the column."""

    type: Any
    """The Arrow type, decoded."""
    has_values: bool
    has_nulls: bool
    lengths: tuple[int, int] | None = None
    """The lengths of the shortest and the longest list; None without lists."""
    children: tuple["ArrowFacts", ...] = ()
    """The facts about the fields of structs. For lists, the facts about the items at each index if
    the lists are short and have one length, or else about all items."""
    shape: tuple[int, ...] | None = None
    """The shape of each row, if the type fixes it."""

    def merge(self, other: "ArrowFacts") -> "ArrowFacts":
        """Return the facts about the rows of both, of one type."""
        lengths = [lengths for lengths in (self.lengths, other.lengths) if lengths is not None]
        children = self.children, other.children
        if is_list(self.type) and len(lengths) < 2:  # One of them has no lists.
            children = ((self if other.lengths is None else other).children,) * 2
        if len(children[0]) != len(children[1]):
            children = (merge_facts(children[0]),), (merge_facts(children[1]),)
        return self._replace(
            has_values=self.has_values or other.has_values,
            has_nulls=self.has_nulls or other.has_nulls,
            lengths=(min(low for low, _ in lengths), max(high for _, high in lengths))
            if lengths
            else None,
            children=tuple(one.merge(two) for one, two in zip(*children, strict=True)),
        )

    @property
    def is_struct(self) -> bool:
        """Whether values are structs."""
        return bool(pa.types.is_struct(self.type))

    @property
    def may_vary(self) -> bool:
        """Whether lists differ in length. True without lists, whose length is unknown."""
        return self.lengths is None or self.lengths[0] < self.lengths[1]

    def to_declared(self, path: Path, *, has_nan: bool) -> Declared:
        """Return which fields may be None or vary in length, for samples of other types.

        Args:
            path: The keys that lead to the column.
            has_nan: Whether samples have NaN instead of None.
        """
        parts = [*self._walk(path)]
        return Declared(
            {field_name(path): 1 for path, facts in parts if facts.lengths and facts.may_vary},
            frozenset(
                field_name(path)
                for path, facts in parts
                if facts.has_nulls and not (has_nan and pa.types.is_floating(facts.type))
            ),
        )

    def _walk(self, path: Path) -> Iterator[tuple[Path, "ArrowFacts"]]:
        """Yield the path and the facts of a column and of all fields of structs in it."""
        yield path, self
        struct = merge_facts(self.children) if is_list(self.type) else self
        if struct.is_struct:
            for field, child in zip(struct.type, struct.children, strict=True):
                yield from child._walk((*path, field.name))


@dataclass(frozen=True)
class ArrowInference:
    """Infers the structure that `Inference` finds in samples of all rows, from facts alone.

    Args:
        declared: The user's declaration of variable and nullable fields.
        are_python: Whether samples have Python's numbers and lists instead of arrays.
    """

    declared: Declared
    are_python: bool

    def infer(
        self, facts: ArrowFacts, path: Path, *, in_record: bool = False, is_record: bool = False
    ) -> Node:
        """Infer the structure of the values at one path; see `Inference.infer`.

        Raises:
            SchemaError: The rows cannot be stored, or only samples show how.
        """
        if facts.has_nulls and not facts.has_values:
            return NONE
        if facts.is_struct:
            names = tuple(field.name for field in facts.type)
            children = [
                self.infer(child, (*path, name), in_record=in_record)
                for name, child in zip(names, facts.children, strict=True)
            ]
            node = Node("dict", names, tuple(children))
        elif is_list(facts.type):
            node = self._infer_lists(facts, path, in_record)
        else:
            node = leaf_node(self._leaf_field(facts, path))
        is_nullable = not is_record and field_name(path) in self.declared.nullable
        return optional_node(node, path) if facts.has_nulls or is_nullable else node

    def _infer_lists(self, facts: ArrowFacts, path: Path, in_record: bool) -> Node:
        """Infer whether lists are numbers in one field, records, or containers."""
        items = merge_facts(facts.children)
        shortest, longest = facts.lengths or (0, 0)
        differ = facts.may_vary
        is_declared = field_name(path) in self.declared.variable
        field = self._item_field(items, path)
        is_one_field = differ or is_declared or in_record or shortest >= MIN_NUMBERS
        if field is not None and (is_one_field or not self.are_python):
            length = None if differ else shortest
            return leaf_node(replace(field, shape=facts.shape or (length, *field.shape)))
        if in_record and differ:
            raise SchemaError("lists of different lengths in the records of a list")
        if (differ or is_declared or not longest) and not in_record:
            record = self.infer(items, path, in_record=True, is_record=True)
            if not record.fields:
                raise SchemaError("the records of a list have no values")
            return Node("records", (), (record,))
        by_index = facts.children if len(facts.children) == longest else [items] * longest
        children = [
            self.infer(item, (*path, index), in_record=in_record)
            for index, item in enumerate(by_index)
        ]
        return Node("list", tuple(range(longest)), tuple(children))

    def _item_field(self, facts: ArrowFacts, path: Path) -> Field | None:
        """Return the field of an item of a list; None if a list isn't an array of numbers.

        Unless samples are Python's lists, inner lists of fixed length are dimensions of the array.
        """
        if self.are_python and (facts.has_nulls or is_list(facts.type)):
            return None
        if pa.types.is_fixed_size_list(facts.type):
            field = self._item_field(facts.children[0], path)
            size = facts.type.list_size
            return None if field is None else replace(field, shape=(size, *field.shape))
        is_number = pa.types.is_primitive(facts.type) and not pa.types.is_time(facts.type)
        return self._leaf_field(facts, path) if is_number else None

    def _leaf_field(self, facts: ArrowFacts, path: Path) -> Field:
        if facts.type not in TEXT_KINDS and not pa.types.is_primitive(facts.type):
            raise SchemaError(f"found {facts.type}")
        zero = zero_array(facts.type)
        sample = zero[0].as_py() if self.are_python else ArrowRows(zero).samples()[0]
        return leaf_field(field_name(path), sample)


def find_facts(column: Any, rows: Integers | None = None) -> ArrowFacts:
    """Find the facts about a chunked column, or about some of its rows."""
    num_rows = len(column) if rows is None else len(rows)
    arrow_type = column.type
    is_extension = isinstance(arrow_type, pa.BaseExtensionType)
    if pa.types.is_nested(arrow_type) or is_extension or _hides_nulls(column):
        starts = range(0, num_rows, _BLOCK_ROWS)
        spans = (range(start, min(start + _BLOCK_ROWS, num_rows)) for start in starts)
        blocks = (span if rows is None else rows[span.start : span.stop] for span in spans)
        facts = merge_facts(_array_facts(take_column_rows(column, block)) for block in blocks)
        is_fixed = isinstance(arrow_type, pa.FixedShapeTensorType)
        return facts._replace(shape=tuple(arrow_type.shape)) if is_fixed else facts
    if rows is None:
        num_nulls = column.null_count
    else:
        num_nulls = num_rows - int(column.is_valid().to_numpy()[rows].sum())
    value_type = arrow_type.value_type if pa.types.is_dictionary(arrow_type) else arrow_type
    return ArrowFacts(value_type, num_nulls < num_rows, num_nulls > 0)


def merge_facts(facts: Iterable[ArrowFacts]) -> ArrowFacts:
    """Merge the facts about groups of rows of one column, at least one."""
    return reduce(ArrowFacts.merge, facts)


def _hides_nulls(column: Any) -> bool:
    """Return whether the None of a column don't show before it is decoded."""
    if pa.types.is_dictionary(column.type):
        return any(chunk.dictionary.null_count for chunk in column.chunks)
    return bool(pa.types.is_run_end_encoded(column.type))


def _array_facts(column: Any) -> ArrowFacts:
    array = decode(column)
    num_nulls = array.null_count
    facts = ArrowFacts(array.type, num_nulls < len(array), num_nulls > 0)
    if facts.is_struct:
        structs = array.drop_null() if num_nulls else array
        indices = range(structs.type.num_fields)
        return facts._replace(children=tuple(_array_facts(structs.field(k)) for k in indices))
    if not is_list(array.type):
        return facts
    shortest, longest = (
        bound.as_py() for bound in pc.min_max(pc.list_value_length(array)).values()
    )
    items = array.flatten()
    parts = [items]
    if shortest == longest and len(items) > 0 and longest < MIN_NUMBERS:
        indices = np.arange(len(items)).reshape(-1, longest).T
        parts = [items.take(pa.array(rows)) for rows in indices]
    lengths = None if shortest is None else (shortest, longest)
    return facts._replace(lengths=lengths, children=tuple(map(_array_facts, parts)))
