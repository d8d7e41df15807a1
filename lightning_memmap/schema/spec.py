"""Check a schema that was read from JSON values, which may be untrusted.

The types say what a value may be; what follows them are the rules that tie values to each other.
"""

from keyword import iskeyword
from reprlib import repr as short_repr
from typing import Any
from unicodedata import normalize

import torch

from lightning_memmap.errors import SchemaError
from lightning_memmap.schema.fields import DTYPES, MAX_NAME_LENGTH, Field, field_name
from lightning_memmap.schema.kinds import Text
from lightning_memmap.schema.schema import MAX_FIELDS, Schema
from lightning_memmap.schema.structure import (
    CLASS_KINDS,
    MASK,
    MAX_CLASSES,
    MAX_DEPTH,
    WRAPPERS,
    Node,
    Path,
)


def check_schema(schema: Schema) -> None:
    """Check what ties the values of a schema to each other."""
    _check_node(schema.structure, 0)
    nodes = list(schema.structure.walk())
    if len({(node.kind, node.name, node.keys) for _, node in nodes if node.name}) > MAX_CLASSES:
        raise SchemaError(f"the structure has more than {MAX_CLASSES} classes")
    if not 1 <= len(schema.fields) <= MAX_FIELDS:
        raise SchemaError(f"{len(schema.fields)} fields: a store has 1 to {MAX_FIELDS}")
    for path, node in nodes:
        _check_names(path, node)
        if node.field is not None:
            _check_field(node.field)
        if node.kind == "tensordict":
            _check_batch_size(node)


def read_dtype(kind: type, value: Any) -> torch.dtype:
    """Return the dtype of a name."""
    assert kind is torch.dtype
    if not isinstance(value, str) or value not in DTYPES:
        raise ValueError(f"unknown dtype {short_repr(value)}; known: {', '.join(DTYPES)}")
    return DTYPES[value]


def _check_names(path: Path, node: Node) -> None:
    """Check that a field or a mask has the name that belongs to its path."""
    if node.field is not None and node.field.name != field_name(path):
        raise SchemaError(f"the field {short_repr(node.field.name)} is not named by its path")
    if node.mask and node.mask != field_name((*path, MASK)):
        raise SchemaError(f"the mask {short_repr(node.mask)} is not named by its path")


def _check_field(field: Field) -> None:
    """Check that the shape and dtype of a leaf belong to its kind."""
    kind, shape = field.kind, field.shape
    what = f"field {field.name!r}: {field} ({kind})"
    if None in shape[field.num_variable :]:
        raise SchemaError(f"{what}: sizes that differ come first")
    if isinstance(kind, Text) and kind.many:
        raise SchemaError(f"{what} is a list, but not the field of one")
    if kind.dtype not in (None, field.dtype) or kind.shape not in (None, shape):
        raise SchemaError(f"{what} is of another dtype or shape")


def _check_node(node: Node, depth: int) -> None:
    """Check the structure from a node on."""
    kind, keys = node.kind, node.keys
    if depth > MAX_DEPTH:
        raise SchemaError(f"the structure is nested deeper than {MAX_DEPTH} levels")
    if kind == "none":
        raise SchemaError("a part that is always None")
    for child in node.children:
        _check_node(child, depth + 1)
    num_children = 1 if kind in WRAPPERS else len(keys)
    if len(node.children) != num_children or (keys and (kind in WRAPPERS or kind == "leaf")):
        raise SchemaError(f"{len(node.children)} children: {kind} of {short_repr(keys)}")
    if (kind == "leaf") != (node.field is not None):
        raise SchemaError(f"a {kind} with the field {short_repr(node.field)}")
    if (kind == "optional") != bool(node.mask):
        raise SchemaError(f"a {kind} with the mask {short_repr(node.mask)}")
    if kind == "optional" and node.children[0].kind == kind:
        raise SchemaError("an optional part of an optional part")
    if kind == "records" and any(part.kind == kind for _, part in node.children[0].walk()):
        raise SchemaError("a list of records has lists in its records")
    if len(set(keys)) != len(keys) or any(len(str(key)) > MAX_NAME_LENGTH for key in keys):
        raise SchemaError(f"the keys {short_repr(keys)} are there twice, or too long")
    if node.is_list and keys != tuple(range(len(keys))):
        raise SchemaError(f"the keys of a {kind} are {short_repr(keys)}")
    if (kind in CLASS_KINDS) != bool(node.name):
        raise SchemaError(f"a {kind} of the name {short_repr(node.name)}")
    if kind in CLASS_KINDS:
        _check_class(node)
    is_tensordict = kind == "tensordict"
    within = {child.kind for child in node.children} - {"leaf", kind}
    if (is_tensordict and (within or not keys)) or (not is_tensordict and node.feature_dims):
        raise SchemaError(f"a {kind} of {short_repr(keys)} with {node.feature_dims} dimensions")


def _check_class(node: Node) -> None:
    """Check that `look_alike` can make a class: it writes source code with these names."""
    kind, name = node.kind, node.name
    if not name.isprintable():
        raise SchemaError(f"{short_repr(name)} is not a name of a class")
    if kind == "namedtuple" and not _is_identifier(name):
        raise SchemaError(f"{short_repr(name)} is not a name of a named tuple")
    for key in node.keys:
        if not _is_identifier(key) or (kind == "namedtuple" and str(key).startswith("_")):
            raise SchemaError(f"{kind} {short_repr(name)}: {short_repr(key)} names no field")


def _is_identifier(name: str | int) -> bool:
    """Return whether a class can have a field of this name, which Python does not normalize."""
    return (
        isinstance(name, str)
        and name.isidentifier()
        and not iskeyword(name)
        and not name.startswith("__")
        and normalize("NFKC", name) == name
    )


def _check_batch_size(node: Node) -> None:
    """Check that the fields of a TensorDict share its batch size."""
    first, *others = (field.shape for field in node.fields)
    size = first[: max(0, len(first) - node.feature_dims)]
    if any(shape[: len(size)] != size for shape in others):
        raise SchemaError("the fields of a TensorDict do not share its batch_size")
