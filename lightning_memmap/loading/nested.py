"""Batches as containers around leaves: taken apart, put together, and from several into one."""

import copy
import dataclasses
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict, is_tensor_collection
from torch import Tensor

from lightning_memmap._compat.tensors import jagged_tensor
from lightning_memmap.errors import with_article
from lightning_memmap.loading.device_streams import send
from lightning_memmap.sampling.rows import starts_of
from lightning_memmap.schema.fields import RowList, select

#: What leaves have in common whose rows can be put together: what they are, dtype and shape.
Kind: TypeAlias = tuple[Any, ...]


def opened(value: Any) -> dict[str, Any] | None:
    """The children of a container, by how they are reached; None of a leaf."""
    if isinstance(value, Mapping):
        return {f"[{key!r}]": child for key, child in value.items()}
    if isinstance(value, (list, tuple, deque)) and not isinstance(value, RowList):
        return {f"[{index}]": child for index, child in enumerate(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Tensor)):
        names = (field.name for field in dataclasses.fields(value))
        return {f".{name}": getattr(value, name) for name in names}
    return None


def remade(value: Any, children: Sequence[Any], is_row: bool = False) -> Any:
    """A container like this one around other children; like this row, around those of many."""
    made: Any = type(value)
    if isinstance(value, deque):
        return made(children, value.maxlen)
    if isinstance(value, (list, tuple)):
        return made(*children) if hasattr(value, "_fields") else _checked(made(children), children)
    is_mapping = isinstance(value, Mapping)
    names = value.keys() if is_mapping else [field.name for field in dataclasses.fields(value)]
    named = dict(zip(names, children, strict=True))
    if is_tensor_collection(value):
        # A TensorDict or a tensorclass: the first dimension of a batch is that of its rows.
        rows = [len(child) for child in children][: 1 if is_row else min(1, value.batch_dims)]
        found = TensorDict(named, [*rows, *value.batch_size[0 if is_row else 1 :]])
        return found if is_mapping else made.from_tensordict(found)
    if is_mapping:
        factory = [value.default_factory] if isinstance(value, defaultdict) else []
        return _checked(made(*factory, named), children)
    # Frozen ones too.
    filled = copy.copy(value)
    for name, child in named.items():
        object.__setattr__(filled, name, child)
    # What was computed from the fields before, such as a `functools.cached_property`, is of these.
    for name, kept in [*getattr(filled, "__dict__", {}).items()]:
        if name not in named and any(isinstance(leaf, Tensor) for _, leaf in named_leaves(kept)):
            object.__delattr__(filled, name)
    return filled


def _checked(made: Any, children: Sequence[Any]) -> Any:
    """A container that was made of children, once it is seen to have them."""
    if len(made) != len(children):
        raise TypeError(
            f"a {type(made).__name__} in a batch: made of its items alone, it has {len(made)} of"
            f" {len(children)}: use a dict, a list, or a class whose first argument is the items"
        )
    return made


def named_leaves(
    batch: Any, name: str = "", whole: tuple[type, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Names and values of the leaves of a batch, in the order of `rebuilt`."""
    children = None if isinstance(batch, whole) else opened(batch)
    if children is None:
        yield name, batch
        return
    for reached, child in children.items():
        yield from named_leaves(child, name + reached, whole)


def rebuilt(batch: Any, leaves: Iterator[Any]) -> Any:
    """A batch with the containers of this one around other leaves."""
    if (children := opened(batch)) is None:
        return next(leaves)
    return remade(batch, [rebuilt(child, leaves) for child in children.values()])


def kind_of(leaf: Any, has_rows: bool = False) -> Kind:
    """What a leaf is. How many rows it has does not matter."""
    if not isinstance(leaf, (Tensor, np.ndarray, np.generic)):
        return (type(leaf).__name__,)
    what, sizes = "tensor" if isinstance(leaf, Tensor) else "array", tuple[Any, ...](leaf.shape)
    if isinstance(leaf, Tensor) and leaf.is_nested:
        sizes = tuple(size if isinstance(size, int) else None for size in sizes)
    return what, leaf.dtype, ("B", *sizes[1:]) if has_rows else sizes


def check_alike(found: Sequence[Mapping[str, Kind]], who: str, place: str, advice: str) -> None:
    """Check that leaves that came from several places, by their names, can be put together."""
    first = found[0]
    for index, kinds in enumerate(found):
        if kinds.keys() != first.keys():
            raise ValueError(
                f"{who} returned {[*kinds]} {place} {index} and {[*first]} {place} 0: it must"
                " return one structure"
            )
        if kinds != first:
            name = next(name for name, kind in kinds.items() if kind != first[name])
            raise ValueError(
                f"{who} returned {_described(kinds[name])} at {name or 'its result'} {place}"
                f" {index} and {_described(first[name])} {place} 0: {advice}"
            )


def _described(kind: Kind) -> str:
    what, *rest = kind
    if not rest:
        return with_article(what)
    dtype, shape = rest
    name = with_article(str(dtype).removeprefix("torch."))
    return f"{name} {what} of shape {shape}".replace("'", "")


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
    bases = starts_of(np.array([len(leaf.values()) for leaf in sent])).tolist()
    pairs = zip(sent, bases, strict=True)
    starts = torch.cat([leaf.offsets()[:-1] + base for leaf, base in pairs])[order]
    lengths = torch.cat([leaf.offsets().diff() for leaf in sent])[order]
    ends = lengths.cumsum(0)
    # Items that no row has, which a transform may leave, go behind the rows: on a device, nothing
    # waits for their number.
    shifts = torch.cat([starts - ends + lengths, -ends[-1:]])
    counts = torch.cat([lengths, len(values) - ends[-1:]])
    shifts = shifts.repeat_interleave(counts, output_size=len(values))
    values = select(values, shifts + torch.arange(len(values), device=device))
    if device.type == "cpu":
        values = values[: int(ends[-1])]
    offsets = torch.cat([ends.new_zeros(1), ends])
    return jagged_tensor(values, offsets)
