"""Selections: which rows of which store each split of a data module uses.

Several splits may share one store. No row is copied.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Integral
from reprlib import repr as short_repr
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lightning_memmap.errors import ReprAsCall, check_integer, check_number
from lightning_memmap.integers import Integers
from lightning_memmap.sampling.columns import Column, read_column, read_whole_column
from lightning_memmap.sampling.factory import Fields
from lightning_memmap.sampling.permutations import bit_generator
from lightning_memmap.sampling.sampler import check_seed

#: Stream of a seed's random bits that divides rows. Orders use the streams below.
_DIVISION_BITS = 2**63


class Selection(ABC):
    """Decides which rows of which store each split uses, for ``MemmapDataModule(subset=...)``."""

    #: The splits whose rows it selects; others use all rows of their stores.
    splits: ClassVar[tuple[str, ...]] = ("train",)
    #: The number of members, such as folds, with different rows; None if all use the same rows.
    num_members: int | None = None

    def stored_split(self, split: str) -> str:
        """Return the split whose store holds the rows of a split.

        Args:
            split: The name of the split.
        """
        return split

    @abstractmethod
    def subset(self, split: str, member: int, fields: Fields) -> Integers:
        """Select the rows of a split.

        Args:
            split: The name of the split; one of ``splits``.
            member: The fold or part, in ``[0, num_members)``; 0 if all members use the same rows.
            fields: The fields of the split's store.

        Returns:
            Rows of the dataset in the order that the split will have: int64, each once.

        Raises:
            ValueError: No row is selected.
        """


@dataclass(eq=False, repr=False)
class _Named(ReprAsCall, Selection):
    """Names rows: by their numbers, by a mask, or by the values of a field."""

    rows: Any = None
    _: KW_ONLY
    field: str | Column | None = None
    values: Sequence[Any] | None = None
    where: Callable[[NDArray[Any]], Any] | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        is_by_field = self.field is not None
        num_criteria = (self.values is not None) + (self.where is not None)
        if is_by_field != (self.rows is None) or is_by_field != num_criteria:
            raise TypeError(
                f"{self!r}: pass either rows, as numbers or as a mask, or a field with values or"
                f" where: {name}([0, 1, 2]) or {name}(field='label', values=[0, 1])"
            )
        _check_field(f"{name}: field", self.field)
        if self.where is not None and not callable(self.where):
            raise TypeError(f"{name}: where={self.where!r}: pass a function of the field's values")

    def _named(self, split: str, fields: Fields) -> Integers:
        """Return the named rows in the order that the user listed them."""
        what = f"subset of {split}"
        if self.field is None:
            return check_rows(self.rows, fields.num_rows, what)
        column, has_value = read_column("field", fields, self.field)
        rows = np.flatnonzero(has_value)
        if self.where is not None:
            mask = np.asarray(self.where(column))
            if mask.dtype != np.bool_ or mask.shape != rows.shape:
                raise TypeError(
                    f"{what}: where={self.where!r} returned an array of {mask.dtype} of shape"
                    f" {mask.shape}: return a mask of bool of shape {rows.shape}"
                )
            return rows[check_rows(mask, len(rows), what)]
        values = [*np.ravel(np.asarray(self.values))]
        is_named = ~has_value if None in values else np.zeros(fields.num_rows, np.bool_)
        is_named[rows] = np.isin(column, self._comparable(values, column.dtype, what))
        if not is_named.any():
            examples = short_repr(column[:4].tolist())
            raise ValueError(
                f"{what}: no row has a value of field {self.field!r} in"
                f" values={short_repr(self.values)}; its first values are {examples}"
            )
        return check_rows(is_named, fields.num_rows, what)

    def _comparable(self, values: list[Any], dtype: np.dtype[Any], what: str) -> Any:
        """Convert values other than None to be compared with a field of this dtype."""
        values = [value for value in values if value is not None]
        if dtype.kind not in "mM":
            return values
        try:  # A config holds times as texts.
            return np.array(values, f"{dtype.kind}8")
        except ValueError as error:
            raise ValueError(
                f"{what}: field {self.field!r}, values={short_repr(self.values)}: {error}: pass"
                " datetime or numpy times, or strings such as '2024-06-01'"
            ) from error


class Subset(_Named):
    """Uses some rows of a store, like `torch.utils.data.Subset`.

    Args:
        rows: The rows in the order that the split will have, or a mask with one entry per row of
            the store.
        field: Instead of ``rows``: a field whose values select the rows, by ``values`` or
            ``where``; its name, or `lightning_memmap.results.Results`, a column that training made.
        values: Values to select, such as numbers, strings or dates. None selects rows in which the
            field is None.
        where: A function that receives the field in all rows in which it isn't None, an array of
            shape (rows,) with times as datetime64 and strings as objects, and returns a mask of the
            same shape. Rows in which the field is None are not selected.

    Raises:
        TypeError: Neither ``rows`` nor a field is passed, or both; the field isn't a name; it is
            passed without ``values`` and ``where``, or with both; or ``where`` isn't callable or
            returns no mask.
    """

    @override
    def subset(self, split: str, member: int, fields: Fields) -> Integers:
        return self._named(split, fields)


@dataclass(eq=False, repr=False)
class Parts(ReprAsCall, Selection):
    """Trains member ``m`` on every ``M``-th row: the rows ``i`` with ``i % M == m``.

    Args:
        num_parts: ``M``, at least 1.

    Raises:
        ValueError: ``num_parts`` is below 1.
    """

    num_parts: int

    def __post_init__(self) -> None:
        self.num_parts = check_integer("num_parts", self.num_parts, 1, "must be at least 1")
        self.num_members = self.num_parts

    @override
    def subset(self, split: str, member: int, fields: Fields) -> Integers:
        rows = np.arange(member, fields.num_rows, self.num_parts)
        return check_rows(rows, fields.num_rows, f"subset of {split}")


class _HoldingOut(Selection):
    """Validates on some rows of the training store, and trains on all others."""

    splits = ("train", "val")

    @override
    def stored_split(self, split: str) -> str:
        return "train" if split == "val" else split

    @override
    def subset(self, split: str, member: int, fields: Fields) -> Integers:
        held_out = np.zeros(fields.num_rows, np.bool_)
        held_out[self._held_out(member, fields)] = True
        rows = held_out if split == "val" else ~held_out
        return check_rows(rows, fields.num_rows, f"subset of {split}")

    @abstractmethod
    def _held_out(self, member: int, fields: Fields) -> NDArray[Any]:
        """Select the rows to validate on, as numbers or as a mask."""


@dataclass(eq=False, repr=False)
class _Dividing(ReprAsCall, _HoldingOut):
    """Validates on rows that are divided at random, by the values of a field if one is named."""

    shuffle = True

    _: KW_ONLY
    stratify: str | Column | None = None
    group: str | Column | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self.seed = check_seed(self.seed)
        _check_field(f"{type(self).__name__}: stratify", self.stratify)
        _check_field(f"{type(self).__name__}: group", self.group)
        if self.stratify is not None and self.group is not None:
            raise ValueError(
                f"{type(self).__name__}: stratify={self.stratify!r} and group={self.group!r} can't"
                " be combined, since a group isn't divided: pass one of them"
            )

    def _keys(self, count: int) -> NDArray[np.uint64]:
        """Return sort keys that put rows or groups in random order, or keep their order."""
        if not self.shuffle:
            return np.zeros(count, np.uint64)
        return bit_generator(self.seed, 0, _DIVISION_BITS).random_raw(count)

    def _ordered_rows(self, fields: Fields) -> Integers:
        """Return all rows in random order, grouped by the value of ``stratify`` if it is set."""
        keys = [self._keys(fields.num_rows)]
        if self.stratify is not None:
            argument = f"{type(self).__name__}: stratify"
            keys.append(read_whole_column(argument, fields, self.stratify))
        return np.lexsort(keys)

    def _groups(
        self, field: str | Column, fields: Fields, min_groups: int
    ) -> tuple[Integers, Integers]:
        """Return the group of each row, and the number of rows of each group."""
        values = read_whole_column(f"{type(self).__name__}: group", fields, field)
        _, groups, sizes = np.unique(values, return_inverse=True, return_counts=True)
        if len(sizes) < min_groups:
            raise ValueError(
                f"{self!r}: field {field!r} has {len(sizes)} distinct values, and at least"
                f" {min_groups} are needed so that no part is empty: group by another field, or use"
                " fewer folds"
            )
        return groups, sizes


@dataclass(eq=False, repr=False)
class RandomSplit(_Dividing):
    """Holds out random rows of the training store, to validate on.

    Args:
        validation: The fraction of the rows to hold out, between 0 and 1, or their number.
        stratify: A field of the store. The same fraction of each of its values is held out, within
            one row.
        group: A field of the store, such as a patient. Rows that share a value are held out
            together or not at all. The number of groups held out makes the fraction as close as
            possible.
        seed: Seed of the choice, ``0 <= seed < 2**63``. The order has its own seed.

    Raises:
        TypeError: ``validation`` is not a number, the seed not an integer, or ``stratify`` or
            ``group`` not the name of a field.
        ValueError: ``validation`` or the seed is out of range, or both ``stratify`` and ``group``
            are passed.
    """

    validation: int | float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        number = check_number("validation", self.validation)
        validation = int(self.validation) if isinstance(self.validation, Integral) else number
        is_valid = validation >= 1 if isinstance(validation, int) else 0 < validation < 1
        if not is_valid:
            raise ValueError(
                f"validation={validation}: pass a fraction of the rows between 0 and 1, or a number"
                " of rows of at least 1"
            )
        self.validation = validation

    @override
    def _held_out(self, member: int, fields: Fields) -> NDArray[Any]:
        validation = self.validation
        num_rows = fields.num_rows
        fraction_rows = max(1, min(round(validation * num_rows), num_rows - 1))
        count = validation if isinstance(validation, int) else fraction_rows
        if count >= num_rows:
            raise ValueError(f"validation={validation}: no row of {num_rows} would be trained on")
        if self.group is not None:
            # At least one group is held out, and at least one is not.
            groups, sizes = self._groups(self.group, fields, 2)
            order = np.argsort(self._keys(len(sizes)), kind="stable")
            nearest = np.abs(np.cumsum(sizes[order])[:-1] - count).argmin()
            return np.isin(groups, order[: nearest + 1])
        # Evenly spaced ranks of the dealt rows: each value has its fraction of them, within one.
        ranks = np.arange(num_rows + 1, dtype=np.int64) * count // num_rows
        held_out: Integers = self._ordered_rows(fields)[np.diff(ranks) == 1]
        return held_out


class Holdout(_HoldingOut, _Named):
    """Validates on named rows of the training store, and trains on all others.

    Args:
        rows: The rows to validate on, as for `Subset`.
        field: As for `Subset`.
        values: As for `Subset`.
        where: As for `Subset`.

    Raises:
        TypeError: As for `Subset`.
    """

    @override
    def _held_out(self, member: int, fields: Fields) -> Integers:
        return self._named("val", fields)


@dataclass(eq=False, repr=False)
class KFold(_Dividing):
    """Holds out one of several folds of the training store, to validate on.

    The fold is the ``member`` of the data module. Each row is in one fold, and the sizes of folds
    differ by at most one row, unless groups are kept together.

    Args:
        num_folds: The number of folds, at least 2.
        shuffle: Divide the rows at random. Otherwise fold ``f`` holds the rows ``i`` with
            ``i % num_folds == f``, or every ``num_folds``-th row of each value of ``stratify``.
        stratify: A field of the store. Folds have the same number of rows of each of its values,
            within one.
        group: A field of the store, such as a patient. Rows that share a value are in one fold.
            The sizes of folds then differ by at most the largest group.
        seed: Seed of the choice, ``0 <= seed < 2**63``. The order has its own seed.

    Raises:
        TypeError: ``num_folds`` or the seed is not an integer, or ``stratify`` or ``group`` is not
            the name of a field.
        ValueError: ``num_folds`` or the seed is out of range, or both ``stratify`` and ``group``
            are passed.
    """

    num_folds: int
    _: KW_ONLY
    shuffle: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        reason = "must be at least 2, since one fold is held out"
        self.num_folds = check_integer("num_folds", self.num_folds, 2, reason)
        if not isinstance(self.shuffle, bool):
            raise TypeError(f"shuffle={self.shuffle!r}: pass True or False")
        self.num_members = self.num_folds

    @override
    def _held_out(self, member: int, fields: Fields) -> NDArray[Any]:
        if self.group is not None:
            # Groups are dealt in rounds of one per fold, from the largest on, at random in a round.
            groups, sizes = self._groups(self.group, fields, self.num_folds)
            rounds = (-sizes).argsort(kind="stable").argsort() // self.num_folds
            order = np.lexsort((self._keys(len(sizes)), rounds))
            return np.isin(groups, order[member :: self.num_folds])
        if self.num_folds > fields.num_rows:
            raise ValueError(
                f"num_folds={self.num_folds}: must be at most the number of rows, {fields.num_rows}"
            )
        return self._ordered_rows(fields)[member :: self.num_folds]


def _check_field(argument: str, name: object) -> None:
    """Check an argument that names a field, or is a column or None."""
    if name is not None and not isinstance(name, Column) and not (isinstance(name, str) and name):
        raise TypeError(f"{argument}={name!r}: pass the name of a field")


def check_rows(rows: Any, num_rows: int, what: str) -> Integers:
    """Check rows that are listed or marked in a mask, and return their numbers."""
    array = np.asarray(rows)
    if array.ndim != 1:
        raise ValueError(f"{what}: an array of shape {array.shape}; pass one of one dimension")
    if array.dtype == np.bool_:
        if len(array) != num_rows:
            raise ValueError(f"{what}: a mask of {len(array)} entries for {num_rows} rows")
        array = np.flatnonzero(array)
    if not len(array):
        raise ValueError(f"{what}: no row is selected; a split needs at least one")
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{what}: an array of {array.dtype}; pass row numbers, or a mask")
    numbers = array.astype(np.int64)
    outside = numbers[(numbers < 0) | (numbers >= num_rows)]
    if len(outside):
        raise ValueError(f"{what}: row {outside[0]} is outside of the store's 0 to {num_rows - 1}")
    if not (np.diff(numbers) > 0).all():
        ordered = np.sort(numbers)
        duplicates = ordered[:-1][np.diff(ordered) == 0]
        if len(duplicates):
            raise ValueError(
                f"{what}: row {duplicates[0]} is listed more than once; to draw rows more often"
                " than others use sampler=Weighted(...)"
            )
    return numbers
