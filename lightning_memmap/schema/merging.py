"""Merging: the structure that has the samples of two."""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch

from lightning_memmap.errors import SchemaError
from lightning_memmap.schema.fields import PLAIN_KINDS, Field, dtype_name, field_name
from lightning_memmap.schema.structure import LEAF, MASK, NONE, SEQUENCE, Node, Path

_EMPTY_LIST = Node("list")


def merge(
    one: Node,
    other: Node,
    fields: Mapping[Path, Field],
    other_fields: Mapping[Path, Field],
    merged: list[Field],
    path: Path = (),
) -> Node | None:
    """Find the structure that has the samples of two.

    They may differ in the lengths of lists, in the sizes of fields, in what is None, and in the
    order of a dict's keys.

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
        SchemaError: They differ in the dtypes of a list of numbers, or in the number of records of
            a list within records. The message names it.
    """
    if {one.kind, other.kind} & {"none", "optional"}:
        return _merge_optional(one, other, fields, other_fields, merged, path)
    if one.is_field and other.is_field and (one.kind == "leaf") == (other.kind == "leaf"):
        field = fields[path].merged(other_fields[path])
        if field is None and one.kind != "leaf":
            raise _mixed_error(path, (fields[path], other_fields[path]))
        if field is None:
            return None
        merged.append(field)
        return SEQUENCE if one.kind != "leaf" and field.num_variable else one
    has_records = "records" in (one.kind, other.kind)
    is_of_other_length = one.is_field or other.is_field or len(one.keys) != len(other.keys)
    if _is_list(one) and _is_list(other) and (has_records or is_of_other_length):
        numbers = _numbers(one, fields, path) | _numbers(other, other_fields, path)
        if None in numbers or has_records:
            return _merge_records(one, other, fields, other_fields, merged, path)
        known = [field for field in numbers if field is not None]
        if len(known) > 1:
            raise _mixed_error(path, known)
        merged += known
        return SEQUENCE if known else one
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


def declared(
    node: Node,
    fields: Mapping[Path, Field],
    lists: Collection[str],
    optional: Collection[str],
    merged: list[Field],
    path: Path = (),
) -> Node:
    """Find the structure of samples that may differ from one that is known.

    Args:
        node: The structure of the one.
        fields: Its fields, by path.
        lists: Names of the lists that may have other numbers of records.
        optional: Names of what may be None.
        merged: The fields of the result are appended to this list.
        path: Where the node is in the sample.

    Returns:
        The structure. A list whose parts are not alike is as it was.

    Raises:
        SchemaError: A list is within the records of another one.
    """
    name = field_name(path)
    # What is None, and what a list consists of, has the path of the whole.
    others = [other for other in optional if other != name]
    if node.kind == "optional" or (name in optional and path and node.kind != "none"):
        part = node.children[0] if node.kind == "optional" else node
        return _optional(declared(part, fields, lists, others, merged, path), path, merged)
    if name in lists and node.is_list and node.keys:
        found = list[Field]()
        records = _merge_records(node, _EMPTY_LIST, fields, {}, found, path)
        if records is not None:
            node, fields = records, dict(zip(field_paths(records, path), found, strict=True))
    if node.kind == "records":
        ((record, known),) = _records(node, fields, path)
        parts = list[Field]()
        record = declared(record, known, (), others, parts, path)
        merged += [field.in_list for field in parts]
        return Node("records", (), (record,))
    if node.is_field:
        merged.append(fields[path])
        return node
    children = [
        declared(child, fields, lists, optional, merged, child_path)
        for child_path, child in zip(node.paths(path), node.children, strict=True)
    ]
    return dataclasses.replace(node, children=tuple(children))


def _merge_optional(
    one: Node,
    other: Node,
    fields: Mapping[Path, Field],
    other_fields: Mapping[Path, Field],
    merged: list[Field],
    path: Path,
) -> Node | None:
    parts = [
        (node.children[0] if node.kind == "optional" else node, known)
        for node, known in ((one, fields), (other, other_fields))
        if node.kind != "none"
    ]
    if not parts:
        return NONE
    part, known = parts[0]
    if len(parts) == 1:
        merged += [known[found] for found, node in part.walk(path) if node.is_field]
    else:
        both = merge(part, parts[1][0], known, parts[1][1], merged, path)
        if both is None:
            return None
        part = both
    return _optional(part, path, merged)


def _optional(part: Node, path: Path, merged: list[Field]) -> Node:
    """A part that is None in some rows, with the field that says in which."""
    if part.kind == "records" and part.children[0].kind == "optional":
        raise SchemaError(
            f"field {field_name(path)!r}: some rows are None in place of a list, and some lists"
            " have None in them, and only one of these can be stored: give an empty list in place"
            " of the rows that are None, or leave None out of the lists"
        )
    merged.append(Field(field_name((*path, MASK)), torch.bool, (), "mask"))
    return Node("optional", (), (part, LEAF))


def _merge_records(
    one: Node,
    other: Node,
    fields: Mapping[Path, Field],
    other_fields: Mapping[Path, Field],
    merged: list[Field],
    path: Path,
) -> Node | None:
    """Merge all records of two lists into one."""
    record: Node | None = None
    known: dict[Path, Field] = {}
    for node, given in ((one, fields), (other, other_fields)):
        for each, each_fields in _records(node, given, path):
            if record is None:
                record, known = each, each_fields
                continue
            found = list[Field]()
            record = merge(record, each, known, each_fields, found, path)
            if record is None:
                return None
            known = dict(zip(field_paths(record, path), found, strict=True))
    if record is None:
        return one
    for inner, node in record.walk(path):
        if node.kind == "records":
            raise SchemaError(
                f"field {field_name(inner)!r}: the records of a list have lists of different"
                " lengths there, which cannot be stored: join them into one array or text each"
            )
    merged += [field.in_list for field in known.values()]
    return Node("records", (), (record,))


def _records(
    node: Node, fields: Mapping[Path, Field], path: Path
) -> Iterator[tuple[Node, dict[Path, Field]]]:
    """The records of a list, each with its fields by path, as if it were the only one."""
    if node.kind == "records":
        (record,) = node.children
        yield record, {inner: fields[inner].of_record for inner in field_paths(record, path)}
        return
    for inner, child in zip(node.paths(path), node.children, strict=True):
        found = dict[Path, Field]()
        yield _as_record(child, fields, inner, path, found), found


def _as_record(
    node: Node, fields: Mapping[Path, Field], path: Path, new: Path, found: dict[Path, Field]
) -> Node:
    """A part of a record, in which lists of numbers are one field, however few these are.

    Args:
        node: The part.
        fields: The fields by path.
        path: Where it is among them.
        new: Where it is in a record.
        found: Its fields are added to this dict.
    """
    numbers = _numbers(node, fields, path) if _is_list(node) else set()
    if node.is_field:
        found[new] = dataclasses.replace(fields[path], name=field_name(new))
        return node if node.kind == "leaf" else SEQUENCE
    if len(numbers) == 1 and (field := numbers.pop()) is not None:
        found[new] = dataclasses.replace(field, name=field_name(new), shape=(len(node.keys),))
        return SEQUENCE
    pairs = zip(node.children, node.paths(path), node.paths(new), strict=True)
    children = tuple(_as_record(child, fields, old, at, found) for child, old, at in pairs)
    return dataclasses.replace(node, children=children)


def field_paths(node: Node, path: Path = ()) -> list[Path]:
    """List where the fields of a structure are.

    Args:
        node: The structure.
        path: Where it is in a sample.
    """
    return [found for found, part in node.walk(path) if part.is_field]


def _is_list(node: Node) -> bool:
    return node.is_list or node.kind in ("numbers", "sequence", "records")


def _numbers(node: Node, fields: Mapping[Path, Field], path: Path) -> set[Field | None]:
    """The fields that have the numbers of a list, any count of them, in the dtype of samples; None
    among them where it has other things."""
    if node.kind == "records":
        return {None}
    paths = [path] if node.is_field else node.paths(path)
    kinds = {"number": "array"}
    return {
        Field(field_name(path), field.sample_dtype, (None,), kinds.get(field.kind, field.kind))
        if field is not None
        and (node.is_field or (field.shape == () and field.kind in PLAIN_KINDS))
        else None
        for field in map(fields.get, paths)
    }


def _mixed_error(path: Path, fields: Iterable[Field]) -> SchemaError:
    found = sorted({f"{dtype_name(field.sample_dtype)} ({field.kind})" for field in fields})
    return SchemaError(
        f"Rows of {field_name(path)!r} are lists of {' and '.join(found)}: give all numbers one"
        " dtype, such as [1.0, 2.0], or arrays in place of the lists"
    )
