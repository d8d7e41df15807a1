"""Check a schema that was read from JSON values, which may be untrusted.

The types say what a value may be; what follows them are the rules that tie values to each other.
"""

from keyword import iskeyword
from reprlib import repr as short_repr
from typing import Any
from unicodedata import normalize

import torch

from lightning_memmap.errors import SchemaError
from lightning_memmap.schema.fields import DTYPES, MAX_NAME_LENGTH, Field
from lightning_memmap.schema.kinds import NUMBERS, Text
from lightning_memmap.schema.schema import Schema
from lightning_memmap.schema.structure import (
    CLASS_KINDS,
    LEAF,
    MAX_CLASSES,
    MAX_DEPTH,
    WRAPPERS,
    Node,
)


def check_schema(schema: Schema) -> None:
    """Check what ties the values of a schema to each other."""
    _check_node(schema.structure, 0)
    nodes = list(schema.structure.walk())
    if len({(node.kind, node.name, node.keys) for _, node in nodes if node.name}) > MAX_CLASSES:
        raise SchemaError(f"the structure has more than {MAX_CLASSES} classes")
    if [field.name for field in schema.fields] != schema.structure.field_names():
        raise SchemaError("the fields are not the leaves of the structure")
    in_lists = {name for names in schema.lists.values() for name in names}
    masks = {names[-1] for names in schema.optional.values()}
    for field in schema.fields:
        _check_field(field, field.name in in_lists, field.name in masks)
    _check_batch_sizes(schema)


def read_dtype(kind: type, value: Any) -> torch.dtype:
    """The dtype of a name."""
    assert kind is torch.dtype
    if not isinstance(value, str) or value not in DTYPES:
        raise ValueError(f"unknown dtype {short_repr(value)}; known: {', '.join(DTYPES)}")
    return DTYPES[value]


def _check_field(field: Field, is_in_list: bool, is_mask: bool) -> None:
    """Check that shape and dtype are of the field's kind, and that it is where its kind belongs."""
    kind, shape = field.kind, field.shape
    what = f"field {field.name!r}: {field} ({kind})"
    if None in shape[field.num_variable :]:
        raise SchemaError(f"{what}: sizes that differ come first")
    if is_in_list != (kind.many if isinstance(kind, Text) else is_in_list and shape[:1] == (None,)):
        raise SchemaError(f"{what} is not in the list of records that it should be in")
    if kind.dtype not in (None, field.dtype) or kind.shape not in (None, shape):
        raise SchemaError(f"{what} is of another dtype or shape")
    record = field.of_record if is_in_list else field
    if is_mask and (field.dtype, record.shape, kind) != (torch.bool, (), NUMBERS):
        raise SchemaError(f"{what} does not say what is None")


def _check_node(node: Node, depth: int) -> None:
    """Check the structure from a node on."""
    kind, keys = node.kind, node.keys
    if depth > MAX_DEPTH:
        raise SchemaError(f"the structure is nested deeper than {MAX_DEPTH} levels")
    if kind == "none":
        raise SchemaError("a part that is always None")
    for child in node.children:
        _check_node(child, depth + 1)
    num_children = 0 if node.is_field else WRAPPERS.get(kind, len(keys))
    if len(node.children) != num_children or (num_children != len(keys) and keys):
        raise SchemaError(f"{len(node.children)} children: {kind} of {short_repr(keys)}")
    if kind == "optional" and (node.children[0].kind == kind or node.children[1] != LEAF):
        raise SchemaError("what may be None has no field that says in which rows it is")
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
    """Whether a class can have a field of this name, and the same name once Python has read it."""
    return (
        isinstance(name, str)
        and name.isidentifier()
        and not iskeyword(name)
        and not name.startswith("__")
        and normalize("NFKC", name) == name
    )


def _check_batch_sizes(schema: Schema) -> None:
    """Check that the fields of each TensorDict share its batch size."""
    shapes = {field.name: field.shape for field in schema.fields}
    for path, node in schema.structure.walk():
        if node.kind == "tensordict":
            first, *others = (shapes[name] for name in node.field_names(path))
            size = first[: max(0, len(first) - node.feature_dims)]
            if any(shape[: len(size)] != size for shape in others):
                raise SchemaError("the fields of a TensorDict do not share its batch_size")
