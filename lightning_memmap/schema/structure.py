"""Structures: the containers of a sample around its leaves."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from operator import itemgetter
from reprlib import repr as short_repr
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from tensordict import TensorDictBase, is_tensorclass
from torch import Tensor

from lightning_memmap.errors import MismatchError, SchemaError
from lightning_memmap.schema.fields import MAX_NAME_LENGTH, Field, field_name, where
from lightning_memmap.schema.leaves import RowList

MAX_DEPTH = 32
#: An untrusted schema may name many classes, and making one takes a millisecond.
MAX_CLASSES = 256
#: The last part of the name of the field that says which rows of another one are not None.
MASK = "mask"
CLASS_KINDS = ("namedtuple", "dataclass")
#: The number of children of the kinds that have no keys.
WRAPPERS = {"records": 1, "optional": 2}

Key = str | int
Path = tuple[Key, ...]
#: A sequence with an entry for each field, such as their numbers.
Fields = TypeVar("Fields", range, Sequence[Field])


class Node(msgspec.Struct, frozen=True, omit_defaults=True, dict=True):
    """A container of a sample, or a part of it that is one field."""

    #: "records" is a list of any length, whose one child is what each part of it has; "optional"
    #: has a part that is None in some rows, and the field that says in which; "none" was None in
    #: all rows seen.
    kind: Literal[
        "leaf", "records", "optional", "none",
        "tuple", "list", "dict", "namedtuple", "dataclass", "tensordict",
    ]  # fmt: skip
    #: The key, name or position of each child, where it has one.
    keys: Path = ()
    children: tuple["Node", ...] = ()
    #: Of the class of a named tuple or dataclass.
    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME_LENGTH)] = ""
    #: The dimensions of the first field of a TensorDict that are not those of its batch_size.
    feature_dims: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def is_field(self) -> bool:
        """Whether this is a field and not a container."""
        return self.kind == "leaf"

    @property
    def is_list(self) -> bool:
        """Whether this is a list or tuple that is no field."""
        return self.kind in ("tuple", "list")

    @cached_property
    def num_fields(self) -> int:
        """The fields from this node on."""
        return 1 if self.is_field else sum(child.num_fields for child in self.children)

    def paths(self, path: Path) -> list[Path]:
        """Where the children are."""
        if self.kind == "records":
            return [path]
        if self.kind == "optional":
            return [path, (*path, MASK)]
        return [(*path, key) for key in self.keys]

    def parts(self, fields: Fields, path: Path = ()) -> "Iterator[tuple[Path, Node, Fields]]":
        """Path, node and fields of each child, of the fields of this node, which is at a path."""
        first = 0
        for child_path, child in zip(self.paths(path), self.children, strict=True):
            yield child_path, child, fields[first : first + child.num_fields]
            first += child.num_fields

    def walk(self, path: Path = ()) -> Iterator[tuple[Path, "Node"]]:
        """Path and node of this node and of all below it, a container before its children."""
        yield path, self
        for child_path, child in zip(self.paths(path), self.children, strict=True):
            yield from child.walk(child_path)

    def field_paths(self, path: Path = ()) -> list[Path]:
        """Where the fields below this node are, which is at a path."""
        return [found for found, part in self.walk(path) if part.is_field]

    def field_names(self, path: Path = ()) -> list[str]:
        """The names of the fields below this node, which is at a path."""
        return list(map(field_name, self.field_paths(path)))


LEAF = Node("leaf")
NONE = Node("none")


def columns_of(values: Sequence[Any], node: Node, path: Path) -> Sequence[Sequence[Any]]:
    """What containers have, child by child."""
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
    """What one container has, in the order of a node's keys."""
    found = children_of(value, path)
    if found is None or found[0] != node.kind:
        raise MismatchError(
            f"{where(path)}: found {type(value).__name__}, expected {node.kind}"
            f" of {short_repr(list(node.keys))}"
        )
    _, keys, values = found
    if tuple(keys) == node.keys:
        return values
    if node.kind in ("dict", "tensordict") and set(keys) == set(node.keys):
        return [value[key] for key in node.keys]
    text = (
        f"{where(path)}: found {node.kind} of {short_repr(keys)}, expected"
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
    if isinstance(value, TensorDictBase):
        return "tensordict", list(value.keys()), list(value.values())
    if isinstance(value, Mapping):
        for key in value:
            # Not their subclasses either: a store could not give an enum's member back.
            if type(key) not in (str, int):
                raise SchemaError(
                    f"{where(path)}: the dict key {key!r} is neither a plain string"
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
            f"{where(path)}: found a tensorclass, {type(value).__name__}, of which a"
            " store keeps no class: give value.to_tensordict()"
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return "dataclass", names, [getattr(value, name) for name in names]
    return None
