"""Infers the structure that samples have in common, path by path."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from msgspec.structs import replace
from torch import Tensor

from lightning_memmap.errors import MismatchError, SchemaError
from lightning_memmap.schema.fields import Field, dtype_name, field_name, where
from lightning_memmap.schema.forms import Declared
from lightning_memmap.schema.kinds import is_missing, to_array
from lightning_memmap.schema.stack import array_dtype, numbers_array, numbers_dtype, rows_apart
from lightning_memmap.schema.structure import (
    CLASS_KINDS,
    MASK,
    MAX_DEPTH,
    NONE,
    Key,
    Node,
    Path,
    children_of,
    columns_of,
    leaf_node,
)

#: A list or tuple of at least this many numbers of one dtype is one field. In a shorter one, such
#: as ``(image, label)``, each is a field of its own.
MIN_NUMBERS = 16


@dataclass(frozen=True)
class Inference:
    """Looks at the values of all samples at one path, or at what a batch has there."""

    declared: Declared
    is_batch: bool = False

    def part(
        self, values: Sequence[Any], path: Path, *, in_record: bool = False, is_record: bool = False
    ) -> Node:
        """Infer the structure of the values at one path."""
        if len(path) > MAX_DEPTH:
            raise SchemaError(f"the sample is nested deeper than {MAX_DEPTH} levels")
        # A batch has no rows that are missing.
        given = [value for value in values if self.is_batch or not is_missing(value)]
        if not path and not is_record and len(given) < len(values):
            raise SchemaError("the sample is None: leave the row out of the dataset")
        if not given:
            return NONE
        is_nullable = bool(path) and not is_record and field_name(path) in self.declared.nullable
        found = self._given(given, path, in_record)
        if len(given) == len(values) and not is_nullable:
            return found
        return _optional(found, path)

    def _given(self, values: Sequence[Any], path: Path, in_record: bool) -> Node:
        found = [children_of(value, path) for value in values]
        containers = [each for each in found if each is not None]
        if not containers:
            describe = describe_rows if self.is_batch else describe_leaf
            fields = [describe(field_name(path), value) for value in values]
            return leaf_node(_merged(fields, path))
        if len(containers) < len(found):
            raise _differ(path)
        kind, keys, _ = containers[0]
        if not self.is_batch and {kind for kind, _, _ in containers} <= {"tuple", "list"}:
            return self._list(kind, values, path, in_record)
        return self._container(kind, keys, values, path, in_record)

    def _list(self, kind: Any, lists: Sequence[Sequence[Any]], path: Path, in_record: bool) -> Node:
        lengths = set(map(len, lists))
        differ, is_declared = len(lengths) > 1, field_name(path) in self.declared.variable
        if lengths == {0}:
            return Node(kind)
        if differ or is_declared or in_record or min(lengths) >= MIN_NUMBERS:
            # In a tuple of a record, numbers of several dtypes are a field each.
            must_agree = differ or is_declared or (in_record and kind == "list")
            field = self._numbers([each for each in lists if len(each)], path, must_agree)
            if field is not None:
                return leaf_node(replace(field, shape=(None,)) if differ else field)
            if differ and in_record:
                raise SchemaError(
                    f"{where(path)}: the records of a list have lists of different"
                    " lengths there, which cannot be stored: join them into one array or text each"
                )
            if (differ or is_declared) and not in_record:
                records = [*chain.from_iterable(lists)]
                try:
                    record = self.part(records, path, in_record=True, is_record=True)
                except MismatchError as error:
                    raise MismatchError(
                        f"{field_name(path)!r} is a list of parts that differ in more than their"
                        " values: give all of them the same fields"
                    ) from error
                if not record.fields:
                    raise SchemaError(
                        f"{where(path)}: the parts of a list have no values: give"
                        " their number, or leave it out"
                    )
                return Node("records", (), (record,))
        return self._container(kind, range(min(lengths)), lists, path, in_record)

    def _numbers(
        self, lists: Sequence[Sequence[Any]], path: Path, must_agree: bool
    ) -> Field | None:
        """Return the field of lists of numbers of one dtype; None if they hold anything else."""
        dtypes, name = set(map(numbers_dtype, lists)), field_name(path)
        if len(dtypes) == 1 and None not in dtypes:
            return describe_leaf(name, lists[0])
        numbers = {numbers_dtype([value]) for value in chain.from_iterable(lists)}
        if None in numbers or (None in dtypes and not must_agree):
            return None
        found = " and ".join(sorted(dtype_name(dtype) for dtype in numbers if dtype is not None))
        raise SchemaError(
            f"rows of {name!r} are lists of {found}: give all numbers one dtype, such as"
            " [1.0, 2.0], or arrays in place of the lists; in records, a tuple has a field for each"
        )

    def _container(
        self, kind: Any, keys: Sequence[Key], values: Sequence[Any], path: Path, in_record: bool
    ) -> Node:
        classes = {type(value).__name__ for value in values} if kind in CLASS_KINDS else {""}
        if len(classes) > 1:
            raise _differ(path)
        node = Node(kind, tuple(keys))
        children = [
            self.part(column, (*path, key), in_record=in_record)
            for key, column in zip(keys, columns_of(values, node, path), strict=True)
        ]
        feature_dims = 0
        if kind == "tensordict":
            fields = [field for child in children for field in child.fields]
            if not fields or any(field.is_text for field in fields):
                raise SchemaError(
                    f"{where(path)}: found an empty TensorDict, or one with more than tensors: give"
                    " what else it has beside it, in a dict or tuple"
                )
            feature_dims = len(fields[0].shape) + self.is_batch - values[0].batch_dims
        return Node(kind, tuple(keys), tuple(children), classes.pop(), feature_dims)


def _merged(fields: Sequence[Field], path: Path) -> Field:
    """Merge fields that differ in shape alone: sizes that differ become None."""
    if len({(field.dtype, len(field.shape), field.kind) for field in fields}) > 1:
        raise _differ(path)
    return merged_shapes(fields)


def merged_shapes(fields: Sequence[Field]) -> Field:
    """Return the first of several fields, which admits the rows of all that differ in shape alone.

    Sizes up to the last one that differs are None.
    """
    first = fields[0]
    alike = [
        field.shape
        for field in fields
        if (field.dtype, field.kind, len(field.shape))
        == (first.dtype, first.kind, len(first.shape))
    ]
    sizes = map(set, zip(*alike, strict=True))
    differing = [len(each) > 1 or None in each for each in sizes]
    count = len(differing) - differing[::-1].index(True) if any(differing) else 0
    return replace(first, shape=(None,) * count + first.shape[count:])


def _differ(path: Path) -> MismatchError:
    return MismatchError(f"{where(path)}: the samples differ there")


def _optional(node: Node, path: Path) -> Node:
    """Return the node of a part that is None in some rows."""
    if node.kind == "records" and node.children[0].kind == "optional":
        raise SchemaError(
            f"{where(path)}: some rows are None in place of a list, and some lists"
            " have None in them, and only one of these can be stored: give an empty list in place"
            " of the rows that are None, or leave None out of the lists"
        )
    return Node("optional", (), (node,), mask=field_name((*path, MASK)))


def describe_leaf(name: str, leaf: Any) -> Field:
    """Describe the field that a leaf of a sample, or a list of numbers, belongs to."""
    try:
        array, kind = to_array(numbers_array([leaf]) if isinstance(leaf, (list, tuple)) else leaf)
        return Field(name, array_dtype(array), kind.shape or tuple(array.shape), kind)
    except SchemaError as error:
        raise SchemaError(f"field {name!r}: {error}") from error


def describe_rows(name: str, leaf: Any) -> Field:
    """Describe the field whose rows a leaf of a batch holds."""
    rows = rows_apart(name, leaf)
    if rows is None:
        found = describe_leaf(name, leaf)
        return replace(found, shape=found.shape[1:])
    if rows and (first := describe_leaf(name, rows[0])).shape:
        # Rows that differ in more than their shapes are described when they are stacked.
        shapes = {tuple(row.shape): row for row in rows if isinstance(row, Tensor)}
        fields = [describe_leaf(name, row) for row in shapes.values()]
        found = merged_shapes([first, *fields])
        return replace(found, shape=(None, *found.shape[1:]))
    raise SchemaError(
        f"field {name!r}: found {'numbers' if rows else 'no rows'} in a list of rows: give one for"
        " each row of the batch, and of numbers a tensor"
    )
