"""Read a schema that nobody has checked: its JSON values may come from a stranger."""

import re
from keyword import iskeyword
from reprlib import repr as short_repr
from typing import Any
from unicodedata import normalize

import torch

from lightning_memmap.errors import SchemaError
from lightning_memmap.schema.fields import DTYPES, TIME_KINDS, TIME_UNITS, Field, dtype_name
from lightning_memmap.schema.names import MAX_NAME_LENGTH, check_names
from lightning_memmap.schema.numbers import MAX_NUMBERS
from lightning_memmap.schema.schema import Schema
from lightning_memmap.schema.structure import (
    CLASS_KINDS,
    FIELD_NODES,
    LEAF,
    MAX_CLASSES,
    MAX_DEPTH,
    WRAPPERS,
    Node,
)

#: Each field is a file and a mapping, of which a process has at most some ten thousand.
_MAX_FIELDS = 4096
_MAX_DIMENSIONS = 64
_KIND = re.compile(r"[a-z]+(:[A-Za-z0-9;]{1,32})?")


def read_schema(value: Any) -> Schema:
    """Read a schema from JSON values that have not been checked, as `Schema.to_json` makes them.

    Args:
        value: A dict with the keys ``fields`` and ``structure``. Other keys are ignored.

    Returns:
        The schema.

    Raises:
        SchemaError: The values describe no schema that `Schema.infer` could have made.
    """
    items = _entry(value, "fields", list)
    if not 1 <= len(items) <= _MAX_FIELDS:
        raise SchemaError(f"{len(items)} fields: a store has 1 to {_MAX_FIELDS}")
    structure = _structure(_entry(value, "structure", dict))
    leaves = structure.fields()
    fields = tuple(map(_field, items))
    check_names(field.name for field in fields)
    schema = Schema(fields, structure)
    if [field.name for field in schema.fields] != [name for name, _ in leaves]:
        raise SchemaError("the fields are not the leaves of the structure")
    in_lists = _check_kinds(schema)
    for field, (name, node) in zip(schema.fields, leaves, strict=True):
        shape = field.of_record.shape if name in in_lists else field.shape
        is_numbers = len(shape) == 1 and not field.is_text
        if is_numbers and shape[0] is not None:
            is_numbers = shape[0] <= MAX_NUMBERS
        if node.kind != "leaf" and not is_numbers:
            raise SchemaError(f"field {name!r}: {field} is not a list of numbers")
    _check_batch_sizes(schema)
    return schema


def _field(value: Any) -> Field:
    """A field. Its name is a string, but otherwise not checked: see `check_names`."""
    dtype = DTYPES.get(_entry(value, "dtype", str))
    if dtype is None:
        known = ", ".join(DTYPES)
        raise SchemaError(f"unknown dtype {short_repr(value['dtype'])}; known: {known}")
    shape = _entry(value, "shape", list)
    fixed = shape[sum(size is None for size in shape) :]
    if any(type(size) is not int or not 0 <= size < 2**40 for size in fixed):
        raise SchemaError(f"shape {short_repr(shape)} is not a list of sizes")
    if len(shape) > _MAX_DIMENSIONS:
        raise SchemaError(f"{len(shape)} dimensions: a field has at most {_MAX_DIMENSIONS}")
    kind = _entry(value, "kind", str)
    if not _KIND.fullmatch(kind):
        raise SchemaError(f"unknown kind {short_repr(kind)}")
    given = value.get("given")
    if given is not None and (not isinstance(given, str) or given not in DTYPES):
        raise SchemaError(f"unknown dtype {short_repr(given)} of the dataset")
    name, given_dtype = _entry(value, "name", str), None if given is None else DTYPES[given]
    found = Field(name, dtype, tuple(shape), kind, given_dtype)
    if found.is_text and (dtype, found.shape) != (torch.uint8, (None,)):
        raise SchemaError(f"a field of {found} is no {kind}")
    meaning, _, unit = kind.partition(":")
    if meaning in TIME_KINDS and found.sample_dtype != torch.int64:
        raise SchemaError(f"a field of {dtype_name(found.sample_dtype)} is no {kind}")
    if meaning in TIME_KINDS and unit.removesuffix(";UTC") not in TIME_UNITS:
        raise SchemaError(f"{kind}: unknown unit of time")
    return found


def _structure(value: Any) -> Node:
    """A structure that a sample could have."""
    structure = _node(value, 0)
    classes = {(node.kind, node.name, node.keys) for _, node in structure.walk() if node.name}
    if len(classes) > MAX_CLASSES:
        raise SchemaError(f"the structure has more than {MAX_CLASSES} classes")
    return structure


def _node(value: Any, depth: int) -> Node:
    if depth > MAX_DEPTH:
        raise SchemaError(f"the structure is nested deeper than {MAX_DEPTH} levels")
    kind = _entry(value, "kind", str)
    if kind in FIELD_NODES:
        return FIELD_NODES[kind]
    if kind in WRAPPERS:
        return _wrapper(kind, _entry(value, "children", list), depth)
    if kind not in ("tuple", "list", "dict", *CLASS_KINDS, "tensordict"):
        raise SchemaError(f"unknown container {short_repr(kind)}")
    keys, children = _entry(value, "keys", list), _entry(value, "children", list)
    name = _entry(value, "name", str) if kind in CLASS_KINDS else ""
    feature_dims = _entry(value, "feature_dims", int) if kind == "tensordict" else 0
    plain = all(type(key) in (str, int) for key in keys)
    if not plain or len(set(keys)) != len(keys) or len(keys) != len(children):
        raise SchemaError(f"the keys {short_repr(keys)} do not fit {len(children)} children")
    if any(len(str(key)) > MAX_NAME_LENGTH for key in keys):
        raise SchemaError(f"a key is longer than {MAX_NAME_LENGTH} characters")
    if kind in ("tuple", "list") and keys != list(range(len(keys))):
        raise SchemaError(f"the keys of a {kind} are {short_repr(keys)}")
    if kind in CLASS_KINDS:
        _check_class(kind, name, keys)
    if kind == "tensordict" and not (keys and feature_dims >= 0):
        raise SchemaError(f"a {kind} of {feature_dims} dimensions and the keys {short_repr(keys)}")
    nodes = tuple(_node(child, depth + 1) for child in children)
    return Node(kind, tuple(keys), nodes, name, feature_dims)


def _wrapper(kind: str, children: list[Any], depth: int) -> Node:
    if len(children) != WRAPPERS[kind]:
        raise SchemaError(f"{len(children)} children: {kind} has {WRAPPERS[kind]}")
    node = Node(kind, (), tuple(_node(child, depth + 1) for child in children))
    if kind == "optional" and (node.children[0].kind == kind or node.children[1] != LEAF):
        raise SchemaError("what may be None has no field that says in which rows it is")
    if kind == "records" and any(part.kind == kind for _, part in node.children[0].walk()):
        raise SchemaError("a list of records has lists in its records")
    return node


def _check_class(kind: str, name: str, keys: list[str | int]) -> None:
    """Check that `look_alike` can make a class: it writes source code with these names."""
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


def _check_kinds(schema: Schema) -> set[str]:
    """Check that fields are in lists, and say what is None, where their kinds mean that.

    Returns:
        The names of the fields in lists.

    Raises:
        SchemaError: They do not.
    """
    in_lists = {name for names in schema.lists.values() for name in names}
    masks = {names[-1] for names in schema.optional.values()}
    for field in schema.fields:
        is_in_list = field.kind.endswith(":list") if field.is_text else field.num_variable > 0
        if field.name in in_lists and not is_in_list:
            raise SchemaError(f"field {field.name!r}: {field} has no records of a list")
        if field.kind.endswith(":list") and field.name not in in_lists:
            raise SchemaError(f"field {field.name!r}: {field.kind} is in no list of records")
        if field.name in in_lists and not field.is_text:
            field = field.of_record
        is_mask = (field.kind, field.dtype, field.shape) == ("mask", torch.bool, ())
        if is_mask != (field.name in masks) or (field.kind == "mask" and not is_mask):
            raise SchemaError(
                f"field {field.name!r}: {field} ({field.kind}) does not say what is None"
            )
    return in_lists


def _check_batch_sizes(schema: Schema) -> None:
    """Check that the fields of each TensorDict share its batch size."""
    if any(node.kind == "tensordict" for _, node in schema.structure.walk()):
        try:
            schema.builder()(
                [
                    torch.empty([size or 0 for size in f.shape], dtype=f.dtype, device="meta")
                    for f in schema.fields
                ]
            )
        except (RuntimeError, ValueError) as error:
            raise SchemaError(f"the fields do not fit into a TensorDict: {error}") from error


def _entry(value: Any, key: str, kind: type) -> Any:
    """The entry of a key. A bool does not pass as an int."""
    if not isinstance(value, dict) or type(value.get(key)) is not kind:
        raise SchemaError(f"{key!r} is missing or is not a {kind.__name__}")
    return value[key]
