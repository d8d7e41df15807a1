"""Structures: the containers of a sample around its leaves, taken apart and put together again."""

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
#: An untrusted schema may name many classes, and making one takes a millisecond.
MAX_CLASSES = 256
#: The last part of the name of a mask, the field that is False where another one is None.
MASK = "mask"
CLASS_KINDS = ("namedtuple", "dataclass")
#: Kinds that have one child and no keys.
WRAPPERS = ("records", "optional")

Key = str | int
Path = tuple[Key, ...]
#: The leaves of a sample or batch by the index of their field.
Leaves: TypeAlias = Sequence[Any] | Mapping[int, Any]
#: Nests leaves like a sample.
Build: TypeAlias = Callable[[Leaves], Any]


class Node(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, dict=True):
    """A container of a sample, or a leaf with its field."""

    #: "records" is a list of any length, whose items all have the structure of its child.
    #: "optional" is None in some rows, and has the structure of its child in the others. "none" was
    #: None in all rows seen.
    kind: Literal[
        "leaf", "records", "optional", "none",
        "tuple", "list", "dict", "namedtuple", "dataclass", "tensordict",
    ]  # fmt: skip
    #: The key, attribute or index of each child, where it has one.
    keys: Path = ()
    # Python 3.10 does not look for names within a type.
    children: "tuple[Node, ...]" = ()
    #: The name of the class of a named tuple or dataclass.
    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME_LENGTH)] = ""
    #: The dimensions of the first field of a TensorDict that are not in its batch_size.
    feature_dims: Annotated[int, msgspec.Meta(ge=0)] = 0
    #: The field of a leaf. Within records, it is the field of one record.
    field: Field | None = None
    #: The name of the bool field that is False where an "optional" part is None.
    mask: Annotated[str, msgspec.Meta(max_length=MAX_NAME_LENGTH)] = ""

    @property
    def is_list(self) -> bool:
        """Whether this is a list or tuple of a fixed length."""
        return self.kind in ("tuple", "list")

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """The stored fields from this node on: those of its children, then its mask."""
        if self.field is not None:
            return (self.field,)
        fields = [field for child in self.children for field in child.fields]
        if self.kind == "records":
            fields = [field.in_list for field in fields]
        if self.mask:
            fields.append(Field(self.mask, torch.bool, ()))
        return tuple(fields)

    @cached_property
    def masks(self) -> dict[str, tuple[str, ...]]:
        """By name of a field, the masks of the optional parts that it is in, outermost first."""
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
        """Yield the path and the node of this node and of all below it, parents first."""
        yield path, self
        for child_path, child in self.items(path):
            yield from child.walk(child_path)

    def map_fields(self, change: Callable[[Field], Field]) -> "Node":
        """Return the same structure with each stored field of a leaf replaced."""
        if self.field is not None:
            return replace(self, field=change(self.field))
        function = change
        if self.kind == "records":
            function = lambda field: change(field.in_list).of_record  # noqa: E731
        return replace(self, children=tuple(child.map_fields(function) for child in self.children))


NONE = Node("none")


def leaf_node(field: Field) -> Node:
    """Make the node of a leaf."""
    return Node("leaf", field=field)


def columns_of(values: Sequence[Any], node: Node, path: Path) -> Sequence[Sequence[Any]]:
    """Return the values of containers, child by child."""
    kinds, lengths = set(map(type, values)), {len(node.keys)}
    kind: Any = kinds.pop() if len(kinds) == 1 else None
    # Those that most datasets give, all at once.
    is_tuple = kind in (tuple, list) and node.kind == kind.__name__
    is_tuple |= node.kind == "namedtuple" and getattr(kind, "_fields", None) == node.keys
    if is_tuple and set(map(len, values)) == lengths:
        return list(zip(*values, strict=True))
    if kind is dict and node.kind == "dict" and set(map(len, values)) == lengths:
        with suppress(KeyError):
            return [list(map(itemgetter(key), values)) for key in node.keys]
    return list(zip(*(_children(value, node, path) for value in values), strict=True))


def _children(value: Any, node: Node, path: Path) -> Sequence[Any]:
    """Return the values of one container, in the order of a node's keys."""
    found = children_of(value, path)
    if found is None or found[0] != node.kind:
        raise MismatchError(
            f"{describe_path(path)}: found {type(value).__name__}, expected {node.kind}"
            f" of {short_repr(list(node.keys))}"
        )
    _, keys, values = found
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
    new, missing = [k for k in keys if k not in node.keys], [k for k in node.keys if k not in keys]
    parts = [f"{short_repr(new)} too many"] * bool(new)
    parts += [f"{short_repr(missing)} missing"] * bool(missing)
    raise SchemaError(
        f"{text}: the keys differ ({', '.join(parts)}): give all rows the same, None where it has"
        " none"
    )


def children_of(value: Any, path: Path) -> tuple[str, list[Any], list[Any]] | None:
    """Kind, keys and values of a container; None for a leaf."""
    if isinstance(value, (Tensor, RowList)):
        return None
    if isinstance(value, tensordict_types()):
        return "tensordict", list(value.keys()), list(value.values())
    if isinstance(value, Mapping):
        for key in value:
            # Not their subclasses either: a store could not give an enum's member back.
            if type(key) not in (str, int):
                raise SchemaError(
                    f"{describe_path(path)}: the dict key {key!r} is neither a plain string"
                    " nor a plain integer: rename it in the dataset"
                )
        return "dict", list(value), list(value.values())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return "namedtuple", list(value._fields), list(value)
    if isinstance(value, (tuple, list)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return kind, list(range(len(value))), list(value)
    if is_tensorclass(value):
        raise SchemaError(
            f"{describe_path(path)}: found a tensorclass, {type(value).__name__}, of which a"
            " store keeps no class: give value.to_tensordict()"
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return "dataclass", names, [getattr(value, name) for name in names]
    return None


class Masked(NamedTuple):
    """The rows of a batch of which some are None: values and a mask."""

    values: Any
    """The values. Rows that are None are zeros, or empty if rows differ in length."""
    mask: Tensor
    """True for each row that is not None: bool of shape (B,), on the device of ``values``."""

    def rows(self) -> list[Any]:
        """Return the rows, with None for rows without a value.

        Raises:
            TypeError: The rows have more than one field.
        """
        values = self.values
        if isinstance(values, Mapping) or not (
            hasattr(values, "rows") or len(values) == len(self.mask)
        ):
            raise TypeError(
                f"Masked: the rows of a {type(values).__name__} are in its parts: take them from"
                " there, with `mask`"
            )
        found = values.rows() if hasattr(values, "rows") else values
        given = self.mask.tolist()
        return [row if is_given else None for row, is_given in zip(found, given, strict=True)]


def _records(record: Build, leaves: Mapping[int, Any]) -> Any:
    """Nest the records of a batch: row by row if their fields are lists of rows."""
    if not all(isinstance(leaf, RowList) for leaf in leaves.values()):
        return record(leaves)
    rows = zip(*leaves.values(), strict=True)
    return RowList(record(dict(zip(leaves, row, strict=True))) for row in rows)


def _list(record: Build, leaves: Mapping[int, Any]) -> list[Any]:
    """Nest the records of one row."""
    lengths = {len(leaf) for leaf in leaves.values()}
    if len(lengths) > 1:
        raise StoreError(
            f"the records of a row have {' and '.join(map(str, sorted(lengths)))} values: the store"
            " is damaged, build it again"
        )
    count = lengths.pop() if lengths else 0
    return [record({at: leaf[row] for at, leaf in leaves.items()}) for row in range(count)]


def builder(node: Node, sample: Any, index: Mapping[str, int], *, is_row: bool = False) -> Build:
    """Make a function that nests leaves like a sample; see `Schema.builder`.

    Args:
        node: The structure.
        sample: A sample whose classes of named tuples and dataclasses are used, or None.
        index: The index of each field among the leaves, by name.
        is_row: Whether the leaves are of one row, and not of a batch.
    """
    if node.field is not None:
        return itemgetter(index[node.field.name])
    if node.kind == "records":
        first = next(iter(sample), None) if isinstance(sample, (list, tuple)) else None
        record = builder(node.children[0], first, index, is_row=is_row)
        indices = [index[field.name] for field in node.fields]
        nest = _list if is_row else _records
        return lambda leaves: nest(record, {at: leaves[at] for at in indices})
    if node.kind == "optional":
        part = builder(node.children[0], sample, index, is_row=is_row)
        mask = index[node.mask]
        if is_row:
            return lambda leaves: part(leaves) if leaves[mask] else None
        return lambda leaves: Masked(part(leaves), leaves[mask])
    found = children_of(sample, ()) if sample is not None else None
    if found is not None and (found[0] != node.kind or set(found[1]) != set(node.keys)):
        found = None
    samples = dict(zip(found[1], found[2], strict=True)) if found is not None else {}
    children = [
        (key, builder(child, samples.get(key), index, is_row=is_row))
        for key, child in zip(node.keys, node.children, strict=True)
    ]
    if node.kind in ("tuple", "list"):
        return lambda leaves: [child(leaves) for _, child in children]
    if node.kind == "dict":
        return lambda leaves: {key: child(leaves) for key, child in children}
    if node.kind == "tensordict":
        from tensordict import TensorDict  # Only here; see tensordict_types.

        first_field = index[node.fields[0].name]

        def build_tensordict(leaves: Leaves) -> Any:
            values = {str(key): child(leaves) for key, child in children}
            shape = leaves[first_field].shape
            batch_size = shape[: max(0, len(shape) - node.feature_dims)]
            # Beyond the rows, fields that differ in length may be padded to different lengths.
            while any(value.shape[: len(batch_size)] != batch_size for value in values.values()):
                batch_size = batch_size[:-1]
            return TensorDict(values, batch_size)

        return build_tensordict
    class_type: Any = type(sample) if found else _look_alike(node.kind, node.name, node.keys)
    if node.kind == "namedtuple":
        return lambda leaves: class_type._make(child(leaves) for _, child in children)

    def build_dataclass(leaves: Leaves) -> Any:
        # Not through __init__: what a class checks of one sample need not hold for a batch.
        batch = object.__new__(class_type)
        for key, child in children:
            object.__setattr__(batch, str(key), child(leaves))
        return batch

    return build_dataclass


@lru_cache(MAX_CLASSES)
def _look_alike(kind: str, name: str, keys: Path) -> type:
    names = [str(key) for key in keys]
    if kind == "namedtuple":
        made: type = namedtuple(name, names)  # type: ignore[misc]
        return made
    return dataclasses.make_dataclass(name, names)
