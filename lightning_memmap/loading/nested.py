"""Batches as containers around leaves: taken apart, and put together again."""

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tensordict import TensorDict, TensorDictBase, is_tensorclass
from torch import Tensor

from lightning_memmap.schema import RowList

#: Sequences that are leaves.
_NOT_NESTED = (str, bytes, RowList)


def named_leaves(
    batch: Any, name: str = "", whole: tuple[type, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Names and values of the leaves of a batch, in the order of `rebuilt`."""
    if isinstance(batch, whole):
        yield name, batch
    elif isinstance(batch, Mapping):
        for key, child in batch.items():
            yield from named_leaves(child, f"{name}[{key!r}]", whole)
    elif isinstance(batch, Sequence) and not isinstance(batch, _NOT_NESTED):
        for index, child in enumerate(batch):
            yield from named_leaves(child, f"{name}[{index}]", whole)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, (type, Tensor)):
        for field in dataclasses.fields(batch):
            yield from named_leaves(getattr(batch, field.name), f"{name}.{field.name}", whole)
    else:
        yield name, batch


def rebuilt(batch: Any, leaves: Iterator[Tensor]) -> Any:
    """A batch with the containers of this one around other leaves."""
    if isinstance(batch, defaultdict):
        pairs = [(key, rebuilt(child, leaves)) for key, child in batch.items()]
        return defaultdict(batch.default_factory, pairs)
    if isinstance(batch, TensorDictBase):
        named = {key: rebuilt(child, leaves) for key, child in batch.items()}
        num_rows = [len(child) for child in named.values()][: min(1, batch.batch_dims)]
        return TensorDict(named, [*num_rows, *batch.batch_size[1:]])
    if is_tensorclass(batch):
        names = [field.name for field in dataclasses.fields(batch)]
        found = {name: rebuilt(getattr(batch, name), leaves) for name in names}
        size = [len(next(iter(found.values())))] if batch.batch_dims else []
        return type(batch).from_tensordict(TensorDict(found, [*size, *batch.batch_size[1:]]))
    if isinstance(batch, Mapping):
        made: Any = type(batch)
        return made({key: rebuilt(child, leaves) for key, child in batch.items()})
    if isinstance(batch, Sequence) and not isinstance(batch, _NOT_NESTED):
        children = [rebuilt(child, leaves) for child in batch]
        made = type(batch)
        return made(*children) if hasattr(batch, "_fields") else made(children)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, (type, Tensor)):
        filled = copy.copy(batch)
        for field in dataclasses.fields(batch):
            child = rebuilt(getattr(batch, field.name), leaves)
            object.__setattr__(filled, field.name, child)
        return filled
    return next(leaves)
