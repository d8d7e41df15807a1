"""What makes a sampler, once the rows and their shards are known."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_memmap.errors import is_refused_call
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.sampler import Sampler, check_sampler
from lightning_memmap.sampling.shards import Integers


class Fields(Protocol):
    """The fields of a dataset, which a sampler or a selection may look up. A store is one."""

    @property
    def num_rows(self) -> int:
        """Rows of the dataset."""

    def values(self, field: str, rows: Integers | None = None) -> NDArray[Any]:
        """The value of a field of each row.

        Args:
            field: Name of a field with one value in each row.
            rows: The rows, int64 of shape (N,); by default all, in dataset order.

        Returns:
            An array of shape (N,).

        Raises:
            ValueError: There is no such field, its rows have more than one value, or the field is
                None in one of the rows; see `given`.
        """

    def given(self, field: str) -> NDArray[np.bool_]:
        """In which rows a field has a value.

        Args:
            field: Name of a field.

        Returns:
            Of shape (num_rows,), in dataset order: False where it is None.

        Raises:
            ValueError: There is no such field.
        """

    def lengths(self, field: str) -> Integers:
        """The length of each row of a field whose rows differ in length. No value is read.

        Args:
            field: Name of such a field.

        Returns:
            The items of each row, for text its bytes: int64 of shape (num_rows,), in dataset order.

        Raises:
            ValueError: There is no such field, or its rows have one length.
        """


class SamplerFactory(ABC):
    """Makes a sampler that needs fields of the dataset, for ``MemmapDataModule(sampler=...)``.

    If it needs none, a function of the pool and the seed will do.
    """

    #: The names of the training stores that it mixes; empty for one store without a name.
    stores: tuple[str, ...] = ()
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
            A sampler over this pool, or over a pool of other shards of its rows.
        """


def one_by_row(name: str, given: Any, num_rows: int) -> NDArray[Any]:
    """What is given for each row of a dataset, of shape (num_rows,)."""
    found = np.asarray(given)
    if found.shape != (num_rows,):
        raise ValueError(
            f"{name} of shape {found.shape}, and the dataset has {num_rows} rows: give one for"
            " each, or the name of a field"
        )
    return found


def made_sampler(
    maker: SamplerFactory | Callable[[Pool, int], Sampler],
    pool: Pool,
    seed: int,
    fields: Fields,
    block: int | None = None,
) -> Sampler:
    """Have a sampler made, and check it."""
    if isinstance(maker, SamplerFactory):
        sampler = check_sampler(maker.make(pool, seed, fields), pool)
    else:
        try:
            sampler = maker(pool, seed)
        except TypeError as error:
            if not is_refused_call(error):
                raise
            raise TypeError(
                f"sampler={maker!r}: it cannot be called with the pool of rows and the seed"
                f" ({error}): give a function of these two that returns a sampler, or Weighted(...)"
            ) from error
        sampler = check_sampler(sampler, pool)
    if block is None:
        return sampler
    found = sampler.in_blocks(block)
    if found.block != block and not found.is_sequential:
        raise ValueError(
            f"shuffle_window={block}, and {type(sampler).__name__} decides itself how rows come:"
            " let it draw rows, and leave permuting them to its base class; or leave shuffle_window"
            " out, and use residency='mmap' or 'host' rather than 'stream'"
        )
    return found
