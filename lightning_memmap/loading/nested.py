"""Batches as containers around leaves: taken apart, put together, and from several into one."""

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_tensorclass
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor

from lightning_memmap.loading.device_streams import send
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


def is_variable(leaf: Any) -> bool:
    """Whether a leaf of a batch has rows that differ in length: a nested tensor or a `RowList`."""
    return isinstance(leaf, RowList) or (isinstance(leaf, Tensor) and leaf.is_nested)


def dense_tensors(leaf: Any, seen: tuple[int, ...] = ()) -> list[Tensor]:
    """The tensors in a leaf of a batch that have memory: a tensor, a `RowList`, or any object."""
    if isinstance(leaf, RowList):
        return [part for row in leaf for _, part in named_leaves(row) if isinstance(part, Tensor)]
    if isinstance(leaf, Tensor) and leaf.is_nested:
        nested: Any = leaf
        found = [nested.values(), nested.offsets(), nested.lengths()]
        return [tensor for tensor in found if tensor is not None]
    if isinstance(leaf, Tensor):
        return [leaf]
    if id(leaf) in seen or isinstance(leaf, type) or not hasattr(leaf, "__dict__"):
        return []
    # A batch of another library, which an `OnSuperBatch` returned.
    within = (*seen, id(leaf))
    return [
        tensor for _, each in named_leaves(vars(leaf)) for tensor in dense_tensors(each, within)
    ]


def is_on(leaf: Any, device: torch.device) -> bool:
    """Whether a leaf of a batch is on a device. Text is, on each of them."""
    tensors = dense_tensors(leaf) if isinstance(leaf, RowList) else [leaf]
    return all(tensor.device == device for tensor in tensors if isinstance(tensor, Tensor))


def sent_leaf(leaf: Any, device: torch.device) -> Any:
    """A leaf of a batch on a device; see `send`."""
    if not isinstance(leaf, RowList):
        return leaf.to(device) if leaf.is_nested else send(leaf, device)
    if is_on(leaf, device):
        return leaf
    parts = [[part for _, part in named_leaves(row)] for row in leaf]
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in dense_tensors(leaf):
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    sent = {dtype: iter(_sent(tensors, device)) for dtype, tensors in by_dtype.items()}
    return RowList(
        rebuilt(row, iter([next(sent[p.dtype]) if isinstance(p, Tensor) else p for p in each]))
        for row, each in zip(leaf, parts, strict=True)
    )


def _sent(tensors: Sequence[Tensor], device: torch.device) -> Iterable[Tensor]:
    """Tensors of one dtype on a device, in one copy."""
    flat = send(torch.cat([tensor.flatten() for tensor in tensors]), device)
    parts = flat.split_with_sizes([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def interleaved(leaves: Sequence[Any], first: int, num_rows: int, device: torch.device) -> Any:
    """Assemble the rows of one field, which differ in length."""
    count = len(leaves)
    sent = [sent_leaf(leaf, device) for leaf in leaves]
    if isinstance(sent[0], RowList):
        rows: list[Any] = [None] * num_rows
        for index, leaf in enumerate(sent):
            rows[(index - first) % count :: count] = leaf
        return RowList(rows)
    ragged = next(dim for dim, size in enumerate(sent[0].shape) if not isinstance(size, int))
    if ragged > 1:
        # They were transposed: the dimension that differs is not the first one of the values.
        turned = [leaf.transpose(1, ragged) for leaf in sent]
        return interleaved(turned, first, num_rows, device).transpose(1, ragged)
    # `torch.nested.narrow` leaves holes between rows.
    sent = [leaf if leaf.lengths() is None else leaf.contiguous() for leaf in sent]
    # Where each row of the result is among those of all leaves, one after the other.
    places = np.concatenate(
        [np.arange((index - first) % count, num_rows, count) for index in range(count)]
    )
    order = send(torch.from_numpy(np.argsort(places)), device)
    values = torch.cat([leaf.values() for leaf in sent])
    lengths = torch.cat([leaf.offsets().diff() for leaf in sent])
    starts = (lengths.cumsum(0) - lengths)[order]
    lengths = lengths[order]
    ends = lengths.cumsum(0)
    shifts = (starts - ends + lengths).repeat_interleave(lengths, output_size=len(values))
    values = values.index_select(0, shifts + torch.arange(len(values), device=device))
    offsets = torch.cat([ends.new_zeros(1), ends])
    return NestedTensor(values, offsets)
