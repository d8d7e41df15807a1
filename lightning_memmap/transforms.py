"""Batch transforms, which run on every batch, on the data device that fetched it.

Any callable or module that maps a batch to a batch is a batch transform. `PerSample` makes one
from a callable that maps a sample, and `OnSuperBatch` declares that one runs on the rows of all
data devices together.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from reprlib import repr as short_repr
from typing import Any

import numpy as np
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import default_collate

from lightning_memmap.errors import is_argument_mismatch
from lightning_memmap.loading.nested import (
    check_alike,
    children_of,
    leaf_signature,
    named_leaves,
    with_children,
)
from lightning_memmap.loading.row_random import RowRandom
from lightning_memmap.loading.transform import OnSuperBatch, check_callable, has_parameter
from lightning_memmap.schema.fields import RowList

__all__ = ["OnSuperBatch", "PerSample", "RowRandom"]


class PerSample:
    """Runs a per-sample callable on each row of a batch.

    The callable receives one sample in the structure of the batch, with tensors on the batch's
    device as leaves, and returns one. The results are collated as by ``default_collate``. Fields
    that the batch has as a `RowList`, such as the objects of each image, remain lists under the
    same key.

    A callable with a parameter ``random`` receives the row's own `numpy.random.Generator`. One with
    a method ``set_random_seed``, such as a ``Compose`` of Albumentations, is seeded for each row.
    Both draw the same numbers for a row on any number of devices; see `RowRandom`.

    Args:
        function: The per-sample callable.

    Raises:
        TypeError: The function is not callable.

    Examples:
        >>> halve = PerSample(lambda sample: [sample[0] / 2, sample[1]])
        >>> halve([torch.tensor([2.0, 4.0]), torch.tensor([0, 1])])
        [tensor([1., 2.]), tensor([0, 1])]
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        check_callable("function", function)
        self.function = function
        self._takes_random = has_parameter(function, "random")
        self._set_random_seed: Any = getattr(function, "set_random_seed", None)

    def __call__(self, batch: Any, random: RowRandom | None = None) -> Any:
        """Transform a batch of B rows.

        Args:
            batch: Tensors of shape (B, ...) and `RowList` in any nesting of containers.
            random: Random numbers of the rows, for a callable that draws some. The loader passes
                them.

        Returns:
            The collated results, with B rows, on the device of the results.

        Raises:
            TypeError: A result is None or contains None, or the batch has a jagged tensor.
            ValueError: The results of two rows differ in structure, shape or dtype.
        """
        generators = self._row_generators(random)
        leaves = dict(named_leaves(batch))
        for name, leaf in leaves.items():
            if isinstance(leaf, Tensor) and leaf.is_nested:
                raise TypeError(
                    f"PerSample: the rows at batch{name} are a jagged tensor, which can't be"
                    " collated from samples. Use layout={...: 'list'} or 'pad' for this field, or"
                    " a transform of batches"
                )
        by_row = [leaf for leaf in leaves.values() if isinstance(leaf, _BY_ROW)]
        samples = [
            self._call(
                apply_to_collection(batch, _BY_ROW, lambda leaf, row=row: leaf[row]),
                next(generators, None),
            )
            for row in range(len(by_row[0]))
        ]
        lists = [name for name, leaf in leaves.items() if isinstance(leaf, RowList)]
        _check_alike(samples, self.function, lists)
        return _collated(samples, lists)

    def _row_generators(self, random: RowRandom | None) -> Iterator[np.random.Generator]:
        """Yield a generator for each row, if the callable draws random numbers."""
        if not self._takes_random and self._set_random_seed is None:
            return iter(())
        if random is None:
            raise TypeError(
                f"PerSample(function={short_repr(self.function)}): random=None, but the function"
                " draws random numbers. Pass random=RowRandom(rows), as a loader does"
            )
        return random.generators()

    def _call(self, sample: Any, generator: np.random.Generator | None) -> Any:
        keywords = {"random": generator} if self._takes_random else {}
        if self._set_random_seed is not None and generator is not None:
            self._set_random_seed(int(generator.integers(2**31)))
        try:
            return self.function(sample, **keywords)
        except TypeError as error:
            if not is_argument_mismatch(error):
                raise
            raise TypeError(
                f"PerSample(function={short_repr(self.function)}) cannot be called with a sample"
                f" ({error}). Pass a function of one {type(sample).__name__}"
            ) from error


#: Leaves of a batch whose items are rows.
_BY_ROW = (Tensor, RowList)


def _collated(results: list[Any], lists: Collection[str], name: str = "") -> Any:
    """Collate results to a batch, in which the fields that ``lists`` names are a `RowList`."""
    if name in lists:
        return RowList(results)
    if (first := children_of(results[0])) is None:
        leaf = default_collate(results)
        # default_collate returns a list of texts.
        return RowList(leaf) if isinstance(results[0], (str, bytes)) else leaf
    rows: list[Any] = [*map(children_of, results)]
    columns = [_collated([row[key] for row in rows], lists, name + key) for key in first]
    # As in `default_collate`.
    return columns if type(results[0]) is tuple else with_children(results[0], columns, is_row=True)


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
                name: leaf_signature(leaf)
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
