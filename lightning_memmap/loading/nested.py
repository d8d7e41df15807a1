"""Batches as nested containers of leaves: splits them, rebuilds them, and merges their leaves."""

import copy
import dataclasses
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_memmap._compat.tensors import jagged_tensor
from lightning_memmap.errors import with_article
from lightning_memmap.integers import starts_of
from lightning_memmap.loading.device_streams import send
from lightning_memmap.schema.fields import RowList, dtype_name, select
from lightning_memmap.tensordict_types import is_tensorclass, tensordict_types

#: The type, dtype and shape of a leaf. Leaves of one signature can be stacked.
Signature: TypeAlias = tuple[Any, ...]


def children_of(value: Any) -> dict[str, Any] | None:
    """Return the children of a container by the suffix that selects each; None for a leaf."""
    if isinstance(value, Mapping):
        return {f"[{key!r}]": child for key, child in value.items()}
    if isinstance(value, (list, tuple, deque)) and not isinstance(value, RowList):
        return {f"[{index}]": child for index, child in enumerate(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Tensor)):
        names = (field.name for field in dataclasses.fields(value))
        return {f".{name}": getattr(value, name) for name in names}
    return None


def with_children(value: Any, children: Sequence[Any], is_row: bool = False) -> Any:
    """Return a container like this one with other children.

    Args:
        value: The container: a list, tuple, deque, mapping, dataclass, TensorDict or tensorclass.
        children: The new children, in the order of `children_of`.
        is_row: Whether the container is a single row and the children have many rows.
    """
    kind: Any = type(value)
    if isinstance(value, deque):
        return kind(children, value.maxlen)
    if isinstance(value, (list, tuple)):
        if hasattr(value, "_fields"):
            return kind(*children)
        return _checked_size(kind(children), children)
    is_mapping = isinstance(value, Mapping)
    names = value.keys() if is_mapping else [field.name for field in dataclasses.fields(value)]
    named = dict(zip(names, children, strict=True))
    if isinstance(value, tensordict_types()) or is_tensorclass(value):
        from tensordict import TensorDict  # Only here; see tensordict_types.

        # The first dimension of a TensorDict or tensorclass of a batch is its rows.
        rows = [len(child) for child in children][: 1 if is_row else min(1, value.batch_dims)]
        tensordict = TensorDict(named, [*rows, *value.batch_size[0 if is_row else 1 :]])
        return tensordict if is_mapping else kind.from_tensordict(tensordict)
    if is_mapping:
        factory = [value.default_factory] if isinstance(value, defaultdict) else []
        return _checked_size(kind(*factory, named), children)
    copied = copy.copy(value)
    for name, child in named.items():
        object.__setattr__(copied, name, child)  # The dataclass may be frozen.
    # Drop values that were computed from the old fields, such as a `functools.cached_property`.
    for name, kept in [*getattr(copied, "__dict__", {}).items()]:
        if name not in named and any(isinstance(leaf, Tensor) for _, leaf in named_leaves(kept)):
            object.__delattr__(copied, name)
    return copied


def _checked_size(container: Any, children: Sequence[Any]) -> Any:
    """Check that a container that was built from children contains all of them."""
    if len(container) != len(children):
        raise TypeError(
            f"a {type(container).__name__} in a batch: built from its {len(children)} items alone,"
            f" it contains {len(container)}: use a dict, a list, or a class whose first argument is"
            " the items"
        )
    return container


def named_leaves(
    batch: Any, name: str = "", leaf_types: tuple[type, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a batch with their names, such as ``['x'][0]``.

    Args:
        batch: The batch.
        name: The name of the batch itself.
        leaf_types: Types of containers that count as leaves.
    """
    children = None if isinstance(batch, leaf_types) else children_of(batch)
    if children is None:
        yield name, batch
        return
    for suffix, child in children.items():
        yield from named_leaves(child, name + suffix, leaf_types)


def with_leaves(batch: Any, leaves: Iterator[Any]) -> Any:
    """Return a batch with the containers of this one and other leaves."""
    if (children := children_of(batch)) is None:
        return next(leaves)
    return with_children(batch, [with_leaves(child, leaves) for child in children.values()])


def leaf_signature(leaf: Any, has_rows: bool = False) -> Signature:
    """Return the signature of a leaf; with `has_rows`, for any number of rows."""
    if not isinstance(leaf, (Tensor, np.ndarray, np.generic)):
        return (type(leaf).__name__,)
    name = "tensor" if isinstance(leaf, Tensor) else "array"
    sizes = tuple[Any, ...](leaf.shape)
    if isinstance(leaf, Tensor) and leaf.is_nested:
        sizes = tuple(size if isinstance(size, int) else None for size in sizes)
    return name, leaf.dtype, ("B", *sizes[1:]) if has_rows else sizes


def check_alike(
    results: Sequence[Mapping[str, Signature]], function: str, where: str, advice: str
) -> None:
    """Check that the results of several calls have leaves of the same names and signatures.

    Args:
        results: The signatures of the leaves of each result, by name.
        function: The function that returned them, for the error.
        where: The calls, such as ``on data device``, which the error numbers.
        advice: The end of the error.
    """
    first = results[0]
    for index, signatures in enumerate(results):
        if signatures.keys() != first.keys():
            raise ValueError(
                f"{function} returned {[*signatures]} {where} {index} and {[*first]} {where} 0:"
                " it must return one structure"
            )
        if signatures != first:
            name = next(name for name in first if signatures[name] != first[name])
            raise ValueError(
                f"{function} returned {_described(signatures[name])} at {name or 'its result'}"
                f" {where} {index} and {_described(first[name])} {where} 0: {advice}"
            )


def _described(signature: Signature) -> str:
    name, *details = signature
    if not details:
        return with_article(name)
    dtype, shape = details
    return f"{with_article(dtype_name(dtype))} {name} of shape {shape}".replace("'", "")


def is_variable(leaf: Any) -> bool:
    """Return whether the rows of a leaf differ in length: a nested tensor or a `RowList`."""
    return isinstance(leaf, RowList) or (isinstance(leaf, Tensor) and leaf.is_nested)


def dense_tensors(leaf: Any, parents: tuple[int, ...] = ()) -> list[Tensor]:
    """Return the tensors with memory in a leaf: a tensor, a `RowList`, or any object.

    Args:
        leaf: The leaf of a batch.
        parents: The ids of the objects that contain it, which are not entered again.
    """
    if isinstance(leaf, RowList):
        return [part for row in leaf for _, part in named_leaves(row) if isinstance(part, Tensor)]
    if isinstance(leaf, Tensor) and leaf.is_nested:
        nested: Any = leaf
        parts = nested.values(), nested.offsets(), nested.lengths()
        return [part for part in parts if part is not None]
    if isinstance(leaf, Tensor):
        return [leaf]
    if id(leaf) in parents or isinstance(leaf, type) or not hasattr(leaf, "__dict__"):
        return []
    # A batch of another library, which an `OnSuperBatch` returned.
    tensors: list[Tensor] = []
    for _, attribute in named_leaves(vars(leaf)):
        tensors += dense_tensors(attribute, (*parents, id(leaf)))
    return tensors


def is_on(leaf: Any, device: torch.device) -> bool:
    """Return whether all tensors of a leaf are on a device."""
    tensors = dense_tensors(leaf) if isinstance(leaf, RowList) else [leaf]
    return all(tensor.device == device for tensor in tensors if isinstance(tensor, Tensor))


def send_leaf(leaf: Any, device: torch.device) -> Any:
    """Return a leaf of a batch on a device; see `send`."""
    if not isinstance(leaf, RowList):
        return leaf.to(device) if leaf.is_nested else send(leaf, device)
    if is_on(leaf, device):
        return leaf
    # All tensors of one dtype are sent in one copy.
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in dense_tensors(leaf):
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    sent: dict[torch.dtype, Iterator[Tensor]] = {}
    for dtype, tensors in by_dtype.items():
        flat = send(torch.cat([tensor.flatten() for tensor in tensors]), device)
        parts = flat.split_with_sizes([tensor.numel() for tensor in tensors])
        sent[dtype] = map(torch.Tensor.view_as, parts, tensors)
    rows = RowList()
    for row in leaf:
        leaves = [
            next(sent[part.dtype]) if isinstance(part, Tensor) else part
            for _, part in named_leaves(row)
        ]
        rows.append(with_leaves(row, iter(leaves)))
    return rows


def rows_of_device(index: int, first_device: int, num_devices: int) -> slice:
    """Return which rows of a step a data device has: row ``i`` is on ``(first_device + i) % D``."""
    return slice((index - first_device) % num_devices, None, num_devices)


def interleave(
    leaves: Sequence[Any], first_device: int, num_rows: int, device: torch.device
) -> Any:
    """Merge the leaves of all data devices for one field whose rows differ in length.

    Args:
        leaves: A nested tensor or `RowList` of each of the ``D`` data devices.
        first_device: The data device that holds row 0; see `rows_of_device`.
        num_rows: Rows of all leaves.
        device: The device of the result.

    With 3 data devices, ``first_device=1`` and 7 rows, data device 0 holds rows 2 and 5, data
    device 1 rows 0, 3 and 6, and data device 2 rows 1 and 4.
    """
    count = len(leaves)
    sent = [send_leaf(leaf, device) for leaf in leaves]
    if isinstance(sent[0], RowList):
        rows: list[Any] = [None] * num_rows
        for index, leaf in enumerate(sent):
            rows[rows_of_device(index, first_device, count)] = leaf
        return RowList(rows)
    jagged_dim = next(dim for dim, size in enumerate(sent[0].shape) if not isinstance(size, int))
    if jagged_dim > 1:
        # The jagged dimension was transposed; move it back while the rows are merged.
        transposed = [leaf.transpose(1, jagged_dim) for leaf in sent]
        return interleave(transposed, first_device, num_rows, device).transpose(1, jagged_dim)
    # `torch.nested.narrow` leaves holes between rows.
    sent = [leaf if leaf.lengths() is None else leaf.contiguous() for leaf in sent]
    # The row of each of the concatenated rows of all leaves.
    all_rows = np.arange(num_rows)
    rows_of_leaves = [all_rows[rows_of_device(d, first_device, count)] for d in range(count)]
    permutation = send(torch.from_numpy(np.argsort(np.concatenate(rows_of_leaves))), device)
    values = torch.cat([leaf.values() for leaf in sent])
    bases = starts_of(np.array([len(leaf.values()) for leaf in sent])).tolist()
    pairs = zip(sent, bases, strict=True)
    starts = torch.cat([leaf.offsets()[:-1] + base for leaf, base in pairs])[permutation]
    lengths = torch.cat([leaf.offsets().diff() for leaf in sent])[permutation]
    ends = lengths.cumsum(0)
    # A transform may leave items that belong to no row. They are moved behind the rows, so that no
    # device has to be synchronized to count them.
    shifts = torch.cat([starts - ends + lengths, -ends[-1:]])
    counts = torch.cat([lengths, len(values) - ends[-1:]])
    shifts = shifts.repeat_interleave(counts, output_size=len(values))
    values = select(values, shifts + torch.arange(len(values), device=device))
    if device.type == "cpu":
        values = values[: int(ends[-1])]
    offsets = torch.cat([ends.new_zeros(1), ends])
    return jagged_tensor(values, offsets)
