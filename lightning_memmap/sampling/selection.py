"""Selections: which rows of which store the splits of a data module have.

They are index views: several splits may share one store, and no row is copied.
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

from lightning_memmap.errors import Described, check_integer, check_number
from lightning_memmap.sampling.permutations import random_bits
from lightning_memmap.sampling.rows import Integers
from lightning_memmap.sampling.sampler import Fields, check_seed

#: The part of the random bits of a seed from which rows are divided; orders use the lower ones.
_BITS = 2**63


class Selection(ABC):
    """Decides which rows of which store each split has, for ``MemmapDataModule(subset=...)``."""

    #: The splits whose rows it selects; others have all rows of their stores.
    splits: ClassVar[tuple[str, ...]] = ("train",)
    #: How many members it has rows for, as folds or parts; None if members have the same rows.
    num_members: int | None = None

    def stored_split(self, split: str) -> str:
        """The split whose store has the rows of a split.

        Args:
            split: Its name.
        """
        return split

    @abstractmethod
    def subset(self, split: str, member: int, fields: Fields) -> Integers:
        """The rows of a split.

        Args:
            split: Its name; one of ``splits``.
            member: Which fold or part, in ``[0, num_members)``; 0 if members have the same rows.
            fields: The fields of its store.

        Returns:
            Their numbers in the dataset, in the order that they are to have: int64, each once.

        Raises:
            ValueError: There are no such rows.
        """


@dataclass(eq=False, repr=False)
class _Named(Described, Selection):
    """Names rows: by their numbers, by a mask, or by a field."""

    rows: Any = None
    _: KW_ONLY
    field: str | None = None
    values: Sequence[Any] | None = None
    where: Callable[[NDArray[Any]], Any] | None = None

    def __post_init__(self) -> None:
        name, is_field = type(self).__name__, self.field is not None
        num_given = (self.values is not None) + (self.where is not None)
        if is_field != (self.rows is None) or is_field != num_given:
            raise TypeError(
                f"{self!r}: give the rows, as numbers or as a mask, or a field with its values or a"
                f" function of them: {name}([0, 1, 2]) or {name}(field='label', values=[0, 1])"
            )
        if self.where is not None and not callable(self.where):
            raise TypeError(f"{name}: where={self.where!r}: give a function of the field's values")

    def _named(self, split: str, fields: Fields) -> Integers:
        what = f"subset of {split}"
        if self.field is None:
            return chosen_rows(self.rows, fields.num_rows, what)
        given = fields.given(self.field)
        rows = np.flatnonzero(given)
        known = fields.values(self.field, rows)
        if self.where is not None:
            mask = np.asarray(self.where(known))
            if mask.dtype != np.bool_ or mask.shape != rows.shape:
                raise TypeError(
                    f"{what}: where={self.where!r} returned an array of {mask.dtype} of shape"
                    f" {mask.shape}: return a mask of bool of shape {rows.shape}"
                )
            return rows[chosen_rows(mask, len(rows), what)]
        values = [*np.ravel(np.asarray(self.values))]
        found = ~given if None in values else np.zeros(fields.num_rows, np.bool_)
        wanted: Any = [value for value in values if value is not None]
        if (kind := known.dtype.kind) in "mM":  # Of which a config has texts.
            try:
                wanted = np.array(wanted, f"{kind}8")
            except ValueError as error:
                raise ValueError(
                    f"{what}: field {self.field!r}, values={short_repr(self.values)}: {error}: give"
                    " times as of datetime or numpy, or texts such as '2024-06-01'"
                ) from error
        found[rows] = np.isin(known, wanted)
        if not found.any():
            some = short_repr(known[:4].tolist())
            raise ValueError(
                f"{what}: field {self.field!r} has none of values={short_repr(self.values)} in any"
                f" row; its first ones are {some}"
            )
        return chosen_rows(found, fields.num_rows, what)


class Subset(_Named):
    """Uses some rows of a store, like `torch.utils.data.Subset`.

    Args:
        rows: Their numbers, in the order that they are to have, or a mask with True for each of
            them and one entry for each row.
        field: Instead, rows that have one of the ``values`` in this field, or that ``where``
            chooses by it.
        values: These values, such as numbers, texts or dates. None stands for rows in which the
            field is None.
        where: Is given the field of all rows in which it is not None, an array of shape (rows,):
            of times as datetime64, of texts as objects. It returns a mask of this shape, and does
            not choose the others.

    Raises:
        TypeError: Neither ``rows`` nor a field is given, or both are; or a field without ``values``
            or ``where``, or with both; or ``where`` cannot be called, or returns no mask.
    """

    @override
    def subset(self, split: str, member: int, fields: Fields) -> Integers:
        return self._named(split, fields)


@dataclass(eq=False, repr=False)
class Parts(Described, Selection):
    """Trains each member on every ``num_parts``-th row: the rows ``i`` with ``i % M == member``.

    Args:
        num_parts: ``M``, at least 1.

    Raises:
        ValueError: ``num_parts`` is below 1.
    """

    num_parts: int

    def __post_init__(self) -> None:
        self.num_parts = check_integer("num_parts", self.num_parts, 1, "at least 1 part")
        self.num_members = self.num_parts

    @override
    def subset(self, split: str, member: int, fields: Fields) -> Integers:
        rows = np.arange(member, fields.num_rows, self.num_parts)
        return chosen_rows(rows, fields.num_rows, f"subset of {split}")


class _HoldingOut(Selection):
    """Validates on some rows of the training store, and trains on the others."""

    splits = ("train", "val")
    stratify: str | None = None
    group: str | None = None
    shuffle: bool = True
    seed: int = 0

    @override
    def stored_split(self, split: str) -> str:
        return "train" if split == "val" else split

    @override
    def subset(self, split: str, member: int, fields: Fields) -> Integers:
        held_out = np.zeros(fields.num_rows, np.bool_)
        held_out[self._held_out(member, fields)] = True
        rows = held_out if split == "val" else ~held_out
        return chosen_rows(rows, fields.num_rows, f"subset of {split}")

    @abstractmethod
    def _held_out(self, member: int, fields: Fields) -> NDArray[Any]:
        """The rows to validate on: their numbers, or a mask."""

    def _check_division(self) -> None:
        self.seed = check_seed(self.seed)
        if self.stratify is not None and self.group is not None:
            raise ValueError(
                f"{type(self).__name__}: stratify={self.stratify!r} with group={self.group!r}:"
                " leave one of them out; groups that stay whole cannot have their share of each"
                " value too"
            )

    def _keys(self, count: int) -> NDArray[np.uint64]:
        """What rows or groups are sorted by to be in random order."""
        if not self.shuffle:
            return np.zeros(count, np.uint64)
        return random_bits(self.seed, 0, _BITS).random_raw(count)

    def _dealt(self, fields: Fields) -> Integers:
        """All rows in random order, those with one value of the field one after the other."""
        by = () if self.stratify is None else (self._values("stratify", self.stratify, fields),)
        return np.lexsort((self._keys(fields.num_rows), *by))

    def _groups(self, field: str, fields: Fields, least: int) -> tuple[Integers, Integers]:
        """The group of each row, and how many rows each group has: at least so many groups."""
        values = self._values("group", field, fields)
        _, groups, sizes = np.unique(values, return_inverse=True, return_counts=True)
        if len(sizes) < least:
            raise ValueError(
                f"{self!r}: field {field!r} has too few values, {len(sizes)}, for {least} parts of"
                " the rows, none of which may be empty: group by another field, or into fewer folds"
            )
        return groups, sizes

    def _values(self, name: str, field: str, fields: Fields) -> NDArray[Any]:
        """The values of a field by which rows are divided."""
        missing = np.flatnonzero(~fields.given(field))
        if len(missing):
            raise ValueError(
                f"{type(self).__name__}: {name}={field!r}: it is None in {len(missing)} of"
                f" {fields.num_rows} rows, the first of which is row {missing[0]}: store a value of"
                " your own in its place, such as -1, or a dataset of the other rows alone"
            )
        return fields.values(field)


@dataclass(eq=False, repr=False)
class RandomSplit(Described, _HoldingOut):
    """Holds out a random part of the training store, to validate on.

    Args:
        validation: The share of the rows to hold out, between 0 and 1, or their number.
        stratify: A field of the store: of each of its values, the same share is held out, up to one
            row.
        group: A field of the store, such as that of a patient: all rows of one of its values are
            held out, or none, and so many of these groups that the share is as near as can be.
        seed: Seed of the choice, ``0 <= seed < 2**63``. The seed of the order is another.

    Raises:
        TypeError: ``validation`` is not a number, or the seed not an integer.
        ValueError: ``validation`` or the seed is out of range, or ``stratify`` and ``group`` are
            given.
    """

    validation: int | float = 0.1
    _: KW_ONLY
    stratify: str | None = None
    group: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_division()
        share = check_number("validation", self.validation)
        given = int(self.validation) if isinstance(self.validation, Integral) else share
        if not (given >= 1 if isinstance(given, int) else 0 < given < 1):
            raise ValueError(
                f"validation={given}: give a share of the rows, such as 0.1, or a number of them,"
                " such as 5000"
            )
        self.validation = given

    @override
    def _held_out(self, member: int, fields: Fields) -> NDArray[Any]:
        given, num_rows = self.validation, fields.num_rows
        share = max(1, min(round(given * num_rows), num_rows - 1))
        count = given if isinstance(given, int) else share
        if count >= num_rows:
            raise ValueError(f"validation={given}: of {num_rows} rows none would be trained on")
        if self.group is not None:
            # So many whole groups that their rows are about as many, but neither none nor all.
            groups, sizes = self._groups(self.group, fields, 2)
            order = np.argsort(self._keys(len(sizes)), kind="stable")
            nearest = np.abs(np.cumsum(sizes[order])[:-1] - count).argmin()
            return np.isin(groups, order[: nearest + 1])
        # Every value has its share of the evenly spaced ranks, up to one.
        ranks = np.arange(num_rows + 1, dtype=np.int64) * count // num_rows
        held_out: Integers = self._dealt(fields)[np.diff(ranks) == 1]
        return held_out


class Holdout(_HoldingOut, _Named):
    """Validates on rows of the training store that are named, and trains on the others.

    Args:
        rows: As for `Subset`: the rows to validate on.
        field: As there.
        values: As there.
        where: As there.

    Raises:
        TypeError: As there.
    """

    @override
    def _held_out(self, member: int, fields: Fields) -> Integers:
        return self._named("val", fields)


@dataclass(eq=False, repr=False)
class KFold(Described, _HoldingOut):
    """Holds out one of several folds of the training store, to validate on.

    Which one is ``member`` of the data module. Each row is in one fold, and the sizes of folds
    differ by one row at most, unless groups stay whole.

    Args:
        num_folds: The number of folds, at least 2.
        shuffle: Divide the rows at random. Otherwise fold ``f`` is the rows ``i`` with
            ``i % num_folds == f``, or every ``num_folds``-th row of each value of ``stratify``.
        stratify: A field of the store: folds have equally many rows of each of its values, up to
            one.
        group: A field of the store, such as that of a patient: all rows of one of its values are
            in one fold. Folds then differ by the rows of the largest group at most.
        seed: Seed of the choice, ``0 <= seed < 2**63``. The seed of the order is another.

    Raises:
        TypeError: ``num_folds`` or the seed is not an integer.
        ValueError: ``num_folds`` or the seed is out of range, or ``stratify`` and ``group`` are
            given.
    """

    num_folds: int
    _: KW_ONLY
    shuffle: bool = True
    stratify: str | None = None
    group: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_division()
        reason = "at least 2, one of which is held out"
        self.num_folds = check_integer("num_folds", self.num_folds, 2, reason)
        if not isinstance(self.shuffle, bool):
            raise TypeError(f"shuffle={self.shuffle!r}: give True or False")
        self.num_members = self.num_folds

    @override
    def _held_out(self, member: int, fields: Fields) -> NDArray[Any]:
        if self.group is not None:
            # By size, and so many at a time, they are dealt to the folds.
            groups, sizes = self._groups(self.group, fields, self.num_folds)
            turns = (-sizes).argsort(kind="stable").argsort() // self.num_folds
            order = np.lexsort((self._keys(len(sizes)), turns))
            return np.isin(groups, order[member :: self.num_folds])
        if self.num_folds > fields.num_rows:
            raise ValueError(
                f"num_folds={self.num_folds}: of {fields.num_rows} rows, so that folds would be"
                " empty: give at most as many folds as rows"
            )
        return self._dealt(fields)[member :: self.num_folds]


def chosen_rows(given: Any, num_rows: int, what: str) -> Integers:
    """Rows that are listed one by one, or marked in a mask."""
    found = np.asarray(given)
    if found.ndim != 1:
        raise ValueError(f"{what}: an array of shape {found.shape}; give one of one dimension")
    if found.dtype == np.bool_:
        if len(found) != num_rows:
            raise ValueError(f"{what}: a mask of {len(found)} entries for {num_rows} rows")
        found = np.flatnonzero(found)
    if not len(found):
        raise ValueError(f"{what}: it has no row; a split has at least one")
    if not np.issubdtype(found.dtype, np.integer):
        raise TypeError(f"{what}: an array of {found.dtype}; give numbers of rows, or a mask")
    rows = found.astype(np.int64)
    outside = rows[(rows < 0) | (rows >= num_rows)]
    if len(outside):
        raise ValueError(f"{what}: row {outside[0]} of a store with the rows 0 to {num_rows - 1}")
    if not (np.diff(rows) > 0).all():
        ordered = np.sort(rows)
        if len(twice := ordered[:-1][np.diff(ordered) == 0]):
            raise ValueError(
                f"{what}: row {twice[0]} is given twice; for rows that come more often than others"
                " use sampler=Weighted(...)"
            )
    return rows
