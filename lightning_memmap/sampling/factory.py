"""What makes a sampler, once the rows and their shards are known."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_memmap.errors import is_refused_call
from lightning_memmap.sampling.sampler import Sampler, check_sampler
from lightning_memmap.sampling.shards import Integers, Shards


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

    If it needs none, a function of the shards and the seed will do.
    """

    #: The names of the training stores that it mixes; empty for one store without a name.
    stores: tuple[str, ...] = ()

    @abstractmethod
    def make(self, shards: Shards, seed: int, fields: Fields, window: int | None = None) -> Sampler:
        """Make the sampler. It must not depend on anything else, such as the process.

        Args:
            shards: The training rows, and the shards that they are divided into.
            seed: Seed of the order.
            fields: The fields of the dataset.
            window: Rows come in windows of so many of a shard, so that those which come together
                also lie together: a `lightning_memmap.sampling.WindowedSampler` is made. None for
                any order.

        Returns:
            A sampler over these shards, or over shards of its own whose ``base`` these are.

        Raises:
            ValueError: The rows cannot come in windows.
        """


def made_sampler(
    maker: SamplerFactory | Callable[[Shards, int], Sampler],
    shards: Shards,
    seed: int,
    fields: Fields,
    window: int | None = None,
) -> Sampler:
    """Have a sampler made, and check it.

    Args:
        maker: What makes it.
        shards: As for `SamplerFactory.make`.
        seed: As there.
        fields: As there.
        window: As there. What a function makes decides by itself.

    Returns:
        The sampler.

    Raises:
        TypeError: It is no frozen dataclass of values that checkpoints can hold, or ``maker`` is no
            function of two arguments.
        ValueError: It is over other shards, or its first rows are not rows of their shards.
    """
    if isinstance(maker, SamplerFactory):
        return check_sampler(maker.make(shards, seed, fields, window), shards)
    try:
        sampler = maker(shards, seed)
    except TypeError as error:
        if not is_refused_call(error):
            raise
        raise TypeError(
            f"sampler={maker!r}: it cannot be called with the shards and the seed ({error}): give a"
            " function of these two that returns a sampler, or Weighted(...)"
        ) from error
    return check_sampler(sampler, shards)
