"""Putting leaves back into the structure of a sample or batch."""

import dataclasses
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from tensordict import TensorDict
from torch import Tensor

from lightning_memmap.errors import StoreError
from lightning_memmap.schema.leaves import RowList
from lightning_memmap.schema.structure import MAX_CLASSES, Node, Path, children_of

#: The leaves of a sample or batch by the index of their field.
Leaves: TypeAlias = Sequence[Any] | Mapping[int, Any]
#: Puts leaves into a structure.
Build: TypeAlias = Callable[[Leaves], Any]


class Masked(NamedTuple):
    """What a batch has for rows of which some are None: values and a mask."""

    values: Any
    """What a batch has where no row is None. Rows that are None are zeros, or as short as possible
    if rows differ in length."""
    mask: Tensor
    """True for each row that is not None: bool of shape (B,), on the device of ``values``."""

    def rows(self) -> list[Any]:
        """The rows, with None for those that have no value.

        Raises:
            TypeError: The rows have more than one field.
        """
        values = self.values
        if isinstance(values, Mapping) or not (
            hasattr(values, "rows") or len(values) == len(self.mask)
        ):
            raise TypeError(
                f"Masked: the rows of a {type(values).__name__} are in its parts: take them from"
                " there, with `mask`"
            )
        found = values.rows() if hasattr(values, "rows") else values
        given = self.mask.tolist()
        return [row if is_given else None for row, is_given in zip(found, given, strict=True)]


def _records(record: Build, leaves: Mapping[int, Any]) -> Any:
    """The records of all rows of a batch: row by row where their fields are lists of rows."""
    if not all(isinstance(leaf, RowList) for leaf in leaves.values()):
        return record(leaves)
    rows = zip(*leaves.values(), strict=True)
    return RowList(record(dict(zip(leaves, row, strict=True))) for row in rows)


def _list(record: Build, leaves: Mapping[int, Any]) -> list[Any]:
    """The records of one row."""
    lengths = {len(leaf) for leaf in leaves.values()}
    if len(lengths) > 1:
        raise StoreError(
            f"the records of a row have {' and '.join(map(str, sorted(lengths)))} values: the store"
            " is damaged, build it again"
        )
    count = lengths.pop() if lengths else 0
    return [record({at: leaf[row] for at, leaf in leaves.items()}) for row in range(count)]


def builder(node: Node, sample: Any, fields: range, *, is_row: bool = False) -> Build:
    """Make a function that puts leaves back into a structure; see `Schema.builder`."""
    if node.is_field:
        return itemgetter(fields[0])
    if node.kind == "records":
        first = next(iter(sample), None) if isinstance(sample, (list, tuple)) else None
        record = builder(node.children[0], first, fields, is_row=is_row)
        nest = _list if is_row else _records
        return lambda leaves: nest(record, {at: leaves[at] for at in fields})
    if node.kind == "optional":
        part = builder(node.children[0], sample, fields[:-1], is_row=is_row)
        if is_row:
            return lambda leaves: part(leaves) if leaves[fields[-1]] else None
        return lambda leaves: Masked(part(leaves), leaves[fields[-1]])
    found = children_of(sample, ()) if sample is not None else None
    if found is not None and (found[0] != node.kind or set(found[1]) != set(node.keys)):
        found = None
    samples = dict(zip(found[1], found[2], strict=True)) if found is not None else {}
    children = [
        (key, builder(child, samples.get(key), within, is_row=is_row))
        for key, (_, child, within) in zip(node.keys, node.parts(fields), strict=True)
    ]
    if node.kind in ("tuple", "list"):
        return lambda leaves: [child(leaves) for _, child in children]
    if node.kind == "dict":
        return lambda leaves: {key: child(leaves) for key, child in children}
    if node.kind == "tensordict":

        def build_tensordict(leaves: Leaves) -> Any:
            shape = leaves[fields[0]].shape
            batch_size = shape[: max(0, len(shape) - node.feature_dims)]
            return TensorDict({str(key): child(leaves) for key, child in children}, batch_size)

        return build_tensordict
    class_type: Any = type(sample) if found else _look_alike(node.kind, node.name, node.keys)
    if node.kind == "namedtuple":
        return lambda leaves: class_type._make(child(leaves) for _, child in children)

    def build_dataclass(leaves: Leaves) -> Any:
        # Not through __init__: what a class checks of one sample need not hold for a batch.
        batch = object.__new__(class_type)
        for key, child in children:
            object.__setattr__(batch, str(key), child(leaves))
        return batch

    return build_dataclass


@lru_cache(MAX_CLASSES)
def _look_alike(kind: str, name: str, keys: Path) -> type:
    names = [str(key) for key in keys]
    if kind == "namedtuple":
        made: type = namedtuple(name, names)  # type: ignore[misc]
        return made
    return dataclasses.make_dataclass(name, names)
