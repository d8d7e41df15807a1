"""Leaves of batches whose rows differ in length: on devices, and from several into one."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memmap._compat.tensors import jagged_tensor
from lightning_memmap.loading.device_streams import send
from lightning_memmap.loading.nested import named_leaves, rebuilt
from lightning_memmap.schema import RowList


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
    return jagged_tensor(values, offsets)
