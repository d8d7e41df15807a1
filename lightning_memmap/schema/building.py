"""Putting leaves back into the structure of a sample or batch."""

import dataclasses
from collections import namedtuple
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain, islice
from typing import Any

from tensordict import TensorDict

from lightning_memmap.schema.nesting import BATCH, Build, Leaves, Nesting
from lightning_memmap.schema.structure import MAX_CLASSES, Node, Path, children_of


def builder(node: Node, sample: Any, indices: Iterator[int], nesting: Nesting = BATCH) -> Build:
    """Make a function that puts leaves back into a structure; see `Schema.builder`.

    Args:
        node: The structure.
        sample: A sample of the dataset, for its classes, or None.
        indices: The indices that the leaves from here on have; as many as needed are taken.
        nesting: How lists of records, and what may be None, are put together.

    Returns:
        A function from the tensors of all fields to the nested value.
    """
    if node.kind == "records":
        within = list(islice(indices, node.num_fields))
        first = next(iter(sample), None) if isinstance(sample, (list, tuple)) else None
        record = builder(node.children[0], first, iter(within), nesting)
        return lambda leaves: nesting.records(record, {at: leaves[at] for at in within})
    if node.kind == "optional":
        part = builder(node.children[0], sample, indices, nesting)
        mask = next(indices)
        return lambda leaves: nesting.optional(part, leaves, leaves[mask])
    if node.is_field:
        index = next(indices)
        return lambda leaves: leaves[index]
    if node.kind == "tensordict":
        return _tensordict_builder(node, sample, indices, nesting)
    found = children_of(sample, ()) if sample is not None else None
    if found is not None and (found[0] != node.kind or set(found[1]) != set(node.keys)):
        found = None
    samples = dict(zip(found[1], found[2], strict=True)) if found is not None else {}
    pairs = zip(node.keys, node.children, strict=True)
    children = [(key, builder(child, samples.get(key), indices, nesting)) for key, child in pairs]
    if node.kind in ("tuple", "list"):
        return lambda leaves: [child(leaves) for _, child in children]
    if node.kind == "dict":
        return lambda leaves: {key: child(leaves) for key, child in children}
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


def _tensordict_builder(node: Node, sample: Any, indices: Iterator[int], nesting: Nesting) -> Build:
    """A function that makes a TensorDict."""
    first = next(indices)
    within = chain([first], indices)
    samples = dict(zip(*found[1:], strict=True)) if (found := children_of(sample, ())) else {}
    children = [
        (str(key), builder(child, samples.get(key), within, nesting))
        for key, child in zip(node.keys, node.children, strict=True)
    ]

    def build(leaves: Leaves) -> Any:
        shape = leaves[first].shape
        batch_size = shape[: max(0, len(shape) - node.feature_dims)]
        return TensorDict({key: child(leaves) for key, child in children}, batch_size)

    return build


@lru_cache(MAX_CLASSES)
def _look_alike(kind: str, name: str, keys: Path) -> type:
    names = [str(key) for key in keys]
    if kind == "namedtuple":
        made: type = namedtuple(name, names)  # type: ignore[misc]
        return made
    return dataclasses.make_dataclass(name, names)
