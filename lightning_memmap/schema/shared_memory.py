"""Protect samples in memory from datasets that reuse their buffers.

A dataset may return the same buffer for every row, with new values. So either each sample is copied
as soon as it is read (`copy_sample`), or the samples are checked for shared memory while they are
stacked (`SharedMemoryCheck`), at a tenth of the cost.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_memmap.integers import Integers
from lightning_memmap.tensordict_types import is_tensorclass, tensordict_types

_IMMUTABLE = {int, float, complex, bool, str, bytes, type(None), *np.sctypeDict.values()}


def copy_sample(sample: Any) -> Any:
    """Copy the containers, tensors, arrays and images of a sample."""
    python_type: Any = type(sample)
    # A fast path for the most common types.
    if python_type in _IMMUTABLE:
        return sample
    if python_type is dict:
        return {k: v if type(v) in _IMMUTABLE else copy_sample(v) for k, v in sample.items()}
    if python_type is tuple or python_type is list:
        return python_type([v if type(v) in _IMMUTABLE else copy_sample(v) for v in sample])
    if python_type is np.ndarray:
        return sample.copy()
    if isinstance(sample, list):
        return [copy_sample(value) for value in sample]
    if isinstance(sample, tuple):
        values = [copy_sample(value) for value in sample]
        return python_type._make(values) if hasattr(python_type, "_fields") else tuple(values)
    if isinstance(sample, tensordict_types()) or is_tensorclass(sample):
        return sample.clone()
    if isinstance(sample, Mapping):
        return {key: copy_sample(value) for key, value in sample.items()}
    if dataclasses.is_dataclass(sample) and not isinstance(sample, type):
        return _copy_dataclass(sample)
    try:
        return _copy_leaf(sample)
    except Exception:  # A leaf of an unknown type. Stacking raises an error that names it.
        return sample


def _copy_dataclass(value: Any) -> Any:
    """Copy a dataclass, which may be frozen, without calling its ``__init__``."""
    copy = object.__new__(type(value))
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):  # Stacking raises an error for a field that was never set.
            object.__setattr__(copy, field.name, copy_sample(getattr(value, field.name)))
    return copy


def _copy_leaf(value: Any) -> Any:
    """Copy a tensor, an array of a subclass, or a Pillow image. Return other values as they are."""
    if isinstance(value, Tensor):
        return value.clone()
    pillow = sys.modules.get("PIL.Image")
    is_image = pillow is not None and isinstance(value, pillow.Image)
    return value.copy() if is_image or isinstance(value, (np.ndarray, bytearray)) else value


class SharedMemoryCheck:
    """Checks whether samples share memory, while they are stacked.

    Args:
        is_exact: Whether to compare the memory of numpy views. Otherwise any view counts as shared
            memory, because comparing views costs more than copying them.
    """

    def __init__(self, *, is_exact: bool) -> None:
        self.is_shared = False
        self._is_exact = is_exact

    def compare(self, values: Sequence[Any]) -> None:
        """Set ``is_shared`` if two of the values are the same object, or share memory."""
        python_types = set(map(type, values))
        mutable = {t for t in python_types - _IMMUTABLE if not issubclass(t, (tuple, np.generic))}
        if self.is_shared or not mutable:
            return
        compared = values if mutable == python_types else [v for v in values if type(v) in mutable]
        is_one_type = len(mutable) == 1  # The memory of different types is not compared.
        are_distinct = is_one_type and len(set(map(id, compared))) == len(compared)
        self.is_shared = not are_distinct or self._do_overlap(mutable.pop(), compared)

    def _do_overlap(self, python_type: type, values: Sequence[Any]) -> bool:
        if issubclass(python_type, Tensor):
            if all(map(Tensor.is_contiguous, values)):
                starts = np.array([tensor.data_ptr() for tensor in values], np.int64)
                return _are_overlapping(starts, starts + [tensor.nbytes for tensor in values])
            storages = [tensor.untyped_storage() for tensor in values]
            starts = np.array([storage.data_ptr() for storage in storages], np.int64)
            return _are_overlapping(starts, starts + [storage.nbytes() for storage in storages])
        if issubclass(python_type, np.ndarray):
            # A view of bytes, such as the pixels of an image, cannot be overwritten.
            views = [v for v in values if not (v.flags.owndata or type(v.base) is bytes)]
            if not (views and self._is_exact):
                return bool(views)
            bounds = np.array(list(map(_address_bounds, views)), np.int64)
            return _are_overlapping(bounds[:, 0], bounds[:, 1])
        # A read-only Pillow image uses the buffer that it was created from.
        return any(getattr(value, "readonly", 0) for value in values)


def _address_bounds(array: NDArray[Any]) -> tuple[int, int]:
    """Return the addresses where the values of an array start and stop."""
    start = int(array.__array_interface__["data"][0])
    steps = [(size - 1) * step for size, step in zip(array.shape, array.strides, strict=True)]
    stop = start + sum(step for step in steps if step > 0) + array.itemsize
    return (start + sum(step for step in steps if step < 0), stop) if array.size else (start, start)


def _are_overlapping(starts: Integers, stops: Integers) -> bool:
    order = np.argsort(starts, kind="stable")
    return bool((stops[order][:-1] > starts[order][1:]).any())
