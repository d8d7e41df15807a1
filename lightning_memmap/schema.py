"""Fields: what one sample consists of, and how a batch is put together again.

A sample is any nesting of tuple, list, dict, named tuple and dataclass around leaves: tensors,
numpy arrays and scalars, PIL images, numbers and bools. Each leaf is a field with a dtype and a
shape, which every row shares. `Schema` is a value: it touches no file.
"""

import dataclasses
import re
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from keyword import iskeyword
from reprlib import repr as short_repr
from typing import Any
from unicodedata import normalize
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.errors import SchemaError

#: The dtypes that a store holds. Others (float8 and sub-byte types, complex32) do not survive a
#: round trip through tensordict's memory-mapped files.
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32,
        torch.int32, torch.uint64, torch.int64, torch.float16, torch.bfloat16, torch.float32,
        torch.float64, torch.complex64, torch.complex128,
    )
}  # fmt: skip

_MAX_DEPTH = 32
_MAX_NAME_LENGTH = 255 - len(".memmap")  # What file systems take as a file name.
_MAX_DIMENSIONS = 64
#: Each is a file and a mapping, of which a process has at most some ten thousand.
_MAX_FIELDS = 4096
#: Making one from a stranger's schema takes a millisecond.
_MAX_CLASSES = 256
_KIND = re.compile(r"[a-z]+(:[A-Za-z0-9;]{1,32})?")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Field:
    """One leaf of a sample.

    Args:
        name: Where the leaf is in the sample: keys, names and positions joined by dots.
        dtype: The dtype of each row.
        shape: The shape of one row, without a batch dimension.
        kind: What the dataset gave: ``tensor``, ``array``, ``number`` or, for PIL images,
            ``image:<mode>``.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    kind: str

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{_dtype_name(self.dtype)} {tuple(self.shape)}"


@dataclass(frozen=True)
class Node:
    """A container of a sample, or a leaf where ``kind`` is ``leaf``.

    Args:
        kind: ``leaf``, ``tuple``, ``list``, ``dict``, ``namedtuple`` or ``dataclass``.
        keys: The key, name or position of each child.
        children: The children, in the order of ``keys``.
        name: The class name of a named tuple or dataclass.
    """

    kind: str
    keys: tuple[str | int, ...] = ()
    children: tuple["Node", ...] = ()
    name: str = ""


_LEAF = Node("leaf")


@dataclass(frozen=True)
class Schema:
    """The fields of a sample in the order of its leaves, and the nesting around them."""

    fields: tuple[Field, ...]
    structure: Node

    @classmethod
    def from_sample(cls, sample: Any) -> "Schema":
        """Describe a sample.

        Raises:
            SchemaError: A leaf has a type or dtype that cannot be stored, or the sample has no
                leaf. The message names the field.
        """
        leaves: list[tuple[str, Any]] = []
        structure = _describe(sample, (), leaves)
        if not leaves:
            raise SchemaError(f"the sample {sample!r} holds no tensor, array, image or number")
        fields = tuple(_describe_leaf(name, leaf) for name, leaf in leaves)
        _check_names([field.name for field in fields])
        return cls(fields, structure)

    @classmethod
    def from_batch(cls, batch: Any) -> "Schema":
        """Describe a row of a batch, which is any nesting of tensors whose first dimension is the
        rows.

        Raises:
            SchemaError: A leaf is no tensor, has no dimension, or has a dtype that cannot be
                stored. The message names the field.
        """
        leaves: list[tuple[str, Any]] = []
        structure = _describe(batch, (), leaves)
        if not leaves:
            raise SchemaError(f"{batch!r} holds no tensor")
        fields = tuple(_describe_rows(name, leaf) for name, leaf in leaves)
        _check_names([field.name for field in fields])
        return cls(fields, structure)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all fields."""
        return sum(field.row_bytes for field in self.fields)

    @property
    def has_classes(self) -> bool:
        """Whether a named tuple or dataclass is part of a sample."""
        return _has_classes(self.structure)

    def flatten(self, sample: Any) -> list[Tensor | np.ndarray]:
        """Check a sample against this schema and return its leaves in the order of the fields.

        Raises:
            SchemaError: The message names the field, what was found and what was expected.
        """
        leaves: list[Any] = []
        _flatten(sample, self.structure, "", leaves)
        arrays = []
        for field, leaf in zip(self.fields, leaves, strict=True):
            try:
                array, kind = _to_array(field.name, leaf)
                found = (_array_dtype(field.name, array), tuple(array.shape))
            except SchemaError as error:
                raise SchemaError(f"{error}; expected {field} ({field.kind})") from error
            # A palette image and a grey one have the same shape and dtype, and other meanings.
            other_mode = kind.startswith("image") and kind != field.kind
            if found != (field.dtype, field.shape) or other_mode:
                raise SchemaError(
                    f"field {field.name!r}: found {_dtype_name(found[0])} {found[1]}"
                    f" ({kind}), expected {field} ({field.kind})"
                )
            arrays.append(array)
        return arrays

    def flatten_batch(self, batch: Any) -> list[Tensor]:
        """Check a batch of rows against this schema and return its leaves in the order of the
        fields.

        Returns:
            One tensor of shape (B, *field shape) per field, where the batch has it.

        Raises:
            SchemaError: The message names the field, what was found and what was expected.
        """
        leaves: list[Any] = []
        _flatten(batch, self.structure, "", leaves)
        for field, leaf in zip(self.fields, leaves, strict=True):
            found = _describe_rows(field.name, leaf)
            if found != field:
                raise SchemaError(
                    f"field {field.name!r}: found rows of {found}, expected rows of {field}"
                )
            if len(leaf) != len(leaves[0]):
                raise SchemaError(
                    f"field {field.name!r}: found {len(leaf)} rows, and {len(leaves[0])} of field"
                    f" {self.fields[0].name!r}"
                )
        return [leaf.detach().resolve_conj().resolve_neg() for leaf in leaves]

    def builder(self, sample: Any = None) -> Callable[[Sequence[Tensor]], Any]:
        """A function that nests one tensor per field the way ``default_collate`` would: tuples
        become lists, every other container keeps its kind.

        Args:
            sample: A sample of the dataset, for the classes of its named tuples and dataclasses.
                Without it, look-alikes with the same names are made.
        """
        counter = iter(range(len(self.fields)))
        return _builder(self.structure, sample, counter)

    def to_json(self) -> dict[str, Any]:
        """This schema as JSON values."""
        return {
            "fields": [
                {
                    "name": field.name,
                    "dtype": _dtype_name(field.dtype),
                    "shape": list(field.shape),
                    "kind": field.kind,
                }
                for field in self.fields
            ],
            "structure": _node_to_json(self.structure),
        }

    @classmethod
    def from_json(cls, value: Any) -> "Schema":
        """Read a schema from JSON values that nobody has checked.

        Raises:
            SchemaError: The values describe no schema that `from_sample` could have made.
        """
        items = _entry(value, "fields", list)
        if not 1 <= len(items) <= _MAX_FIELDS:
            raise SchemaError(f"{len(items)} fields: a store has 1 to {_MAX_FIELDS}")
        structure = _node_from_json(_entry(value, "structure", dict), 0)
        if len(set(_classes(structure))) > _MAX_CLASSES:
            raise SchemaError(f"the structure has more than {_MAX_CLASSES} classes")
        names = _leaf_names(structure, ())
        _check_names(names)
        fields = tuple(map(_field_from_json, items))
        if [field.name for field in fields] != names:
            raise SchemaError("the fields are not the leaves of the structure")
        return cls(fields, structure)


def _has_classes(node: Node) -> bool:
    return bool(node.name) or any(_has_classes(child) for child in node.children)


def _classes(node: Node) -> Iterator[tuple[str, str, tuple[str | int, ...]]]:
    """What tells one class of a sample from another."""
    if node.name:
        yield node.kind, node.name, node.keys
    for child in node.children:
        yield from _classes(child)


def _check_names(names: list[str]) -> None:
    seen: dict[str, str] = {}
    for name in names:
        _check_name_length(name)
        # Compared without case, for file systems that do the same.
        if name.casefold() in seen:
            raise SchemaError(
                f"the fields {seen[name.casefold()]!r} and {name!r} would share one file name:"
                " rename one of them in the dataset"
            )
        seen[name.casefold()] = name


def _check_name_length(name: str) -> None:
    if len(name) > _MAX_NAME_LENGTH:
        raise SchemaError(
            f"field {short_repr(name)}: the name is longer than the {_MAX_NAME_LENGTH} characters"
            " that fit into a file name: use shorter keys in the dataset"
        )


def _part(key: str | int) -> str:
    # Percent-encoding, with "~" for "%", keeps names unique and safe as file names; tensordict
    # encodes a "%" once more. A dot separates levels.
    encoded = quote(str(key), safe="", errors="surrogatepass")
    return encoded.replace(".", "%2E").replace("~", "%7E").replace("%", "~") or "~"


def _field_name(path: tuple[str | int, ...]) -> str:
    return ".".join(_part(key) for key in path) or "value"


def _is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _children(value: Any, path: tuple[str | int, ...]) -> tuple[str, list[Any], list[Any]] | None:
    """Kind, keys and values of a container; None for a leaf."""
    if isinstance(value, Tensor):
        return None
    if isinstance(value, Mapping):
        for key in value:
            # Not their subclasses either: a store could not give an enum's member back.
            if type(key) not in (str, int):
                raise SchemaError(
                    f"field {_field_name(path)!r}: the dict key {key!r} is neither a plain string"
                    " nor a plain integer: rename it in the dataset"
                )
        return "dict", list(value), list(value.values())
    if _is_namedtuple(value):
        return "namedtuple", list(value._fields), list(value)
    if isinstance(value, (tuple, list)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return kind, list(range(len(value))), list(value)
    if _is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return "dataclass", names, [getattr(value, name) for name in names]
    return None


def _describe(value: Any, path: tuple[str | int, ...], leaves: list[tuple[str, Any]]) -> Node:
    if len(path) > _MAX_DEPTH:
        raise SchemaError(f"the sample is nested deeper than {_MAX_DEPTH} levels")
    found = _children(value, path)
    if found is None:
        leaves.append((_field_name(path), value))
        return _LEAF
    kind, keys, values = found
    children = tuple(
        _describe(child, (*path, key), leaves) for key, child in zip(keys, values, strict=True)
    )
    name = type(value).__name__ if kind in ("namedtuple", "dataclass") else ""
    return Node(kind, tuple(keys), children, name)


def _flatten(value: Any, node: Node, name: str, leaves: list[Any]) -> None:
    if node is _LEAF or node.kind == "leaf":
        leaves.append(value)
        return
    found = _children(value, ())
    if found is None or found[0] != node.kind:
        raise SchemaError(
            f"field {name or 'value'!r}: found {type(value).__name__}, expected {node.kind}"
            f" of {list(node.keys)}"
        )
    _, keys, values = found
    if tuple(keys) != node.keys:
        if node.kind != "dict" or set(keys) != set(node.keys):
            raise SchemaError(
                f"field {name or 'value'!r}: found {node.kind} of {keys}, expected"
                f" {list(node.keys)}"
            )
        values = [value[key] for key in node.keys]
    for key, child, child_node in zip(node.keys, values, node.children, strict=True):
        part = _part(key)
        _flatten(child, child_node, f"{name}.{part}" if name else part, leaves)


def _check_dense(name: str, leaf: Tensor) -> None:
    if leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_nested:
        raise SchemaError(
            f"field {name!r}: found a {leaf.layout} tensor; only dense tensors are stored:"
            " convert it, or pad it to one shape"
        )


def _to_array(name: str, leaf: Any) -> tuple[Tensor | np.ndarray, str]:
    """A leaf as a dense CPU tensor or numpy array, and its kind."""
    if isinstance(leaf, Tensor):
        _check_dense(name, leaf)
        leaf = leaf.detach()
        if leaf.is_conj() or leaf.is_neg():
            leaf = leaf.resolve_conj().resolve_neg()
        return leaf.cpu(), "tensor"
    if isinstance(leaf, (np.ndarray, np.generic)):
        return np.asarray(leaf), "array"
    if isinstance(leaf, (bool, int, float, complex)):
        try:
            return np.asarray(leaf, _NUMBERS.get(type(leaf))), "number"
        except OverflowError:
            raise SchemaError(
                f"field {name!r}: found the number {leaf}, which does not fit into int64"
            ) from None
    image = sys.modules.get("PIL.Image")
    if image is not None and isinstance(leaf, image.Image):
        pixels = np.asarray(leaf)
        if pixels.ndim == 2:
            return pixels[None], f"image:{leaf.mode}"
        return np.ascontiguousarray(np.moveaxis(pixels, -1, 0)), f"image:{leaf.mode}"
    raise SchemaError(
        f"field {name!r}: found {type(leaf).__name__}, which cannot be stored; give a tensor, a"
        " numpy array, a PIL image, a number or a bool (text: token or byte codes padded to one"
        " length)"
    )


_NUMBERS: dict[type, Any] = {
    bool: np.bool_,
    int: np.int64,
    float: np.float64,
    complex: np.complex128,
}


def _array_dtype(name: str, array: Tensor | np.ndarray) -> torch.dtype:
    if isinstance(array, Tensor):
        dtype = array.dtype
    else:
        found = _FROM_NUMPY.get(array.dtype.newbyteorder("="))
        if found is None:
            raise SchemaError(f"field {name!r}: found a numpy array of dtype {array.dtype}")
        dtype = found
    if _dtype_name(dtype) not in DTYPES:
        raise SchemaError(
            f"field {name!r}: found dtype {_dtype_name(dtype)}, which does not survive in a"
            f" memory-mapped file; convert it in the dataset to one of {', '.join(DTYPES)}"
        )
    return dtype


_FROM_NUMPY = {
    np.dtype(name): DTYPES[name]
    for name in DTYPES
    if name != "bfloat16"
}  # fmt: skip


def _describe_leaf(name: str, leaf: Any) -> Field:
    array, kind = _to_array(name, leaf)
    return Field(name, _array_dtype(name, array), tuple(array.shape), kind)


def _describe_rows(name: str, leaf: Any) -> Field:
    """The field of which a tensor holds rows."""
    if not isinstance(leaf, Tensor):
        raise SchemaError(
            f"field {name!r}: found {type(leaf).__name__}; give tensors whose first dimension is"
            " the rows of the batch"
        )
    if leaf.ndim == 0:
        raise SchemaError(
            f"field {name!r}: found a tensor without dimensions; its first dimension must be the"
            " rows of the batch"
        )
    _check_dense(name, leaf)
    return Field(name, _array_dtype(name, leaf), tuple(leaf.shape[1:]), "tensor")


def _builder(node: Node, sample: Any, counter: Any) -> Callable[[Sequence[Tensor]], Any]:
    if node.kind == "leaf":
        index = next(counter)
        return lambda leaves: leaves[index]
    found = _children(sample, ()) if sample is not None else None
    samples: Sequence[Any] = [None] * len(node.keys)
    if found is not None and (found[0] != node.kind or set(found[1]) != set(node.keys)):
        found = None
    if found is not None:
        by_key = dict(zip(found[1], found[2], strict=True))
        samples = [by_key[key] for key in node.keys]
    children = [_builder(*pair, counter) for pair in zip(node.children, samples, strict=True)]
    keys = node.keys
    if node.kind in ("tuple", "list"):
        return lambda leaves: [child(leaves) for child in children]
    if node.kind == "dict":
        pairs = list(zip(keys, children, strict=True))
        return lambda leaves: {key: child(leaves) for key, child in pairs}
    names = [str(key) for key in keys]
    class_type: Any = type(sample) if found else _look_alike(node.kind, node.name, tuple(names))
    if node.kind == "namedtuple":
        return lambda leaves: class_type._make(child(leaves) for child in children)

    def build_dataclass(leaves: Sequence[Tensor]) -> Any:
        # Not through __init__: what a class checks of one sample need not hold for a batch.
        batch = object.__new__(class_type)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(batch, name, child(leaves))
        return batch

    return build_dataclass


@lru_cache(_MAX_CLASSES)
def _look_alike(kind: str, name: str, names: tuple[str, ...]) -> type:
    if kind == "namedtuple":
        made: type = namedtuple(name, names)  # type: ignore[misc]
        return made
    return dataclasses.make_dataclass(name, names)


def _node_to_json(node: Node) -> dict[str, Any]:
    if node.kind == "leaf":
        return {"kind": "leaf"}
    value: dict[str, Any] = {"kind": node.kind, "keys": list(node.keys)}
    if node.name:
        value["name"] = node.name
    value["children"] = [_node_to_json(child) for child in node.children]
    return value


def _field_from_json(item: Any) -> Field:
    dtype = DTYPES.get(_entry(item, "dtype", str))
    if dtype is None:
        raise SchemaError(f"unknown dtype {short_repr(item['dtype'])}; known: {', '.join(DTYPES)}")
    shape = _entry(item, "shape", list)
    if any(type(size) is not int or not 0 <= size < 2**40 for size in shape):
        raise SchemaError(f"shape {short_repr(shape)} is not a list of sizes")
    if len(shape) > _MAX_DIMENSIONS:
        raise SchemaError(f"{len(shape)} dimensions: a field has at most {_MAX_DIMENSIONS}")
    name, kind = _entry(item, "name", str), _entry(item, "kind", str)
    if not _KIND.fullmatch(kind):
        raise SchemaError(f"unknown kind {short_repr(kind)}")
    return Field(name, dtype, tuple(shape), kind)


def _node_from_json(value: Any, depth: int) -> Node:
    if depth > _MAX_DEPTH:
        raise SchemaError(f"the structure is nested deeper than {_MAX_DEPTH} levels")
    kind = _entry(value, "kind", str)
    if kind == "leaf":
        return _LEAF
    if kind not in ("tuple", "list", "dict", "namedtuple", "dataclass"):
        raise SchemaError(f"unknown container {short_repr(kind)}")
    keys, children = _entry(value, "keys", list), _entry(value, "children", list)
    name = _entry(value, "name", str) if kind in ("namedtuple", "dataclass") else ""
    plain = all(type(key) in (str, int) for key in keys)
    if not plain or len(set(keys)) != len(keys) or len(keys) != len(children):
        raise SchemaError(f"the keys {short_repr(keys)} do not fit {len(children)} children")
    if any(len(str(key)) > _MAX_NAME_LENGTH for key in keys):
        raise SchemaError(f"a key is longer than {_MAX_NAME_LENGTH} characters")
    if kind in ("tuple", "list") and keys != list(range(len(keys))):
        raise SchemaError(f"the keys of a {kind} are {short_repr(keys)}")
    if kind in ("namedtuple", "dataclass"):
        _check_class(kind, name, keys)
    nodes = tuple(_node_from_json(child, depth + 1) for child in children)
    return Node(kind, tuple(keys), nodes, name)


def _check_class(kind: str, name: str, keys: list[str | int]) -> None:
    """Check that `_look_alike` can make a class: it writes source code with these names."""
    if not 0 < len(name) <= _MAX_NAME_LENGTH or not name.isprintable():
        raise SchemaError(f"{short_repr(name)} is no name of a class")
    if kind == "namedtuple" and not _is_identifier(name):
        raise SchemaError(f"{short_repr(name)} is no name of a named tuple")
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


def _leaf_names(node: Node, path: tuple[str | int, ...]) -> list[str]:
    if node.kind == "leaf":
        name = _field_name(path)
        _check_name_length(name)
        return [name]
    return [
        name
        for key, child in zip(node.keys, node.children, strict=True)
        for name in _leaf_names(child, (*path, key))
    ]


def _entry(value: Any, key: str, kind: type) -> Any:
    if not isinstance(value, dict) or type(value.get(key)) is not kind:
        raise SchemaError(f"{key!r} is missing or is not a {kind.__name__}")
    return value[key]
