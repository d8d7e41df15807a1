"""Read a schema that nobody has checked: its JSON values may come from a stranger.

The types say what a value may be; what follows them are the rules that tie values to each other.
"""

import re
from keyword import iskeyword
from reprlib import repr as short_repr
from typing import Annotated, Any, Literal
from unicodedata import normalize

import msgspec
import torch

from lightning_memmap.errors import SchemaError
from lightning_memmap.schema.fields import (
    DTYPES,
    MAX_NAME_LENGTH,
    TIME_KINDS,
    TIME_UNITS,
    Field,
    check_names,
    dtype_name,
)
from lightning_memmap.schema.leaves import MAX_NUMBERS
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
MAX_FIELDS = 4096
_Size = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]
_Key = str | int
_KIND = re.compile(r"[a-z]+(:[A-Za-z0-9;]{1,32})?")


class _Field(msgspec.Struct):
    name: str
    dtype: str
    shape: Annotated[list[_Size | None], msgspec.Meta(max_length=64)]
    kind: str
    given: str | None = None

    def field(self) -> Field:
        """The field. Its name is not checked: see `check_names`."""
        dtypes = [DTYPES.get(name) for name in (self.dtype, self.given or self.dtype)]
        if dtypes[0] is None or dtypes[1] is None:
            found = short_repr((self.dtype, self.given))
            raise SchemaError(f"unknown dtype among {found}; known: {', '.join(DTYPES)}")
        if None in self.shape[self.shape.count(None) :]:
            raise SchemaError(f"shape {short_repr(self.shape)}: sizes that differ come first")
        if not _KIND.fullmatch(self.kind):
            raise SchemaError(f"unknown kind {short_repr(self.kind)}")
        given = None if self.given is None else dtypes[1]
        field = Field(self.name, dtypes[0], tuple(self.shape), self.kind, given)
        if field.is_text and (field.dtype, field.shape) != (torch.uint8, (None,)):
            raise SchemaError(f"a field of {field} is no {self.kind}")
        meaning, _, unit = self.kind.partition(":")
        if meaning in TIME_KINDS and field.sample_dtype != torch.int64:
            raise SchemaError(f"a field of {dtype_name(field.sample_dtype)} is no {self.kind}")
        if meaning in TIME_KINDS and unit.removesuffix(";UTC") not in TIME_UNITS:
            raise SchemaError(f"{self.kind}: unknown unit of time")
        return field


class _Node(msgspec.Struct):
    kind: Literal[
        "leaf", "sequence", "records", "optional",
        "tuple", "list", "dict", "namedtuple", "dataclass", "tensordict",
    ]  # fmt: skip
    keys: list[_Key] = []
    children: list["_Node"] = []
    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME_LENGTH)] = ""
    feature_dims: Annotated[int, msgspec.Meta(ge=0)] = 0

    def node(self, depth: int = 0) -> Node:
        """The structure from here on."""
        if depth > MAX_DEPTH:
            raise SchemaError(f"the structure is nested deeper than {MAX_DEPTH} levels")
        kind, keys = self.kind, self.keys
        if kind in FIELD_NODES:
            return FIELD_NODES[kind]
        children = tuple(child.node(depth + 1) for child in self.children)
        if kind in WRAPPERS:
            return _wrapper(kind, children)
        if len(set(keys)) != len(keys) or len(keys) != len(children):
            raise SchemaError(f"the keys {short_repr(keys)} do not fit {len(children)} children")
        if any(len(str(key)) > MAX_NAME_LENGTH for key in keys):
            raise SchemaError(f"a key is longer than {MAX_NAME_LENGTH} characters")
        if kind in ("tuple", "list") and keys != list(range(len(keys))):
            raise SchemaError(f"the keys of a {kind} are {short_repr(keys)}")
        if kind in CLASS_KINDS:
            _check_class(kind, self.name, keys)
        if kind == "tensordict" and not keys:
            raise SchemaError("a TensorDict without keys")
        name = self.name if kind in CLASS_KINDS else ""
        dims = self.feature_dims if kind == "tensordict" else 0
        return Node(kind, tuple(keys), children, name, dims)


class _Schema(msgspec.Struct):
    fields: Annotated[list[_Field], msgspec.Meta(min_length=1, max_length=MAX_FIELDS)]
    structure: _Node


def read_schema(value: Any) -> Schema:
    """Read a schema from JSON values that have not been checked, as `Schema.to_json` makes them.

    Args:
        value: A dict with the keys ``fields`` and ``structure``, or its JSON. Other keys are
            ignored.

    Returns:
        The schema.

    Raises:
        SchemaError: The values describe no schema that `Schema.infer` could have made.
    """
    try:
        read = msgspec.json.decode if isinstance(value, bytes) else msgspec.convert
        found = read(value, type=_Schema)
    except (msgspec.DecodeError, RecursionError) as error:
        raise SchemaError(f"{type(error).__name__}: {error}") from None
    structure = found.structure.node()
    classes = {(node.kind, node.name, node.keys) for _, node in structure.walk() if node.name}
    if len(classes) > MAX_CLASSES:
        raise SchemaError(f"the structure has more than {MAX_CLASSES} classes")
    schema = Schema(tuple(field.field() for field in found.fields), structure)
    check_names(field.name for field in schema.fields)
    leaves = structure.fields()
    if [field.name for field in schema.fields] != [name for name, _ in leaves]:
        raise SchemaError("the fields are not the leaves of the structure")
    in_lists = _check_kinds(schema)
    for field, (name, node) in zip(schema.fields, leaves, strict=True):
        shape = field.of_record.shape if name in in_lists else field.shape
        is_numbers = len(shape) == 1 and not field.is_text and (shape[0] or 0) <= MAX_NUMBERS
        if node.kind != "leaf" and not is_numbers:
            raise SchemaError(f"field {name!r}: {field} is not a list of numbers")
    _check_batch_sizes(schema)
    return schema


def _wrapper(kind: str, children: tuple[Node, ...]) -> Node:
    if len(children) != WRAPPERS[kind]:
        raise SchemaError(f"{len(children)} children: {kind} has {WRAPPERS[kind]}")
    if kind == "optional" and (children[0].kind == kind or children[1] != LEAF):
        raise SchemaError("what may be None has no field that says in which rows it is")
    if kind == "records" and any(part.kind == kind for _, part in children[0].walk()):
        raise SchemaError("a list of records has lists in its records")
    return Node(kind, (), children)


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
