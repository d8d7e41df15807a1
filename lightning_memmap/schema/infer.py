"""`Inference`: find the structure that samples have in common."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from msgspec.structs import replace
from torch import Tensor

from lightning_memmap.errors import MismatchError, SchemaError
from lightning_memmap.schema.fields import Field, describe_path, dtype_name, field_name
from lightning_memmap.schema.forms import Declared
from lightning_memmap.schema.kinds import is_null, to_array
from lightning_memmap.schema.stack import (
    array_dtype,
    common_dtype,
    concatenate_numbers,
    find_unstacked_rows,
)
from lightning_memmap.schema.structure import (
    CLASS_KINDS,
    MASK,
    MAX_DEPTH,
    NONE,
    Node,
    Path,
    as_container,
    leaf_node,
    split_columns,
)

#: A list or tuple of at least this many numbers of one dtype is one field. In a shorter one, such
#: as ``(width, height)``, each number is a separate field.
MIN_NUMBERS = 16


@dataclass(frozen=True)
class Inference:
    """Infers the structure of samples, or of the rows of one batch, recursively.

    Args:
        declared: The parts that may vary or be None in samples that are not among these.
        is_batch: Whether the values are one batch instead of samples.
    """

    declared: Declared
    is_batch: bool = False

    def infer(
        self, values: Sequence[Any], path: Path, *, in_record: bool = False, is_record: bool = False
    ) -> Node:
        """Infer the structure of the values at one path.

        Args:
            values: The values of all samples or records at the path.
            path: The keys that lead to the values.
            in_record: Whether the values are in records of a list.
            is_record: Whether the values are the records of a list themselves.
        """
        if len(path) > MAX_DEPTH:
            raise SchemaError(f"the sample is nested deeper than {MAX_DEPTH} levels")
        # A batch cannot have missing rows.
        present = [value for value in values if self.is_batch or not is_null(value)]
        if not path and not is_record and len(present) < len(values):
            raise SchemaError("the sample is None: leave the row out of the dataset")
        if not present:
            return NONE
        is_nullable = bool(path) and not is_record and field_name(path) in self.declared.nullable
        node = self._infer_present(present, path, in_record)
        if len(present) == len(values) and not is_nullable:
            return node
        return optional_node(node, path)

    def _infer_present(self, values: Sequence[Any], path: Path, in_record: bool) -> Node:
        candidates = [as_container(value, path) for value in values]
        containers = [container for container in candidates if container is not None]
        if not containers:
            infer_field = batch_leaf_field if self.is_batch else leaf_field
            fields = [infer_field(field_name(path), value) for value in values]
            return leaf_node(_merge_fields(fields, path))
        if len(containers) < len(candidates):
            raise _make_mismatch_error(path)
        node_kind, keys, _ = containers[0]
        if not self.is_batch and {kind for kind, _, _ in containers} <= {"tuple", "list"}:
            return self._infer_lists(node_kind, values, path, in_record)
        return self._infer_container(Node(node_kind, tuple(keys)), values, path, in_record)

    def _infer_lists(
        self, node_kind: Any, lists: Sequence[Sequence[Any]], path: Path, in_record: bool
    ) -> Node:
        """Infer whether lists are numbers in one field, lists of records, or containers."""
        lengths = set(map(len, lists))
        differ = len(lengths) > 1
        is_declared = field_name(path) in self.declared.variable
        if lengths == {0}:
            return Node(node_kind)
        if differ or is_declared or in_record or min(lengths) >= MIN_NUMBERS:
            # In a tuple of a record, numbers of several dtypes are separate fields.
            is_one_field = differ or is_declared or (in_record and node_kind == "list")
            not_empty = [numbers for numbers in lists if len(numbers)]
            field = self._infer_number_field(not_empty, path, may_mix_dtypes=not is_one_field)
            if field is not None:
                return leaf_node(replace(field, shape=(None,)) if differ else field)
            if differ and in_record:
                raise SchemaError(
                    f"{describe_path(path)}: lists of different lengths in the records of a list"
                    " cannot be stored. Join each of them into one array or one text"
                )
            if (differ or is_declared) and not in_record:
                records = [*chain.from_iterable(lists)]
                try:
                    record = self.infer(records, path, in_record=True, is_record=True)
                except MismatchError as error:
                    raise MismatchError(
                        f"{field_name(path)!r}: the records of a list differ in structure or"
                        " dtype. Return the same fields in all records"
                    ) from error
                if not record.fields:
                    raise SchemaError(
                        f"{describe_path(path)}: the records of a list have no values. Return the"
                        " length of the list instead, or leave it out"
                    )
                return Node("records", (), (record,))
        node = Node(node_kind, tuple(range(min(lengths))))
        return self._infer_container(node, lists, path, in_record)

    def _infer_number_field(
        self, lists: Sequence[Sequence[Any]], path: Path, *, may_mix_dtypes: bool
    ) -> Field | None:
        """Return the field of lists of numbers of one dtype.

        Args:
            lists: The lists, none of them empty.
            path: The keys that lead to the lists.
            may_mix_dtypes: Whether the numbers of a list may also be separate fields.

        Returns:
            None if the lists hold anything else than numbers, or mix dtypes and may do so.

        Raises:
            SchemaError: A list mixes dtypes, and may not; or each list has one, but they differ.
        """
        name = field_name(path)
        dtypes = set(map(common_dtype, lists))
        if len(dtypes) == 1 and None not in dtypes:
            return leaf_field(name, lists[0])
        numbers = {common_dtype([value]) for value in chain.from_iterable(lists)}
        if None in numbers or (None in dtypes and may_mix_dtypes):
            return None
        names = " and ".join(sorted(dtype_name(dtype) for dtype in numbers if dtype is not None))
        raise SchemaError(
            f"rows of {name!r} are lists of {names}. Use one dtype for all numbers, such as"
            " [1.0, 2.0], or return arrays instead of lists. In records, the numbers of a tuple are"
            " separate fields"
        )

    def _infer_container(
        self, node: Node, values: Sequence[Any], path: Path, in_record: bool
    ) -> Node:
        """Infer the children of a container, and what else its node records."""
        is_class = node.kind in CLASS_KINDS
        names = {type(value).__name__ for value in values} if is_class else {""}
        if len(names) > 1:
            raise _make_mismatch_error(path)
        children = [
            self.infer(column, (*path, key), in_record=in_record)
            for key, column in zip(node.keys, split_columns(values, node, path), strict=True)
        ]
        feature_dims = 0
        if node.kind == "tensordict":
            fields = [field for child in children for field in child.fields]
            if not fields or any(field.is_text for field in fields):
                raise SchemaError(
                    f"{describe_path(path)}: a TensorDict must have tensors and nothing else."
                    " Return its other values next to it, in a dict or tuple"
                )
            feature_dims = len(fields[0].shape) + self.is_batch - values[0].batch_dims
        return Node(node.kind, node.keys, tuple(children), names.pop(), feature_dims)


def _merge_fields(fields: Sequence[Field], path: Path) -> Field:
    """Return the field of several leaves at one path, which may differ in shape only."""
    if len({(field.dtype, len(field.shape), field.kind) for field in fields}) > 1:
        raise _make_mismatch_error(path)
    return merge_shapes(fields)


def merge_shapes(fields: Sequence[Field]) -> Field:
    """Return the first field with a shape that also admits the rows of the others.

    Dimensions up to the last one that varies become None. Fields of another dtype, kind or number
    of dimensions are ignored.
    """
    first = fields[0]
    shapes = [
        field.shape
        for field in fields
        if (field.dtype, field.kind, len(field.shape))
        == (first.dtype, first.kind, len(first.shape))
    ]
    is_variable = [len(sizes) > 1 or None in sizes for sizes in map(set, zip(*shapes, strict=True))]
    count = len(is_variable) - is_variable[::-1].index(True) if any(is_variable) else 0
    return replace(first, shape=(None,) * count + first.shape[count:])


def widen_fields(node: Node, variable: Mapping[str, int]) -> Node:
    """Return a structure in which a number of leading dimensions of some fields may vary, by name,
    unless they have fewer dimensions or more of them vary already."""

    def widen(field: Field) -> Field:
        count = min(variable.get(field.name, 0), len(field.shape))
        return field.with_variable_dims(max(count, field.num_variable))

    return node.map_fields(widen)


def _make_mismatch_error(path: Path) -> MismatchError:
    return MismatchError(f"{describe_path(path)}: the samples differ in structure or dtype")


def optional_node(node: Node, path: Path) -> Node:
    """Return the node of a part that is None in some rows."""
    if node.kind == "records" and node.children[0].kind == "optional":
        raise SchemaError(
            f"{describe_path(path)}: either the list or its records may be None, not both. Return"
            " an empty list instead of None, or leave None out of the lists"
        )
    return Node("optional", (), (node,), mask=field_name((*path, MASK)))


def leaf_field(name: str, leaf: Any) -> Field:
    """Return the field of a leaf of a sample, which may be a list of numbers."""
    try:
        array, kind = to_array(
            concatenate_numbers([leaf]) if isinstance(leaf, (list, tuple)) else leaf
        )
        return Field(name, array_dtype(array), kind.shape or tuple(array.shape), kind)
    except SchemaError as error:
        raise SchemaError(f"field {name!r}: {error}") from error


def batch_leaf_field(name: str, leaf: Any) -> Field:
    """Return the field of the rows that a leaf of a batch holds."""
    rows = find_unstacked_rows(name, leaf)
    if rows is None:
        stacked = leaf_field(name, leaf)
        return replace(stacked, shape=stacked.shape[1:])
    if rows and (first := leaf_field(name, rows[0])).shape:
        # Rows of another dtype or kind raise an error when they are stacked.
        shapes = {tuple(row.shape): row for row in rows if isinstance(row, Tensor)}
        fields = [leaf_field(name, row) for row in shapes.values()]
        field = merge_shapes([first, *fields])
        return replace(field, shape=(None, *field.shape[1:]))
    raise SchemaError(
        f"field {name!r}: found {'numbers' if rows else 'no rows'} in a RowList. It must have one"
        " entry for each row of the batch. Pass numbers as a tensor"
    )
