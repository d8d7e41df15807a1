"""Structures: the containers of a sample around its leaves."""

import dataclasses
from collections import namedtuple
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from keyword import iskeyword
from reprlib import repr as short_repr
from typing import Any
from unicodedata import normalize

import numpy as np
from tensordict import TensorDict, TensorDictBase, is_tensorclass
from torch import Tensor

from lightning_memmap.errors import SchemaError
from lightning_memmap.schema.fields import (
    MAX_NAME_LENGTH,
    Field,
    check_name_length,
    dtype_name,
    entry,
    field_name,
)
from lightning_memmap.schema.leaves import MIN_NUMBERS, number_dtype, stack_numbers

_MAX_DEPTH = 32
#: An untrusted schema may name many classes, and making one takes a millisecond.
_MAX_CLASSES = 256
_TENSOR_KINDS = ("tensordict", "tensorclass")
_CLASS_KINDS = ("namedtuple", "dataclass", "tensorclass")

Path = tuple[str | int, ...]
Build = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Node:
    """A container of a sample, or a part of it that is one field.

    Args:
        kind: ``leaf``, a field of one value, ``numbers``, a field of a list or tuple of numbers,
            ``sequence``, the same where their count differs from row to row, ``tuple``, ``list``,
            ``dict``, ``namedtuple``, ``dataclass``, ``tensordict`` or ``tensorclass``.
        keys: The key, name or position of each child.
        children: The children, in the order of ``keys``.
        name: The class name of a named tuple, dataclass or tensorclass.
        feature_dims: Of a TensorDict or tensorclass: the dimensions of its first field that are not
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
        return self.kind in _FIELDS

    @property
    def is_list(self) -> bool:
        """Whether this is a list or tuple that is no field."""
        return self.kind in ("tuple", "list")

    def walk(self, path: Path = ()) -> Iterator[tuple[Path, "Node"]]:
        """Iterate over this node and all below it, in the order of the leaves.

        Args:
            path: Where this node is in the sample; empty for the outermost one.

        Yields:
            The path and the node, a container before its children.
        """
        yield path, self
        for key, child in zip(self.keys, self.children, strict=True):
            yield from child.walk((*path, key))

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
        """Convert this structure to JSON values, as `from_json` reads them.

        Returns:
            A dict of texts and lists, nested as the structure is.
        """
        if self.is_field:
            return {"kind": self.kind}
        return {
            "kind": self.kind,
            "keys": list(self.keys),
            **({"name": self.name} if self.name else {}),
            **({"feature_dims": self.feature_dims} if self.kind in _TENSOR_KINDS else {}),
            "children": [child.to_json() for child in self.children],
        }

    @classmethod
    def from_json(cls, value: Any) -> "Node":
        """Read a structure from JSON values that have not been checked.

        Args:
            value: A dict as of `to_json`.

        Returns:
            The structure.

        Raises:
            SchemaError: The values describe no structure that a sample could have.
        """
        structure = _node_from_json(value, 0)
        classes = {(node.kind, node.name, node.keys) for _, node in structure.walk() if node.name}
        if len(classes) > _MAX_CLASSES:
            raise SchemaError(f"the structure has more than {_MAX_CLASSES} classes")
        return structure


_LEAF = Node("leaf")
_NUMBERS = Node("numbers")
_SEQUENCE = Node("sequence")
#: The leaf of a list without numbers, whose count differs from row to row.
EMPTY = object()
_FIELDS = {node.kind: node for node in (_LEAF, _NUMBERS, _SEQUENCE)}


def describe(
    value: Any,
    leaves: list[tuple[str, Any]],
    number_ndim: int,
    path: Path = (),
    variable: Collection[str] = (),
) -> Node:
    """Find the structure of a sample or of a batch.

    Args:
        value: The sample or batch.
        leaves: The name and value of each leaf are appended to this list.
        number_ndim: Dimensions of a tensor that counts as one number: 0 in a sample, 1 in a batch.
        path: Where the value is in the sample.
        variable: Names of fields whose rows may differ in length.

    Returns:
        The structure, whose fields are in the order of ``leaves``.

    Raises:
        SchemaError: The sample is nested too deeply, a dict has keys that cannot be stored, or a
            list has too many numbers. The message names the field where there is one.
    """
    if len(path) > _MAX_DEPTH:
        raise SchemaError(f"the sample is nested deeper than {_MAX_DEPTH} levels")
    found = _children(value, path)
    if found is None:
        leaves.append((field_name(path), value))
        return _LEAF
    kind, keys, values = found
    is_variable = field_name(path) in variable
    if (
        kind in ("tuple", "list")
        and (len(values) >= MIN_NUMBERS or is_variable)
        and number_dtype(values, number_ndim) is not None
    ):
        name = field_name(path)
        leaves.append((name, stack_numbers(name, values, number_ndim)))
        return _SEQUENCE if is_variable else _NUMBERS
    first = len(leaves)
    children = tuple(
        describe(child, leaves, number_ndim, (*path, key), variable)
        for key, child in zip(keys, values, strict=True)
    )
    name = type(value).__name__ if kind in _CLASS_KINDS else ""
    if kind not in _TENSOR_KINDS:
        return Node(kind, tuple(keys), children, name)
    if len(leaves) == first:
        raise SchemaError(
            f"field {field_name(path)!r}: found an empty {type(value).__name__}: leave it out"
        )
    for name_of_leaf, leaf in leaves[first:]:
        if not isinstance(leaf, Tensor):
            raise SchemaError(
                f"field {name_of_leaf!r}: found {type(leaf).__name__} in a {type(value).__name__},"
                " of which only tensors are stored: give it beside the tensors, in a dict or tuple"
            )
    return Node(kind, tuple(keys), children, name, np.ndim(leaves[first][1]) - value.batch_dims)


def merge(
    one: Node,
    other: Node,
    fields: Mapping[Path, Field],
    other_fields: Mapping[Path, Field],
    merged: list[Field],
    path: Path = (),
) -> Node | None:
    """Find the structure that has the samples of two.

    They may differ in the lengths of lists of numbers, in the sizes of fields, and in the order of
    a dict's keys.

    Args:
        one: The structure of some samples, whose order of keys the result has.
        other: The structure of others.
        fields: The fields of ``one``, by path.
        other_fields: The fields of ``other``, by path.
        merged: The fields of the result are appended to this list.
        path: Where the two are in the sample.

    Returns:
        The structure; None if the two differ in more than that.

    Raises:
        SchemaError: They differ in the dtypes of a list of numbers. The message names it.
    """
    if one.is_field and other.is_field and (one.kind == "leaf") == (other.kind == "leaf"):
        field = fields[path].merged(other_fields[path])
        if field is None and one.kind != "leaf":
            raise _mixed_error(path, (fields[path], other_fields[path]))
        if field is None:
            return None
        merged.append(field)
        return _SEQUENCE if one.kind != "leaf" and field.num_variable else one
    is_of_other_length = one.is_field or other.is_field or len(one.keys) != len(other.keys)
    if _is_list(one) and _is_list(other) and is_of_other_length:
        numbers = _numbers(one, fields, path) | _numbers(other, other_fields, path)
        known = [field for field in numbers if field is not None]
        if not known or None in numbers:
            return None
        if len(known) > 1:
            raise _mixed_error(path, known)
        merged.append(known[0])
        return _SEQUENCE
    if (one.kind, one.name, set(one.keys)) != (other.kind, other.name, set(other.keys)):
        return None
    others = dict(zip(other.keys, other.children, strict=True))
    children = []
    for key, child in zip(one.keys, one.children, strict=True):
        found_child = merge(child, others[key], fields, other_fields, merged, (*path, key))
        if found_child is None:
            return None
        children.append(found_child)
    return dataclasses.replace(one, children=tuple(children))


def _is_list(node: Node) -> bool:
    return node.is_list or node.kind in ("numbers", "sequence")


def _numbers(node: Node, fields: Mapping[Path, Field], path: Path) -> set[Field | None]:
    """The fields that have the numbers of a list, any count of them, in the dtype of samples; None
    among them where it has other things."""
    paths = [path] if node.is_field else [(*path, key) for key in node.keys]
    kinds = {"number": "array"}
    return {
        Field(field_name(path), field.sample_dtype, (None,), kinds.get(field.kind, field.kind))
        if field is not None and (node.is_field or field.shape == ())
        else None
        for field in map(fields.get, paths)
    }


def _mixed_error(path: Path, fields: Iterable[Field]) -> SchemaError:
    found = sorted({f"{dtype_name(field.sample_dtype)} ({field.kind})" for field in fields})
    return SchemaError(
        f"Rows of {field_name(path)!r} are lists of {' and '.join(found)}: give all numbers one"
        " dtype, such as [1.0, 2.0], or arrays in place of the lists"
    )


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
    found = _children(value, ())
    if node.is_field:
        if found is None or found[0] not in ("tuple", "list"):
            raise SchemaError(
                f"field {field_name(path)!r}: found {type(value).__name__}, expected a list or"
                " tuple of numbers"
            )
        # Without numbers there is no dtype.
        is_empty = node.kind == "sequence" and not found[2]
        numbers = EMPTY if is_empty else stack_numbers(field_name(path), found[2], number_ndim)
        leaves.append(numbers)
        return
    if found is None or found[0] != node.kind:
        raise SchemaError(
            f"field {field_name(path)!r}: found {type(value).__name__}, expected {node.kind}"
            f" of {short_repr(list(node.keys))}"
        )
    _, keys, values = found
    if tuple(keys) != node.keys:
        if node.kind not in ("dict", "tensordict") or set(keys) != set(node.keys):
            raise SchemaError(
                f"field {field_name(path)!r}: found {node.kind} of {short_repr(keys)}, expected"
                f" {short_repr(list(node.keys))}"
            )
        values = [value[key] for key in node.keys]
    for key, child, child_node in zip(node.keys, values, node.children, strict=True):
        flatten(child, child_node, leaves, number_ndim, (*path, key))


def builder(node: Node, sample: Any, indices: Iterator[int]) -> Build:
    """Make a function that puts leaves back into a structure; see `Schema.builder`.

    Args:
        node: The structure.
        sample: A sample of the dataset, for its classes, or None.
        indices: The indices that the leaves from here on have; as many as needed are taken.

    Returns:
        A function from the tensors of all fields to the nested value.
    """
    if node.is_field:
        index = next(indices)
        if node.kind != "numbers":
            return lambda leaves: leaves[index]
        # Each contiguous, as default_collate makes them.
        return lambda leaves: list(leaves[index].movedim(-1, 0).contiguous().unbind())
    if node.kind in _TENSOR_KINDS:
        return _tensordict_builder(node, sample, indices)
    found = _children(sample, ()) if sample is not None else None
    if found is not None and (found[0] != node.kind or set(found[1]) != set(node.keys)):
        found = None
    samples = dict(zip(found[1], found[2], strict=True)) if found is not None else {}
    pairs = zip(node.keys, node.children, strict=True)
    children = [(key, builder(child, samples.get(key), indices)) for key, child in pairs]
    if node.kind in ("tuple", "list"):
        return lambda leaves: [child(leaves) for _, child in children]
    if node.kind == "dict":
        return lambda leaves: {key: child(leaves) for key, child in children}
    class_type: Any = type(sample) if found else _look_alike(node.kind, node.name, node.keys)
    if node.kind == "namedtuple":
        return lambda leaves: class_type._make(child(leaves) for _, child in children)

    def build_dataclass(leaves: Sequence[Tensor]) -> Any:
        # Not through __init__: what a class checks of one sample need not hold for a batch.
        batch = object.__new__(class_type)
        for key, child in children:
            object.__setattr__(batch, str(key), child(leaves))
        return batch

    return build_dataclass


def _tensordict_builder(node: Node, sample: Any, indices: Iterator[int]) -> Build:
    """A function that makes a TensorDict, or the tensorclass of a sample that is given."""
    first = next(indices)
    within = chain([first], indices)
    is_sample = node.kind == "tensordict" or type(sample).__name__ == node.name
    samples = dict(zip(*found[1:], strict=True)) if (found := _children(sample, ())) else {}
    children = [
        (str(key), builder(child, samples.get(key), within))
        for key, child in zip(node.keys, node.children, strict=True)
    ]
    class_type: Any = type(sample) if is_sample and is_tensorclass(sample) else None

    def build(leaves: Sequence[Tensor]) -> Any:
        shape = leaves[first].shape
        batch_size = shape[: max(0, len(shape) - node.feature_dims)]
        made = TensorDict({key: child(leaves) for key, child in children}, batch_size)
        return made if class_type is None else class_type.from_tensordict(made)

    return build


def _children(value: Any, path: Path) -> tuple[str, list[Any], list[Any]] | None:
    """Kind, keys and values of a container; None for a leaf."""
    if isinstance(value, Tensor):
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
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        kind = "tensorclass" if is_tensorclass(value) else "dataclass"
        return kind, names, [getattr(value, name) for name in names]
    return None


@lru_cache(_MAX_CLASSES)
def _look_alike(kind: str, name: str, keys: Path) -> type:
    names = [str(key) for key in keys]
    if kind == "namedtuple":
        made: type = namedtuple(name, names)  # type: ignore[misc]
        return made
    return dataclasses.make_dataclass(name, names)


def _node_from_json(value: Any, depth: int) -> Node:
    if depth > _MAX_DEPTH:
        raise SchemaError(f"the structure is nested deeper than {_MAX_DEPTH} levels")
    kind = entry(value, "kind", str)
    if kind in _FIELDS:
        return _FIELDS[kind]
    if kind not in ("tuple", "list", "dict", *_CLASS_KINDS, "tensordict"):
        raise SchemaError(f"unknown container {short_repr(kind)}")
    keys, children = entry(value, "keys", list), entry(value, "children", list)
    name = entry(value, "name", str) if kind in _CLASS_KINDS else ""
    feature_dims = entry(value, "feature_dims", int) if kind in _TENSOR_KINDS else 0
    plain = all(type(key) in (str, int) for key in keys)
    if not plain or len(set(keys)) != len(keys) or len(keys) != len(children):
        raise SchemaError(f"the keys {short_repr(keys)} do not fit {len(children)} children")
    if any(len(str(key)) > MAX_NAME_LENGTH for key in keys):
        raise SchemaError(f"a key is longer than {MAX_NAME_LENGTH} characters")
    if kind in ("tuple", "list") and keys != list(range(len(keys))):
        raise SchemaError(f"the keys of a {kind} are {short_repr(keys)}")
    if kind in _CLASS_KINDS:
        _check_class(kind, name, keys)
    if kind in _TENSOR_KINDS and not (keys and feature_dims >= 0):
        raise SchemaError(f"a {kind} of {feature_dims} dimensions and the keys {short_repr(keys)}")
    nodes = tuple(_node_from_json(child, depth + 1) for child in children)
    return Node(kind, tuple(keys), nodes, name, feature_dims)


def _check_class(kind: str, name: str, keys: list[str | int]) -> None:
    """Check that `_look_alike` can make a class: it writes source code with these names."""
    if not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
        raise SchemaError(f"{short_repr(name)} is not a name of a class")
    if kind == "namedtuple" and not _is_identifier(name):
        raise SchemaError(f"{short_repr(name)} is not a name of a named tuple")
    for key in keys:
        if not _is_identifier(key) or (kind == "namedtuple" and str(key).startswith("_")):
            raise SchemaError(f"{kind} {short_repr(name)}: {short_repr(key)} names no field")


def _is_identifier(name: str | int) -> bool:
    """Whether a class can have a field of this name, and the same name once Python has read it."""
    return (
        isinstance(name, str)
        and name.isidentifier()
        and not iskeyword(name)
        and not name.startswith("__")
        and normalize("NFKC", name) == name
    )
