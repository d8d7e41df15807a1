"""Samples that are held while others are read.

A dataset may return the same buffer for every row, with new values. So either each sample is copied
as soon as it is read (`copy_sample`), or the samples are checked for shared memory while they are
stacked (`Sharing`), at a tenth of the cost.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from lightning_memmap.integers import Integers
from lightning_memmap.schema.fields import Field, Values
from lightning_memmap.schema.stack import Branch, Samples
from lightning_memmap.schema.structure import Node, Path
from lightning_memmap.tensordict_types import is_tensorclass, tensordict_types

#: Types whose values nobody can change.
_FROZEN = {int, float, complex, bool, str, bytes, type(None), *np.sctypeDict.values()}


def copy_sample(sample: Any) -> Any:
    """Copy what a dataset may overwrite in a sample: its containers, arrays and images."""
    kind: Any = type(sample)
    # Those that most datasets give.
    if kind in _FROZEN:
        return sample
    if kind is dict:
        return {k: v if type(v) in _FROZEN else copy_sample(v) for k, v in sample.items()}
    if kind is tuple or kind is list:
        return kind([v if type(v) in _FROZEN else copy_sample(v) for v in sample])
    if kind is np.ndarray:
        return sample.copy()
    if isinstance(sample, list):
        return [copy_sample(value) for value in sample]
    if isinstance(sample, tuple):
        values = [copy_sample(value) for value in sample]
        return kind._make(values) if hasattr(kind, "_fields") else tuple(values)
    if isinstance(sample, tensordict_types()) or is_tensorclass(sample):
        return sample.clone()
    if isinstance(sample, Mapping):
        return {key: copy_sample(value) for key, value in sample.items()}
    if dataclasses.is_dataclass(sample) and not isinstance(sample, type):
        return _copied_object(sample)
    try:
        return _copied_leaf(sample)
    except Exception:  # What cannot be copied cannot be stored either, and is named then.
        return sample


def _copied_object(value: Any) -> Any:
    """Copy a dataclass, which may be frozen, without its checks."""
    made = object.__new__(type(value))
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):  # One that was never set is missed where it is read.
            object.__setattr__(made, field.name, copy_sample(getattr(value, field.name)))
    return made


def _copied_leaf(value: Any) -> Any:
    """Copy a tensor, an array of a class of its own, or an image of Pillow."""
    if isinstance(value, Tensor):
        return value.clone()
    pillow = sys.modules.get("PIL.Image")
    is_image = pillow is not None and isinstance(value, pillow.Image)
    return value.copy() if is_image or isinstance(value, (np.ndarray, bytearray)) else value


class Sharing:
    """Whether samples have memory in common, found out while they are stacked.

    Args:
        is_exact: Whether views of one numpy array are compared byte by byte. Otherwise they count
            as common memory, because comparing them costs more than copying them.
    """

    def __init__(self, *, is_exact: bool) -> None:
        self.is_found = False
        self._is_exact = is_exact

    def look_at(self, values: Sequence[Any]) -> None:
        """Note whether two of the values are one object, or have memory in common."""
        kinds = set(map(type, values))
        changing = {kind for kind in kinds - _FROZEN if not issubclass(kind, (tuple, np.generic))}
        if self.is_found or not changing:
            return
        held = values if changing == kinds else [v for v in values if type(v) in changing]
        is_one_type = len(changing) == 1  # Memory of different types is not compared.
        are_apart = is_one_type and len(set(map(id, held))) == len(held)
        self.is_found = not are_apart or self._overlap(changing.pop(), held)

    def _overlap(self, kind: type, values: Sequence[Any]) -> bool:
        if issubclass(kind, Tensor):
            # Of those that are not contiguous, all of their memory counts.
            are_contiguous = all(map(Tensor.is_contiguous, values))
            memory = values if are_contiguous else [value.untyped_storage() for value in values]
            starts = np.array([each.data_ptr() for each in memory], np.int64)
            sizes = [each.nbytes if are_contiguous else each.nbytes() for each in memory]
            return _are_overlapping(starts, starts + sizes)
        if issubclass(kind, np.ndarray):
            # Bytes are never overwritten, such as the pixels of an image.
            views = [v for v in values if not (v.flags.owndata or type(v.base) is bytes)]
            if not (views and self._is_exact):
                return bool(views)
            bounds = np.array(list(map(_bounds, views)), np.int64)
            return _are_overlapping(bounds[:, 0], bounds[:, 1])
        # An image of Pillow may use the memory that it was made of.
        return any(getattr(value, "readonly", 0) for value in values)


def _bounds(array: NDArray[Any]) -> tuple[int, int]:
    """Return the first address of the values of an array, and the end of the last one."""
    start = int(array.__array_interface__["data"][0])
    steps = [(size - 1) * step for size, step in zip(array.shape, array.strides, strict=True)]
    end = start + sum(step for step in steps if step > 0) + array.itemsize
    return (start + sum(step for step in steps if step < 0), end) if array.size else (start, start)


def _are_overlapping(starts: Integers, ends: Integers) -> bool:
    order = np.argsort(starts, kind="stable")
    return bool((ends[order][:-1] > starts[order][1:]).any())


class HeldSamples(Samples):
    """Samples that are compared with each other while they are stacked."""

    def __init__(self, values: Sequence[Any], sharing: Sharing) -> None:
        super().__init__(values)
        self._sharing = sharing

    @override
    def _like(self, values: Sequence[Any]) -> Branch:
        return HeldSamples(values, self._sharing)

    @override
    def parts(self, node: Node, path: Path) -> Sequence[Branch]:
        found = super().parts(node, path)
        self._sharing.look_at(self._values)
        return found

    @override
    def lists(self, path: Path) -> tuple[Branch, Integers]:
        found = super().lists(path)
        self._sharing.look_at(self._values)
        return found

    @override
    def leaves(self, field: Field) -> Values:
        found = super().leaves(field)
        self._sharing.look_at(self._values)
        return found
