"""Merging: the structure and the fields that have the samples of two."""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from lightning_memmap.errors import SchemaError
from lightning_memmap.schema.fields import PLAIN_KINDS, Field, dtype_name
from lightning_memmap.schema.names import field_name
from lightning_memmap.schema.structure import LEAF, MASK, NONE, SEQUENCE, Node, Path


class Part(NamedTuple):
    """What some samples have at a path."""

    node: Node
    """Its structure."""
    fields: Mapping[Path, Field]
    """Its fields by path; there may be those of other parts among them."""


_EMPTY_LIST = Part(Node("list"), {})


def merge(one: Part, other: Part, path: Path = ()) -> Part | None:
    """Find what has the samples of two.

    They may differ in the lengths of lists, in the sizes of fields, in what is None, and in the
    order of a dict's keys.

    Args:
        one: What some samples have, whose order of keys the result has.
        other: What others have.
        path: Where the two are in the sample.

    Returns:
        The structure and its fields; None if the two differ in more than that.

    Raises:
        SchemaError: They differ in the dtypes of a list of numbers, or in the number of records of
            a list within records. The message names it.
    """
    node, other_node = one.node, other.node
    kinds = {node.kind, other_node.kind}
    if kinds & {"none", "optional"}:
        return _merge_optional(one, other, path)
    if node.is_field and other_node.is_field and (node.kind == "leaf") == (other_node == LEAF):
        field = one.fields[path].merged(other.fields[path])
        if field is None and node.kind != "leaf":
            raise _mixed_error(path, (one.fields[path], other.fields[path]))
        if field is None:
            return None
        return Part(node, {path: field})
    has_fields = node.is_field or other_node.is_field
    is_of_other_length = has_fields or len(node.keys) != len(other_node.keys)
    if (
        _is_any_list(node)
        and _is_any_list(other_node)
        and ("records" in kinds or is_of_other_length)
    ):
        numbers = _numbers(one, path) | _numbers(other, path)
        if None in numbers or "records" in kinds:
            return _merge_records(one, other, path)
        known = [field for field in numbers if field is not None]
        if len(known) > 1:
            raise _mixed_error(path, known)
        return Part(SEQUENCE, {path: known[0]}) if known else Part(node, {})
    if (node.kind, node.name, {*node.keys}) != (
        other_node.kind,
        other_node.name,
        {*other_node.keys},
    ):
        return None
    others = dict(zip(other_node.keys, other_node.children, strict=True))
    parts = []
    for key, child in zip(node.keys, node.children, strict=True):
        pair = Part(child, one.fields), Part(others[key], other.fields)
        if (merged := merge(*pair, (*path, key))) is None:
            return None
        parts.append(merged)
    return _container(node, parts)


def declared(
    part: Part, lists: Collection[str], optional: Collection[str], path: Path = ()
) -> Part:
    """Find what samples have that may differ from one that is known.

    Args:
        part: What the one has.
        lists: Names of the lists that may have other numbers of records.
        optional: Names of what may be None.
        path: Where the part is in the sample.

    Returns:
        The structure and its fields. A list whose parts are not alike is as it was.

    Raises:
        SchemaError: A list is within the records of another one.
    """
    node, fields = part
    name = field_name(path)
    # What is None, and what a list consists of, has the path of the whole.
    others = [other for other in optional if other != name]
    if node.kind == "optional" or (name in optional and path and node.kind != "none"):
        inner = node.children[0] if node.kind == "optional" else node
        return _optional(declared(Part(inner, fields), lists, others, path), path)
    if name in lists and node.is_list and node.keys:
        part = _merge_records(part, _EMPTY_LIST, path) or part
    if part.node.kind == "records":
        (record,) = _records(part, path)
        return _list_of(declared(record, (), others, path))
    if node.is_field:
        return Part(node, {path: fields[path]})
    pairs = zip(node.children, node.paths(path), strict=True)
    return _container(node, [declared(Part(c, fields), lists, optional, at) for c, at in pairs])


def _container(node: Node, parts: Collection[Part]) -> Part:
    """A container with other children."""
    fields = {path: field for part in parts for path, field in part.fields.items()}
    return Part(dataclasses.replace(node, children=tuple(part.node for part in parts)), fields)


def _list_of(record: Part) -> Part:
    """A list of records."""
    fields = {path: field.in_list for path, field in record.fields.items()}
    return Part(Node("records", (), (record.node,)), fields)


def _merge_optional(one: Part, other: Part, path: Path) -> Part | None:
    given = [
        Part(part.node.children[0], part.fields) if part.node.kind == "optional" else part
        for part in (one, other)
        if part.node.kind != "none"
    ]
    if not given:
        return Part(NONE, {})
    part = given[0] if len(given) == 1 else merge(given[0], given[1], path)
    return None if part is None else _optional(part, path)


def _optional(part: Part, path: Path) -> Part:
    """A part that is None in some rows, with the field that says in which."""
    if part.node.kind == "records" and part.node.children[0].kind == "optional":
        raise SchemaError(
            f"field {field_name(path)!r}: some rows are None in place of a list, and some lists"
            " have None in them, and only one of these can be stored: give an empty list in place"
            " of the rows that are None, or leave None out of the lists"
        )
    fields = {found: part.fields[found] for found in field_paths(part.node, path)}
    mask = (*path, MASK)
    if mask in fields:
        raise SchemaError(
            f"field {field_name(mask)!r}: {field_name(path)!r} is None in some rows, and the field"
            " of this name is to say in which: rename it in the dataset"
        )
    fields[mask] = Field(field_name(mask), torch.bool, (), "mask")
    return Part(Node("optional", (), (part.node, LEAF)), fields)


def _merge_records(one: Part, other: Part, path: Path) -> Part | None:
    """Merge all records of two lists into one."""
    records = [*_records(one, path), *_records(other, path)]
    if not records:
        return Part(one.node, {})
    merged = records[0]
    for record in records[1:]:
        if (found := merge(merged, record, path)) is None:
            return None
        merged = found
    for inner, node in merged.node.walk(path):
        if node.kind == "records":
            raise SchemaError(
                f"field {field_name(inner)!r}: the records of a list have lists of different"
                " lengths there, which cannot be stored: join them into one array or text each"
            )
    return _list_of(merged)


def _records(part: Part, path: Path) -> Iterator[Part]:
    """The records of a list, each as if it were the only one."""
    node, fields = part
    if node.kind == "records":
        (record,) = node.children
        yield Part(record, {inner: fields[inner].of_record for inner in field_paths(record, path)})
        return
    for inner, child in zip(node.paths(path), node.children, strict=True):
        yield _as_record(Part(child, fields), inner, path)


def _as_record(part: Part, path: Path, new: Path) -> Part:
    """A part of a record, in which lists of numbers are one field, however few these are.

    Args:
        part: The part.
        path: Where it is in the sample.
        new: Where it is in a record.
    """
    node, fields = part
    if node.is_field:
        field = dataclasses.replace(fields[path], name=field_name(new))
        return Part(LEAF if node == LEAF else SEQUENCE, {new: field})
    numbers = _numbers(part, path) if _is_any_list(node) else set()
    if len(numbers) == 1 and (number := numbers.pop()) is not None:
        field = dataclasses.replace(number, name=field_name(new), shape=(len(node.keys),))
        return Part(SEQUENCE, {new: field})
    found = zip(node.children, node.paths(path), node.paths(new), strict=True)
    return _container(node, [_as_record(Part(child, fields), old, at) for child, old, at in found])


def field_paths(node: Node, path: Path = ()) -> list[Path]:
    """List where the fields of a structure are.

    Args:
        node: The structure.
        path: Where it is in a sample.
    """
    return [found for found, part in node.walk(path) if part.is_field]


def _is_any_list(node: Node) -> bool:
    """Whether this is a list or tuple, one that is a field included."""
    return node.is_list or node.kind in ("sequence", "records")


def _numbers(part: Part, path: Path) -> set[Field | None]:
    """The fields that have the numbers of a list, any count of them, in the dtype of samples; None
    among them where it has other things."""
    node = part.node
    if node.kind == "records":
        return {None}
    paths = [path] if node.is_field else node.paths(path)
    kinds = {"number": "array"}
    return {
        Field(field_name(path), field.sample_dtype, (None,), kinds.get(field.kind, field.kind))
        if field is not None
        and (node.is_field or (field.shape == () and field.kind in PLAIN_KINDS))
        else None
        for field in map(part.fields.get, paths)
    }


def _mixed_error(path: Path, fields: Iterable[Field]) -> SchemaError:
    found = sorted({f"{dtype_name(field.sample_dtype)} ({field.kind})" for field in fields})
    return SchemaError(
        f"Rows of {field_name(path)!r} are lists of {' and '.join(found)}: give all numbers one"
        " dtype, such as [1.0, 2.0], or arrays in place of the lists"
    )
