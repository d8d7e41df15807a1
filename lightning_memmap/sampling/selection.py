"""Selections: which rows of which store the splits of a data module have.

They are index views: several splits may share one store, and no row is copied.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lightning_memmap.errors import call_text, check_integer
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


class Subset(Selection):
    """Uses some rows of a store, like `torch.utils.data.Subset`.

    Args:
        rows: Their numbers, in the order that they are to have, or a mask with True for each of
            them and one entry for each row.
        field: Instead, rows that have one of the ``values`` in this field, or that ``where``
            chooses by it.
        values: These values. None stands for rows in which the field is None.
        where: Is given the field of all rows in which it is not None, an array of shape (rows,),
            and returns a mask of this shape. It does not choose the others.

    Raises:
        TypeError: Neither ``rows`` nor a field is given, or both are; or a field without ``values``
            or ``where``, or with both; or ``where`` cannot be called.
    """

    def __init__(
        self,
        rows: Any = None,
        *,
        field: str | None = None,
        values: Sequence[Any] | None = None,
        where: Callable[[NDArray[Any]], Any] | None = None,
    ) -> None:
        if (rows is None) == (field is None):
            raise TypeError(
                "Subset: give the rows, as numbers or as a mask, or a field that chooses them:"
                " Subset([0, 1, 2]) or Subset(field='label', values=[0, 1])"
            )
        num_given = (values is not None) + (where is not None)
        if num_given != (field is not None):
            raise TypeError(
                f"Subset: field={field!r}, values={values!r}, where={where!r}: a field needs"
                " either its values or a function of them, and these need a field"
            )
        if where is not None and not callable(where):
            raise TypeError(f"Subset: where={where!r}: give a function of the field's values")
        self._rows, self._field, self._values, self._where = rows, field, values, where

    @override
    def __repr__(self) -> str:
        found = {"rows": self._rows, "field": self._field, "values": self._values}
        return call_text("Subset", **found, where=self._where)

    @override
    def subset(self, split: str, member: int, fields: Fields) -> Integers:
        what = f"subset of {split}"
        if self._field is None:
            return chosen_rows(self._rows, fields.num_rows, what)
        given = fields.given(self._field)
        rows = np.flatnonzero(given)
        known = fields.values(self._field, rows)
        if self._where is not None:
            return rows[chosen_rows(self._where(known), len(rows), what)]
        values = np.ravel(np.asarray(self._values)).tolist()
        found = ~given if None in values else np.zeros(fields.num_rows, np.bool_)
        found[rows] = np.isin(known, [value for value in values if value is not None])
        return chosen_rows(found, fields.num_rows, what)


class Parts(Selection):
    """Trains each member on every ``num_parts``-th row: the rows ``i`` with ``i % M == member``.

    Args:
        num_parts: ``M``, at least 1.

    Raises:
        ValueError: ``num_parts`` is below 1.
    """

    def __init__(self, num_parts: int) -> None:
        self._num_parts = check_integer("num_parts", num_parts, 1, "at least 1 part")
        self.num_members = self._num_parts

    @override
    def __repr__(self) -> str:
        return call_text("Parts", num_parts=self.num_members)

    @override
    def subset(self, split: str, member: int, fields: Fields) -> Integers:
        rows = np.arange(member, fields.num_rows, self._num_parts)
        return chosen_rows(rows, fields.num_rows, f"subset of {split}")


class _HoldingOut(Selection):
    """Validates on some rows of the training store, and trains on the others."""

    def __init__(self, stratify: str | None, seed: int) -> None:
        self._stratify, self._seed = stratify, check_integer("seed", seed)
        check_seed(self._seed)

    splits = ("train", "val")

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

    def _dealt(self, fields: Fields, shuffle: bool = True) -> NDArray[np.int64]:
        """All rows in random order, those with one value of the field one after the other."""
        count, field = fields.num_rows, self._stratify
        bits = random_bits(self._seed, 0, _BITS)
        keys = bits.random_raw(count) if shuffle else np.zeros(count, np.uint64)
        by = () if field is None else (self._values("stratify", field, fields),)
        return np.lexsort((keys, *by))

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


class RandomSplit(_HoldingOut):
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

    def __init__(
        self,
        validation: int | float = 0.1,
        *,
        stratify: str | None = None,
        group: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(stratify, seed)
        if stratify is not None and group is not None:
            raise ValueError(
                f"RandomSplit: stratify={stratify!r} with group={group!r}: leave one of them out;"
                " groups that stay whole cannot have their share of each value too"
            )
        self._group = group
        if isinstance(validation, bool) or not isinstance(validation, Real):
            raise TypeError(f"validation={validation!r}: give a share or a number of rows")
        is_count = isinstance(validation, Integral)
        if not (validation >= 1 if is_count else 0 < validation < 1):
            raise ValueError(
                f"validation={validation}: give a share of the rows, such as 0.1, or a number of"
                " them, such as 5000"
            )
        self._validation: float = int(validation) if is_count else float(validation)

    @override
    def __repr__(self) -> str:
        found = {"validation": self._validation, "stratify": self._stratify, "group": self._group}
        return call_text("RandomSplit", **found, seed=self._seed)

    @override
    def _held_out(self, member: int, fields: Fields) -> NDArray[Any]:
        given, num_rows = self._validation, fields.num_rows
        share = max(1, min(round(given * num_rows), num_rows - 1))
        count = given if isinstance(given, int) else share
        if count >= num_rows:
            raise ValueError(f"validation={given}: of {num_rows} rows none would be trained on")
        if self._group is not None:
            return self._held_out_groups(self._group, count, fields)
        # Every value has its share of the evenly spaced ranks, up to one.
        ranks = np.arange(num_rows + 1, dtype=np.int64) * count // num_rows
        held_out: Integers = self._dealt(fields)[np.diff(ranks) == 1]
        return held_out

    def _held_out_groups(self, field: str, count: int, fields: Fields) -> NDArray[Any]:
        """A mask of whole groups with about so many rows: one group at least, and not all."""
        values = self._values("group", field, fields)
        _, groups, sizes = np.unique(values, return_inverse=True, return_counts=True)
        if len(sizes) < 2:
            raise ValueError(
                f"RandomSplit: group={field!r}: all rows have one value, and none would be trained"
                " on or none held out"
            )
        bits = random_bits(self._seed, 0, _BITS)
        order = np.argsort(bits.random_raw(len(sizes)), kind="stable")
        found = np.abs(np.cumsum(sizes[order])[:-1] - count)
        return np.isin(groups, order[: int(np.argmin(found)) + 1])


class Holdout(_HoldingOut):
    """Validates on rows of the training store that are named, and trains on the others.

    Args:
        rows: As for `Subset`: the rows to validate on.
        field: As there.
        values: As there.
        where: As there.

    Raises:
        TypeError: As there.
    """

    def __init__(
        self,
        rows: Any = None,
        *,
        field: str | None = None,
        values: Sequence[Any] | None = None,
        where: Callable[[NDArray[Any]], Any] | None = None,
    ) -> None:
        super().__init__(None, 0)
        self._subset = Subset(rows, field=field, values=values, where=where)

    @override
    def __repr__(self) -> str:
        return repr(self._subset).replace("Subset", "Holdout", 1)

    @override
    def _held_out(self, member: int, fields: Fields) -> Integers:
        return self._subset.subset("val", member, fields)


class KFold(_HoldingOut):
    """Holds out one of several folds of the training store, to validate on.

    Which one is ``member`` of the data module. Each row is in one fold, and the sizes of folds
    differ by one row at most.

    Args:
        num_folds: The number of folds, at least 2.
        shuffle: Divide the rows at random. Otherwise fold ``f`` is the rows ``i`` with
            ``i % num_folds == f``, or every ``num_folds``-th row of each value of ``stratify``.
        stratify: A field of the store: folds have equally many rows of each of its values, up to
            one.
        seed: Seed of the choice, ``0 <= seed < 2**63``. The seed of the order is another.

    Raises:
        TypeError: ``num_folds`` or the seed is not an integer.
        ValueError: ``num_folds`` or the seed is out of range.
    """

    def __init__(
        self, num_folds: int, *, shuffle: bool = True, stratify: str | None = None, seed: int = 0
    ) -> None:
        super().__init__(stratify, seed)
        reason = "at least 2, one of which is held out"
        self._num_folds = check_integer("num_folds", num_folds, 2, reason)
        if not isinstance(shuffle, bool):
            raise TypeError(f"shuffle={shuffle!r}: give True or False")
        self.num_members, self._shuffle = self._num_folds, shuffle

    @override
    def __repr__(self) -> str:
        found = {"num_folds": self.num_members, "shuffle": self._shuffle}
        return call_text("KFold", **found, stratify=self._stratify, seed=self._seed)

    @override
    def _held_out(self, member: int, fields: Fields) -> Integers:
        return self._dealt(fields, self._shuffle)[member :: self._num_folds]


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
