"""Structures: the nesting of containers in a sample. Flatten samples, and nest leaves again."""

import dataclasses
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from operator import itemgetter
from reprlib import repr as short_repr
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from lightning_memmap.errors import MismatchError, SchemaError, StoreError
from lightning_memmap.schema.fields import MAX_NAME_LENGTH, Field, RowList, describe_path
from lightning_memmap.tensordict_types import is_tensorclass, tensordict_types

MAX_DEPTH = 32
#: Bounds what an untrusted schema can cost, because creating a class takes a millisecond.
MAX_CLASSES = 256
#: The last key in the name of a mask.
MASK = "mask"
CLASS_KINDS = ("namedtuple", "dataclass")
#: Kinds with one child and no keys.
WRAPPERS = ("records", "optional")

Key = str | int
Path = tuple[Key, ...]
#: The leaves of a sample or batch, by the index of their field.
Leaves: TypeAlias = Sequence[Any] | Mapping[int, Any]
NodeKind: TypeAlias = Literal[
    "leaf", "records", "optional", "none",
    "tuple", "list", "dict", "namedtuple", "dataclass", "tensordict",
]  # fmt: skip
#: A function that nests leaves like a sample.
Build: TypeAlias = Callable[[Leaves], Any]


class Node(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, dict=True):
    """A container of a sample, or a leaf with its field."""

    #: "records" is a list of any length, whose items have the structure of the child. "optional" is
    #: None in some rows, and has the structure of the child in other rows. "none" is None in all
    #: rows.
    kind: NodeKind
    #: The key, attribute or index of each child.
    keys: Path = ()
    # Quoted as a whole, because Python 3.10 does not resolve names nested in a type.
    children: "tuple[Node, ...]" = ()
    #: The class name of a named tuple or dataclass.
    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME_LENGTH)] = ""
    #: The number of dimensions of the first field of a TensorDict that its batch_size excludes.
    feature_dims: Annotated[int, msgspec.Meta(ge=0)] = 0
    #: The field of a leaf. Within records, it is the field of one record.
    field: Field | None = None
    #: The bool field of an "optional" part. It is False in rows that are None.
    mask: Annotated[str, msgspec.Meta(max_length=MAX_NAME_LENGTH)] = ""

    @property
    def is_list(self) -> bool:
        """Whether this is a list or tuple of a fixed length."""
        return self.kind in ("tuple", "list")

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """The stored fields of this node: the fields of its children, then its mask."""
        if self.field is not None:
            return (self.field,)
        fields = [field for child in self.children for field in child.fields]
        if self.kind == "records":
            fields = [field.list_field for field in fields]
        if self.mask:
            fields.append(Field(self.mask, torch.bool, ()))
        return tuple(fields)

    @cached_property
    def masks(self) -> dict[str, tuple[str, ...]]:
        """The masks of the optional parts around each field, outermost first, by field name."""
        if self.field is not None:
            return {self.field.name: ()}
        masks = {name: names for child in self.children for name, names in child.masks.items()}
        if self.mask:
            masks = {name: (self.mask, *names) for name, names in masks.items()}
            masks[self.mask] = ()
        return masks

    def items(self, path: Path = ()) -> Iterator[tuple[Path, "Node"]]:
        """Yield the path and the node of each child."""
        if self.kind in WRAPPERS:
            yield path, self.children[0]
            return
        for key, child in zip(self.keys, self.children, strict=True):
            yield (*path, key), child

    def walk(self, path: Path = ()) -> Iterator[tuple[Path, "Node"]]:
        """Yield the path and the node of this node and its descendants, parents first."""
        yield path, self
        for child_path, child in self.items(path):
            yield from child.walk(child_path)

    def map_fields(self, change: Callable[[Field], Field]) -> "Node":
        """Return the same structure with the stored field of each leaf replaced."""
        if self.field is not None:
            return replace(self, field=change(self.field))
        function = change
        if self.kind == "records":
            function = lambda field: change(field.list_field).record_field  # noqa: E731
        children = [child.map_fields(function) for child in self.children]
        return replace(self, children=tuple(children))


NONE = Node("none")


def leaf_node(field: Field) -> Node:
    """Return the node of a leaf."""
    return Node("leaf", field=field)


def split_columns(values: Sequence[Any], node: Node, path: Path) -> Sequence[Sequence[Any]]:
    """Return the values of each child of containers, in the order of the keys of a node.

    Raises:
        SchemaError: A container does not have the kind and keys of the node.
    """
    python_types = set(map(type, values))
    lengths = {len(node.keys)}
    python_type: Any = python_types.pop() if len(python_types) == 1 else None
    # A fast path for the most common types.
    is_tuple = python_type in (tuple, list) and node.kind == python_type.__name__
    is_tuple |= node.kind == "namedtuple" and getattr(python_type, "_fields", None) == node.keys
    if is_tuple and set(map(len, values)) == lengths:
        return list(zip(*values, strict=True))
    if python_type is dict and node.kind == "dict" and set(map(len, values)) == lengths:
        with suppress(KeyError):
            return [list(map(itemgetter(key), values)) for key in node.keys]
    return list(zip(*(_children_in_order(value, node, path) for value in values), strict=True))


def _children_in_order(value: Any, node: Node, path: Path) -> Sequence[Any]:
    """Return the values of one container, in the order of the keys of a node."""
    container = as_container(value, path)
    if container is None or container[0] != node.kind:
        raise MismatchError(
            f"{describe_path(path)}: found {type(value).__name__}, expected {node.kind}"
            f" of {short_repr(list(node.keys))}"
        )
    _, keys, values = container
    if tuple(keys) == node.keys:
        return values
    if node.kind in ("dict", "tensordict") and set(keys) == set(node.keys):
        return [value[key] for key in node.keys]
    text = (
        f"{describe_path(path)}: found {node.kind} of {short_repr(keys)}, expected"
        f" {short_repr(list(node.keys))}"
    )
    if node.is_list:
        raise MismatchError(text)
    unexpected = [key for key in keys if key not in node.keys]
    missing = [key for key in node.keys if key not in keys]
    differences = [f"unexpected: {short_repr(unexpected)}"] * bool(unexpected)
    differences += [f"missing: {short_repr(missing)}"] * bool(missing)
    raise SchemaError(
        f"{text} ({', '.join(differences)}). Return the same keys in all rows, with None for"
        " missing values"
    )


def as_container(value: Any, path: Path) -> tuple[NodeKind, list[Any], list[Any]] | None:
    """Return the kind, keys and values of a container, or None for a leaf."""
    if isinstance(value, (Tensor, RowList)):
        return None
    if isinstance(value, tensordict_types()):
        return "tensordict", list(value.keys()), list(value.values())
    if isinstance(value, Mapping):
        for key in value:
            # Subclasses, such as members of an enum, could not be restored.
            if type(key) not in (str, int):
                raise SchemaError(
                    f"{describe_path(path)}: the dict key {key!r} is neither a plain string"
                    " nor a plain integer: rename it in the dataset"
                )
        return "dict", list(value), list(value.values())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "namedtuple", list(value._fields), list(value)
    if isinstance(value, (tuple, list)):
        node_kind: NodeKind = "tuple" if isinstance(value, tuple) else "list"
        return node_kind, list(range(len(value))), list(value)
    if is_tensorclass(value):
        raise SchemaError(
            f"{describe_path(path)}: found {type(value).__name__}, a tensorclass. Its class is not"
            " stored, so return value.to_tensordict()"
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return "dataclass", names, [getattr(value, name) for name in names]
    return None


class Masked(NamedTuple):
    """The rows of an optional field or container in a batch: values and a mask."""

    values: Any
    """The values. Rows that are None are zeros, or empty if rows vary in length."""
    mask: Tensor
    """True for rows that are not None, bool of shape (B,), on the device of ``values``."""

    def rows(self) -> list[Any]:
        """Return a list of the rows, with None for rows without a value.

        Raises:
            TypeError: ``values`` is a container of several fields.
        """
        values = self.values
        if isinstance(values, Mapping) or not (
            hasattr(values, "rows") or len(values) == len(self.mask)
        ):
            raise TypeError(
                f"Masked: values is a {type(values).__name__} of several fields. Select the rows of"
                " each field with `mask`"
            )
        rows = values.rows() if hasattr(values, "rows") else values
        mask = self.mask.tolist()
        return [row if is_present else None for row, is_present in zip(rows, mask, strict=True)]


def _build_batch_of_records(build: Build, leaves: Mapping[int, Any]) -> Any:
    """Nest the records of a batch: row by row if all their fields are lists of rows."""
    if not all(isinstance(leaf, RowList) for leaf in leaves.values()):
        return build(leaves)
    rows = zip(*leaves.values(), strict=True)
    return RowList(build(dict(zip(leaves, row, strict=True))) for row in rows)


def _build_list_of_records(build: Build, leaves: Mapping[int, Any]) -> list[Any]:
    """Nest the records of one row."""
    lengths = {len(leaf) for leaf in leaves.values()}
    if len(lengths) > 1:
        raise StoreError(
            f"the fields of a list of records have {' and '.join(map(str, sorted(lengths)))}"
            " records: the store is damaged, build it again"
        )
    num_records = lengths.pop() if lengths else 0
    return [
        build({index: leaf[record] for index, leaf in leaves.items()})
        for record in range(num_records)
    ]


def make_builder(
    node: Node, sample: Any, index: Mapping[str, int], *, is_row: bool = False
) -> Build:
    """Return a function that nests leaves like a sample; see `Schema.make_builder`.

    Args:
        node: The structure.
        sample: A sample whose named tuples and dataclasses are used, or None.
        index: The index of each field among the leaves, by name.
        is_row: Whether the leaves are from one row instead of a batch.
    """
    if node.field is not None:
        return itemgetter(index[node.field.name])
    if node.kind == "records":
        first = next(iter(sample), None) if isinstance(sample, (list, tuple)) else None
        record = make_builder(node.children[0], first, index, is_row=is_row)
        indices = [index[field.name] for field in node.fields]
        nest = _build_list_of_records if is_row else _build_batch_of_records
        return lambda leaves: nest(record, {i: leaves[i] for i in indices})
    if node.kind == "optional":
        part = make_builder(node.children[0], sample, index, is_row=is_row)
        mask = index[node.mask]
        if is_row:
            return lambda leaves: part(leaves) if leaves[mask] else None
        return lambda leaves: Masked(part(leaves), leaves[mask])
    container = as_container(sample, ()) if sample is not None else None
    if container is not None and (container[0] != node.kind or set(container[1]) != set(node.keys)):
        container = None
    samples = dict(zip(container[1], container[2], strict=True)) if container is not None else {}
    children = [
        (key, make_builder(child, samples.get(key), index, is_row=is_row))
        for key, child in zip(node.keys, node.children, strict=True)
    ]
    if node.kind in ("tuple", "list"):
        return lambda leaves: [child(leaves) for _, child in children]
    if node.kind == "dict":
        return lambda leaves: {key: child(leaves) for key, child in children}
    if node.kind == "tensordict":
        from tensordict import TensorDict  # Imported late; see tensordict_types.

        first_field = index[node.fields[0].name]

        def build_tensordict(leaves: Leaves) -> Any:
            values = {str(key): child(leaves) for key, child in children}
            shape = leaves[first_field].shape
            batch_size = shape[: max(0, len(shape) - node.feature_dims)]
            # Variable dimensions of the batch size may be padded to different lengths.
            while any(value.shape[: len(batch_size)] != batch_size for value in values.values()):
                batch_size = batch_size[:-1]
            return TensorDict(values, batch_size)

        return build_tensordict
    class_type: Any = type(sample) if container else _create_class(node.kind, node.name, node.keys)
    if node.kind == "namedtuple":
        return lambda leaves: class_type._make(child(leaves) for _, child in children)

    def build_dataclass(leaves: Leaves) -> Any:
        # Without __init__, because its checks of a sample may not hold for a batch.
        batch = object.__new__(class_type)
        for key, child in children:
            object.__setattr__(batch, str(key), child(leaves))
        return batch

    return build_dataclass


@lru_cache(MAX_CLASSES)
def _create_class(node_kind: str, name: str, keys: Path) -> type:
    names = [str(key) for key in keys]
    if node_kind == "namedtuple":
        class_type: type = namedtuple(name, names)  # type: ignore[misc]
        return class_type
    return dataclasses.make_dataclass(name, names)
