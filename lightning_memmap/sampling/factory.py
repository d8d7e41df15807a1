"""How an order is made from what a user passes as ``MemmapDataModule(sampler=...)``."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_memmap.errors import check_integer, is_argument_mismatch
from lightning_memmap.integers import Integers
from lightning_memmap.sampling.identity import identity_of
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.sampler import Sampler, identifying


class Fields(Protocol):
    """The fields of a dataset that a sampler or a selection may look up. A store is one."""

    @property
    def num_rows(self) -> int:
        """Rows of the dataset."""

    @property
    def contents(self) -> Mapping[str, str]:
        """Row counts and checksums that identify the content of the dataset, by name."""

    def values(self, field: str, rows: Integers | None = None) -> NDArray[Any]:
        """Return the value of a field in each row.

        Args:
            field: Name of a field with one value in each row.
            rows: The rows, int64 of shape (N,); by default all, in dataset order.

        Returns:
            An array of shape (N,), of strings as objects.

        Raises:
            ValueError: The field doesn't exist, its rows have more than one value, or the field is
                None in one of the rows; see `given`.
        """

    def given(self, field: str) -> NDArray[np.bool_]:
        """Return in which rows a field has a value.

        Args:
            field: Name of a field.

        Returns:
            A mask of shape (num_rows,) in dataset order, False if the field is None.

        Raises:
            ValueError: The field doesn't exist.
        """

    def lengths(self, field: str) -> Integers:
        """Return the length of each row of a field of variable length, without reading any value.

        Args:
            field: Name of such a field.

        Returns:
            The items of each row, for text its bytes: int64 of shape (num_rows,), in dataset order.

        Raises:
            ValueError: The field doesn't exist, or all its rows have one length.
        """


class SamplerFactory(ABC):
    """Makes a sampler that needs fields of the dataset, for ``MemmapDataModule(sampler=...)``.

    If it needs no field, pass a function of the pool and the seed instead.
    """

    #: The names of the training sets that it mixes; empty for a single set without a name.
    training_sets: tuple[str, ...] = ()
    #: Whether the order depends on the rows of a global batch; see `Pool`.
    by_batch: bool = False

    @abstractmethod
    def make(self, pool: Pool, seed: int, fields: Fields) -> Sampler:
        """Make the sampler. It must not depend on anything else, such as the process.

        Args:
            pool: The training rows, and the shards that they are divided into.
            seed: Seed of the order.
            fields: The fields of the dataset.

        Returns:
            A sampler over this pool, or over a pool with other shards of its rows.
        """

    def make_in_blocks(self, pool: Pool, seed: int, fields: Fields, block: int) -> Sampler:
        """Make the sampler in blocks of rows of each shard, which are shuffled and read together.

        Args:
            pool: As for `make`.
            seed: As for `make`.
            fields: As for `make`.
            block: Rows of a shard in a block.

        Raises:
            ValueError: The order can't be divided into blocks.
        """
        sampler = self.make(pool, seed, fields)
        _check_sampler(sampler, pool)
        return sampler.in_blocks(block)


def check_per_row(name: str, value: Any) -> None:
    """Check an argument that holds one item per row."""
    if not np.ndim(value):
        raise TypeError(f"{name}={value}: pass one for each row, or the name of a field")


def per_row_array(name: str, value: Any, num_rows: int) -> NDArray[Any]:
    """Return an argument that holds one item per row as an array of shape (num_rows,)."""
    array = np.asarray(value)
    if array.shape != (num_rows,):
        raise ValueError(
            f"{name} of shape {array.shape}, and the dataset has {num_rows} rows: pass one for"
            " each row, or the name of a field"
        )
    return array


def check_num_samples(num_samples: int | None) -> int | None:
    """Check the number of positions that a user sets for an epoch; None for the default."""
    if num_samples is None:
        return None
    return check_integer("num_samples", num_samples, 1, "at least 1 position of an epoch")


def make_sampler(
    maker: SamplerFactory | Callable[[Pool, int], Sampler],
    pool: Pool,
    seed: int,
    fields: Fields,
    block: int | None = None,
) -> Sampler:
    """Make the sampler that a user asks for, and check it."""
    if block is not None and isinstance(maker, SamplerFactory):
        return maker.make_in_blocks(pool, seed, fields, block)
    make = partial(maker.make, fields=fields) if isinstance(maker, SamplerFactory) else maker
    try:
        sampler = make(pool, seed)
    except TypeError as error:
        if not is_argument_mismatch(error):
            raise
        raise TypeError(
            f"sampler={maker!r} can't be called with the pool of rows and the seed ({error}): pass"
            " a function of these two that returns a sampler, or Weighted(...)"
        ) from error
    _check_sampler(sampler, pool)
    return sampler if block is None else sampler.in_blocks(block)


def _check_sampler(sampler: object, pool: Pool) -> None:
    """Check a sampler of a user's own, and look up one position of it."""
    name = type(sampler).__name__
    is_over_pool = isinstance(sampler, Sampler) and sampler.pool.identity == pool.identity
    if not isinstance(sampler, Sampler) or not is_over_pool:
        raise ValueError(
            f"sampler: {sampler!r} was returned; return a lightning_memmap.sampling.Sampler over"
            f" the pool of rows that is passed, {pool}"
        )
    if "__dataclass_fields__" not in vars(type(sampler)):
        raise TypeError(
            f"sampler: {name} isn't a dataclass, so checkpoints can't identify its order: write"
            " @dataclass(frozen=True) above the class"
        )
    for item in identifying(sampler):
        value = getattr(sampler, item.name)
        if not isinstance(identity_of(value), (int, str, Mapping, type(None))):
            raise TypeError(
                f"sampler: {name}.{item.name}={value!r} can't be stored in checkpoints: fields are"
                " ints, strings, bools or None, or have an identity of such values"
            )
    shard = np.zeros(1, np.int64)
    try:
        offsets = sampler.grid(0, 0, 1, shard, np.zeros(1, np.int64))
    except (IndexError, TypeError, AttributeError) as error:
        raise ValueError(
            f"sampler: {name} doesn't work over the pool of rows that is passed ({error}). If it"
            " needs another pool, write a SamplerFactory that makes it, such as Weighted(...)"
        ) from error
    if not (offsets.shape == (1,) and 0 <= offsets[0] < sampler.pool.sizes[0]):
        raise ValueError(f"sampler: {name}.grid returned {offsets!r}, outside of shard 0")
