"""Structures: the containers of a sample around its leaves."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from reprlib import repr as short_repr
from typing import Any

from tensordict import TensorDictBase, is_tensorclass
from torch import Tensor

from lightning_memmap.errors import MismatchError, SchemaError
from lightning_memmap.schema.fields import check_name_length, field_name
from lightning_memmap.schema.leaves import (
    EMPTY,
    EMPTY_LIST,
    Records,
    RowList,
    is_missing,
    stack_numbers,
)

MAX_DEPTH = 32
#: An untrusted schema may name many classes, and making one takes a millisecond.
MAX_CLASSES = 256
CLASS_KINDS = ("namedtuple", "dataclass")

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Node:
    """A container of a sample, or a part of it that is one field.

    Args:
        kind: ``leaf``, a field of one value, ``sequence``, a field of a list or tuple of numbers,
            whose count may differ from row to row, ``records``, a list of
            as many equal parts as it happens to have, whose one child is such a part, ``optional``,
            whose first child is the part that is None in some rows, and whose second one is the
            field that says in which, ``none``, a part that was None in all rows seen, ``tuple``,
            ``list``, ``dict``, ``namedtuple``, ``dataclass`` or ``tensordict``.
        keys: The key, name or position of each child of the last six kinds.
        children: The children, in the order of ``keys``.
        name: The class name of a named tuple or dataclass.
        feature_dims: Of a TensorDict: the dimensions of its first field that are not
            those of its ``batch_size``.
    """

    kind: str
    keys: Path = ()
    children: tuple["Node", ...] = ()
    name: str = ""
    feature_dims: int = 0

    @property
    def is_field(self) -> bool:
        """Whether this is a field and not a container."""
        return self.kind in FIELD_NODES

    @property
    def is_list(self) -> bool:
        """Whether this is a list or tuple that is no field."""
        return self.kind in ("tuple", "list")

    @cached_property
    def num_fields(self) -> int:
        """The fields from this node on."""
        return sum(node.is_field for _, node in self.walk())

    def paths(self, path: Path) -> list[Path]:
        """Where the children are.

        Args:
            path: Where this node is.

        Returns:
            The path of each child. The part of an optional node, and what lists of records consist
            of, have the path of the node itself.
        """
        if self.kind == "records":
            return [path]
        if self.kind == "optional":
            return [path, (*path, MASK)]
        return [(*path, key) for key in self.keys]

    def walk(self, path: Path = ()) -> Iterator[tuple[Path, "Node"]]:
        """Iterate over this node and all below it, in the order of the leaves.

        Args:
            path: Where this node is in the sample; empty for the outermost one.

        Yields:
            The path and the node, a container before its children.
        """
        yield path, self
        for child_path, child in zip(self.paths(path), self.children, strict=True):
            yield from child.walk(child_path)

    def field_paths(self, path: Path = ()) -> list[Path]:
        """Where the fields below this node are, which is at a path."""
        return [found for found, part in self.walk(path) if part.is_field]

    def field_names(self, path: Path = ()) -> list[str]:
        """The names of the fields below this node, which is at a path."""
        return list(map(field_name, self.field_paths(path)))

    def fields(self) -> list[tuple[str, "Node"]]:
        """List the fields below this node.

        Returns:
            The name and the node of each field, in the order of the leaves.

        Raises:
            SchemaError: A name is too long.
        """
        found = []
        for path, node in self.walk():
            if node.is_field:
                found.append((field_name(path), node))
                check_name_length(found[-1][0])
        return found

    def to_json(self) -> dict[str, Any]:
        """Convert this structure to JSON values, of which a schema has some.

        Returns:
            A dict of texts and lists, nested as the structure is.
        """
        if self.is_field:
            return {"kind": self.kind}
        return {
            "kind": self.kind,
            **({} if self.kind in WRAPPERS else {"keys": list(self.keys)}),
            **({"name": self.name} if self.name else {}),
            **({"feature_dims": self.feature_dims} if self.kind == "tensordict" else {}),
            "children": [child.to_json() for child in self.children],
        }


LEAF = Node("leaf")
SEQUENCE = Node("sequence")
NONE = Node("none")
#: The last part of the name of the field that says which rows of another one are not None.
MASK = "mask"
FIELD_NODES = {node.kind: node for node in (LEAF, SEQUENCE)}
#: The number of children of the kinds that have no keys.
WRAPPERS = {"records": 1, "optional": 2}


def flatten(value: Any, node: Node, leaves: list[Any], number_ndim: int, path: Path = ()) -> None:
    """Take the leaves out of a sample or batch that has a known structure.

    Args:
        value: The sample or batch.
        node: Its structure. The keys of a dict may be in another order.
        leaves: The leaves are appended to this list, in the order of the structure.
        number_ndim: Dimensions of a tensor that counts as one number: 0 in a sample, 1 in a batch.
        path: Where the value is in the sample, for messages.

    Raises:
        SchemaError: The value has another structure. The message names the field.
    """
    if node.kind == "leaf":
        leaves.append(value)
        return
    if node.kind == "optional":
        part, is_given = node.children[0], not is_missing(value)
        if is_given:
            flatten(value, part, leaves, number_ndim, path)
        else:
            leaves += [EMPTY] * part.num_fields
        leaves.append(is_given)
        return
    if node.kind == "none":
        if not is_missing(value):
            raise MismatchError(
                f"field {field_name(path)!r}: found {short_repr(value)}, expected None"
            )
        return
    found = children_of(value, ())
    if node.kind == "records":
        _flatten_records(value, found, node.children[0], leaves, path)
        return
    if node.is_field:
        if found is None or found[0] not in ("tuple", "list"):
            raise MismatchError(
                f"field {field_name(path)!r}: found {type(value).__name__}, expected a list or"
                " tuple of numbers"
            )
        # Without numbers there is no dtype.
        name = field_name(path)
        leaves.append(stack_numbers(name, found[2], number_ndim) if found[2] else EMPTY_LIST)
        return
    if found is None or found[0] != node.kind:
        raise MismatchError(
            f"field {field_name(path)!r}: found {type(value).__name__}, expected {node.kind}"
            f" of {short_repr(list(node.keys))}"
        )
    _, keys, values = found
    if tuple(keys) != node.keys:
        if node.kind not in ("dict", "tensordict") or set(keys) != set(node.keys):
            text = (
                f"field {field_name(path)!r}: found {node.kind} of {short_repr(keys)}, expected"
                f" {short_repr(list(node.keys))}"
            )
            if node.is_list:
                raise MismatchError(text)
            raise SchemaError(
                f"{text}: the keys differ ({_differing_keys(node, keys)}): give all rows the same,"
                " None where it has none"
            )
        values = [value[key] for key in node.keys]
    for key, child, child_node in zip(node.keys, values, node.children, strict=True):
        flatten(child, child_node, leaves, number_ndim, (*path, key))


def _differing_keys(node: Node, keys: Collection[str | int]) -> str:
    """Say which keys of a dict or class are not those of a node."""
    new, missing = [k for k in keys if k not in node.keys], [k for k in node.keys if k not in keys]
    parts = [f"{short_repr(new)} too many"] * bool(new)
    parts += [f"{short_repr(missing)} missing"] * bool(missing)
    return ", ".join(parts)


def _flatten_records(value: Any, found: Any, record: Node, leaves: list[Any], path: Path) -> None:
    """Take the leaves out of a list of records: for each field, those of all records together."""
    if found is None or found[0] not in ("tuple", "list"):
        raise MismatchError(
            f"field {field_name(path)!r}: found {type(value).__name__}, expected a list or tuple"
        )
    rows = []
    for each in found[2]:
        rows.append(list[Any]())
        flatten(each, record, rows[-1], 0, path)
    leaves += map(Records, zip(*rows, strict=True)) if rows else [EMPTY] * record.num_fields


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
                    f"field {field_name(path)!r}: the dict key {key!r} is neither a plain string"
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
            f"field {field_name(path)!r}: found a tensorclass, {type(value).__name__}, of which a"
            " store keeps no class: give value.to_tensordict()"
        )
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return "dataclass", names, [getattr(value, name) for name in names]
    return None
