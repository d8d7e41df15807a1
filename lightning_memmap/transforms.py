"""Batch transforms, which run on every batch, on the data device that fetched it.

Any callable or module that maps a batch to a batch is a batch transform. `PerSample` makes one
from a callable that maps a sample, and `OnSuperBatch` declares that one runs on the rows of all
data devices together.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from reprlib import repr as short_repr
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import default_collate

from lightning_memmap.errors import is_refused_call, with_article
from lightning_memmap.loading.nested import (
    check_alike,
    kind_of,
    named_leaves,
    opened,
    rebuilt,
    remade,
)
from lightning_memmap.loading.transform import OnSuperBatch, check_callable
from lightning_memmap.loading.variable_rows import Padded
from lightning_memmap.schema.fields import RowList

__all__ = ["OnSuperBatch", "PerSample"]


class PerSample:
    """Runs a per-sample callable on each row of a batch.

    Without ``keywords`` the callable receives one sample in the structure of the batch, with
    tensors on the batch's device as leaves, and returns one. The results are collated as
    ``default_collate`` does it; what the batch gives row by row, such as the objects of each image,
    stays a list, under the same key.

    With ``keywords`` it is called as Albumentations expects: with numpy arrays on the CPU as
    keyword arguments, images with channels last; it returns a mapping with the same keys. The
    results go back to the batch's device. Arrays of three dimensions are taken for images with
    channels last, and their channels are moved first; tensors, such as those of ``ToTensorV2``,
    stay as they are.

    A callable that has its own random numbers and a method ``set_random_seed``, such as a
    ``Compose`` since Albumentations 1.4.21, is seeded for each batch from torch's global
    generator. The loader seeds that one, so a run can be repeated and resumed exactly.

    Args:
        function: The per-sample callable, for instance an Albumentations ``Compose``.
        keywords: The field for each keyword argument of the callable: its key, name or position
            in the batch, with levels joined by dots, such as ``{"image": "image", "mask":
            "target.mask"}``.

    Raises:
        TypeError: The function is not callable.

    Examples:
        >>> halve = PerSample(lambda sample: [sample[0] / 2, sample[1]])
        >>> halve([torch.tensor([2.0, 4.0]), torch.tensor([0, 1])])
        [tensor([1., 2.]), tensor([0, 1])]
    """

    def __init__(
        self, function: Callable[..., Any], keywords: Mapping[str, str] | None = None
    ) -> None:
        check_callable("function", function)
        self.function = function
        self.keywords = dict(keywords) if keywords else None

    def __call__(self, batch: Any) -> Any:
        """Transform a batch of B rows.

        Args:
            batch: Tensors of shape (B, ...) and `RowList` in any nesting of containers.

        Returns:
            The transformed batch, with B rows, on the device of ``batch``.

        Raises:
            KeyError: A field that ``keywords`` names is missing from the batch or from a result.
            TypeError: A result is None or contains None, or the batch has a jagged tensor.
            ValueError: The results of two rows differ in structure, shape or dtype, or a result
                is a tensor with channels last.
        """
        set_random_seed = getattr(self.function, "set_random_seed", None)
        if set_random_seed is not None:
            set_random_seed(int(torch.randint(2**31, ())))
        leaves = dict(named_leaves(batch))
        for name, leaf in leaves.items():
            if isinstance(leaf, Tensor) and leaf.is_nested:
                raise TypeError(
                    f"PerSample: the rows at batch{name} are a jagged tensor, which results could"
                    " not be collated to: give the field with variable={...: 'list'} or 'pad', or"
                    " write a transform of batches"
                )
        if self.keywords is not None:
            whole = named_leaves(batch, whole=(Padded,))
            padded = {_joined(name) for name, leaf in whole if isinstance(leaf, Padded)}
            return rebuilt(batch, iter(self._call_with_keywords(leaves, self.keywords, padded)))
        by_row = [leaf for leaf in leaves.values() if isinstance(leaf, _BY_ROW)]
        samples = [
            self._called(apply_to_collection(batch, _BY_ROW, lambda leaf, row=row: leaf[row]))
            for row in range(len(by_row[0]))
        ]
        lists = [name for name, leaf in leaves.items() if isinstance(leaf, RowList)]
        _check_alike(samples, self.function, lists)
        return _collated(samples, lists)

    def _called(self, *sample: Any, **keywords: Any) -> Any:
        try:
            return self.function(*sample, **keywords)
        except TypeError as error:
            if not is_refused_call(error):
                raise
            found = f"the keywords {[*keywords]}" if keywords else f"a {type(sample[0]).__name__}"
            raise TypeError(
                f"PerSample(function={short_repr(self.function)}): it cannot be called with a"
                f" sample ({error}): give a function of {found}"
            ) from error

    def _call_with_keywords(
        self, leaves: dict[str, Any], keywords: dict[str, str], padded: Collection[str]
    ) -> list[Any]:
        """The leaves of a batch, with the results in the place of the fields."""
        names = {_joined(name): name for name in leaves}
        for name in keywords.values():
            if name not in names:
                raise _no_field_error(name, names, padded)
        fields = {key: _tensor(leaves[names[name]], name) for key, name in keywords.items()}
        arrays = {keyword: _channels_last(leaf) for keyword, leaf in fields.items()}
        results = []
        for row in range(len(next(iter(fields.values())))):
            result = self._called(**{key: array[row] for key, array in arrays.items()})
            if result is None:
                raise _none_error(self.function, row)
            if missing := [keyword for keyword in keywords if keyword not in result]:
                raise KeyError(
                    f"keywords: the result of row {row} has no {missing[0]!r}: return every key"
                    " that the callable receives"
                )
            results.append({keyword: _tensor_or_array(result[keyword]) for keyword in keywords})
        _check_alike(results, self.function)
        for keyword, name in keywords.items():
            field = fields[keyword]
            rows: list[Any] = [result[keyword] for result in results]
            if isinstance(rows[0], Tensor):
                leaf = _stack_tensors(keyword, rows, field)
            else:
                leaf = _stack_arrays(rows, field.ndim)
            leaves[names[name]] = leaf.to(field.device)
        return [*leaves.values()]


#: Leaves of a batch whose items are rows.
_BY_ROW = (Tensor, RowList)
#: Between the keys in the name of a leaf.
_BETWEEN = re.compile(r"""\[['"]?|['"]?\]|\.""")


def _collated(results: list[Any], lists: Collection[str], name: str = "") -> Any:
    """The batch of the results, with those parts row by row that ``lists`` names."""
    if name in lists:
        return RowList(results)
    if (first := opened(results[0])) is None:
        found = default_collate(results)
        # Of texts it makes a list.
        return RowList(found) if isinstance(results[0], (str, bytes)) else found
    rows: list[Any] = [*map(opened, results)]
    columns = [_collated([row[key] for row in rows], lists, name + key) for key in first]
    # As in `default_collate`.
    return columns if type(results[0]) is tuple else remade(results[0], columns, is_row=True)


def _check_alike(
    results: Sequence[Any], function: Callable[..., Any], lists: Sequence[str] = ()
) -> None:
    """Check that the results of all rows can be collated without loss."""
    named = [dict(named_leaves(result)) for result in results]
    within = tuple(f"{name}{mark}" for name in lists for mark in ".[")
    for row, leaves in enumerate(named):
        for name, leaf in leaves.items():
            if leaf is None:
                raise _none_error(function, row, name)
    check_alike(
        [
            {
                name: kind_of(leaf)
                for name, leaf in leaves.items()
                if name not in lists and not name.startswith(within)
            }
            for leaves in named
        ],
        "the per-sample callable",
        "for row",
        "crop, pad or convert it, so that all rows are alike",
    )


def _none_error(function: Callable[..., Any], row: int, name: str = "") -> TypeError:
    called = getattr(function, "__qualname__", type(function).__name__)
    where = f" at {name}" if name else ""
    return TypeError(
        f"the per-sample callable {called} returned None{where} for row {row} of the batch:"
        " return the transformed sample (is the return statement missing?)"
    )


def _tensor_or_array(value: Any) -> Tensor | np.ndarray | None:
    return value if value is None or isinstance(value, Tensor) else np.asarray(value)


def _joined(name: str) -> str:
    """Return the keys in the name of a leaf, joined by dots."""
    return ".".join(filter(None, _BETWEEN.split(name)))


def _no_field_error(name: str, names: Collection[str], padded: Collection[str]) -> KeyError:
    """Make the error for a keyword that names no tensor of a batch."""
    if name in padded:
        return KeyError(
            f"keywords: the rows of field {name!r} differ in size, and the batch has them padded:"
            f" store them in one size, or encoded with variable={{{name!r}: Decode(size=...)}}; or"
            f" use variable={{{name!r}: 'list'}}, and PerSample without keywords"
        )
    inner = [other for other in names if other.startswith(f"{name}.")]
    if not inner:
        return KeyError(f"keywords: the batch has no field {name!r}, but {', '.join(names)}")
    return KeyError(f"keywords: {name!r} is not a field, but has {', '.join(inner)}: name those")


def _tensor(found: Any, name: str) -> Tensor:
    if isinstance(found, RowList):
        raise KeyError(
            f"keywords: {name!r} is given row by row: leave keywords out, and write a callable of"
            " samples"
        )
    if not isinstance(found, Tensor):
        raise KeyError(f"keywords: {name!r} is {with_article(type(found).__name__)}, not a field")
    return found


def _channels_last(leaf: Tensor) -> np.ndarray:
    """Rows of shape (C, H, W) as (H, W, C), other rows unchanged."""
    array: np.ndarray = leaf.cpu().numpy()
    return np.moveaxis(array, 1, -1) if array.ndim == 4 else array


def _stack_tensors(keyword: str, rows: list[Tensor], field: Tensor) -> Tensor:
    """Stack results that are tensors."""
    leaf = torch.stack(rows)
    if field.ndim == leaf.ndim == 4:
        channels = field.shape[1]
        if leaf.shape[1] != channels and leaf.shape[-1] == channels:
            raise ValueError(
                f"keywords: the result {keyword!r} is a tensor of shape {tuple(rows[0].shape)}"
                f" with its {channels} channels last, but tensors need them first: use"
                " ToTensorV2(transpose_mask=True), or return an array"
            )
    return leaf


def _stack_arrays(rows: list[np.ndarray], ndim: int) -> Tensor:
    """Stack results that are arrays; the channels of images are moved first."""
    array = np.stack(rows)
    if ndim == 4 and array.ndim == 3:  # A transform dropped the only channel.
        array = array[..., None]
    if array.ndim == 4:
        array = np.moveaxis(array, -1, 1)
    return torch.from_numpy(np.ascontiguousarray(array))
