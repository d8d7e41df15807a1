"""Validate a schema that was decoded from JSON, which may be untrusted.

Decoding checks the type and range of each value. The functions here check how values relate.
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
    """Raise a SchemaError if the values of a schema contradict each other."""
    _check_node(schema.structure, ())
    schema.check_values()
    nodes = [node for _, node in schema.structure.walk()]
    if len({(node.kind, node.name, node.keys) for node in nodes if node.name}) > MAX_CLASSES:
        raise SchemaError(f"the structure has more than {MAX_CLASSES} classes")
    if not 1 <= len(schema.fields) <= MAX_FIELDS:
        raise SchemaError(f"{len(schema.fields)} fields: a store has 1 to {MAX_FIELDS}")


def read_dtype(python_type: type, value: Any) -> torch.dtype:
    """Return the dtype with a name. Called by msgspec for values of type ``python_type``."""
    assert python_type is torch.dtype
    if not isinstance(value, str) or value not in DTYPES:
        raise ValueError(f"unknown dtype {short_repr(value)}; known: {', '.join(DTYPES)}")
    return DTYPES[value]


def _check_node(node: Node, path: Path, depth: int = 0) -> None:
    """Check a node and its descendants."""
    kind = node.kind
    keys = node.keys
    if depth > MAX_DEPTH:
        raise SchemaError(f"the structure is nested deeper than {MAX_DEPTH} levels")
    if kind == "none":
        raise SchemaError("a part is None in all rows")
    num_children = 1 if kind in WRAPPERS else len(keys)
    if len(node.children) != num_children or (keys and (kind in WRAPPERS or kind == "leaf")):
        raise SchemaError(f"a {kind} of {short_repr(keys)} has {len(node.children)} children")
    for child_path, child in node.items(path):
        _check_node(child, child_path, depth + 1)
    if (kind == "leaf") != (node.field is not None):
        raise SchemaError(f"a {kind} has the field {short_repr(node.field)}")
    if (kind == "optional") != bool(node.mask):
        raise SchemaError(f"a {kind} has the mask {short_repr(node.mask)}")
    if kind == "optional" and node.children[0].kind == kind:
        raise SchemaError("an optional part is nested in another one")
    if kind == "records" and any(part.kind == kind for _, part in node.children[0].walk()):
        raise SchemaError("a list of records is nested in another one")
    if len(set(keys)) != len(keys) or any(len(str(key)) > MAX_NAME_LENGTH for key in keys):
        raise SchemaError(f"the keys {short_repr(keys)} are not unique, or too long")
    if node.is_list and keys != tuple(range(len(keys))):
        raise SchemaError(f"the keys of a {kind} are {short_repr(keys)}")
    if (kind in CLASS_KINDS) != bool(node.name):
        raise SchemaError(f"a {kind} has the class name {short_repr(node.name)}")
    if node.feature_dims and kind != "tensordict":
        raise SchemaError(f"a {kind} has feature_dims={node.feature_dims}")
    if node.field is not None:
        _check_field(node.field, path)
    if node.mask and node.mask != field_name((*path, MASK)):
        raise SchemaError(f"the name of mask {short_repr(node.mask)} does not match its path")
    if kind in CLASS_KINDS:
        _check_class(node)
    if kind == "tensordict":
        _check_tensordict(node)


def _check_field(field: Field, path: Path) -> None:
    """Check that the name of a leaf matches its path, and its shape and dtype match its kind."""
    kind = field.kind
    if field.name != field_name(path):
        raise SchemaError(f"the name of field {short_repr(field.name)} does not match its path")
    description = f"field {field.name!r}: {field} ({kind})"
    if None in field.shape[field.num_variable :]:
        raise SchemaError(f"{description}: variable dimensions must come first")
    if isinstance(kind, Text) and kind.many:
        raise SchemaError(f"{description} is outside a list of records, so it cannot be a list")
    if kind.dtype not in (None, field.dtype) or kind.shape not in (None, field.shape):
        raise SchemaError(f"{description}: the dtype or shape does not match the kind")


def _check_class(node: Node) -> None:
    """Check the names of a class. Creating it evaluates source code with these names."""
    is_namedtuple = node.kind == "namedtuple"
    name = node.name
    if not name.isprintable() or (is_namedtuple and not _is_identifier(name)):
        raise SchemaError(f"{short_repr(name)} is not a valid name of a {node.kind}")
    for key in node.keys:
        if not _is_identifier(key) or (is_namedtuple and str(key).startswith("_")):
            raise SchemaError(
                f"{node.kind} {short_repr(name)}: {short_repr(key)} is not a valid field name"
            )


def _is_identifier(name: str | int) -> bool:
    """Return whether a name is an identifier that Python does not normalize to another one."""
    return (
        isinstance(name, str)
        and name.isidentifier()
        and not iskeyword(name)
        and not name.startswith("__")
        and normalize("NFKC", name) == name
    )


def _check_tensordict(node: Node) -> None:
    """Check that a TensorDict has fields alone, which share its batch size."""
    other_kinds = {child.kind for child in node.children} - {"leaf", "tensordict"}
    if other_kinds or not node.keys:
        keys = short_repr(node.keys)
        raise SchemaError(f"a tensordict of {keys} has children {sorted(other_kinds)}")
    shape = node.fields[0].shape
    batch_size = shape[: max(0, len(shape) - node.feature_dims)]
    if any(field.shape[: len(batch_size)] != batch_size for field in node.fields):
        raise SchemaError("the fields of a TensorDict do not share its batch_size")
