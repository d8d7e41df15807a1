"""Several training sets in given shares."""

from collections.abc import Mapping
from reprlib import repr as short_repr

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lightning_memmap.errors import call_text, check_integer, check_number
from lightning_memmap.sampling.factory import Fields, SamplerFactory
from lightning_memmap.sampling.joined_shards import JoinedShards
from lightning_memmap.sampling.mixture_windows import MixtureSampler, MixtureShards
from lightning_memmap.sampling.shards import Shards
from lightning_memmap.sampling.weighted import WeightedSampler
from lightning_memmap.sampling.weighted_shards import WeightedShards
from lightning_memmap.sampling.window_shards import WindowShards


class Mixture(SamplerFactory):
    """Draws from several training sets in given shares, for ``MemmapDataModule(sampler=...)``.

    In each epoch, a row of a set comes as often as ``num_samples * share / rows of the set`` says,
    rounded up or down at random so that this is the mean over epochs, as of `Weighted`. All steps
    have about the same shares, since they are those of the shards.

    In windows, see ``shuffle_window``, each shard reads its piece of a set on and on instead, and
    an epoch goes on where the last one ended; see `lightning_memmap.sampling.mixture_windows`.

    Args:
        shares: The share of each set by the name that it has in ``train_dataset``, not negative.
            They need not add up to 1.
        num_samples: Positions of an epoch; by default as many as all sets together have rows.

    Raises:
        TypeError: ``shares`` is not a dict of numbers, or ``num_samples`` not an integer.
        ValueError: A share is negative or not finite, all are 0, or ``num_samples`` is below 1.
    """

    def __init__(self, shares: dict[str, float], num_samples: int | None = None) -> None:
        if not isinstance(shares, Mapping) or not all(isinstance(name, str) for name in shares):
            raise TypeError(
                f"Mixture: shares={short_repr(shares)}: give a dict of shares by the name of the"
                " training set, such as {'a': 0.7, 'b': 0.3}"
            )
        shares = {
            name: check_number(f"Mixture: shares[{name!r}]", share)
            for name, share in shares.items()
        }
        for name, share in shares.items():
            if not 0 <= share < float("inf"):
                raise ValueError(f"Mixture: shares[{name!r}]={share}: shares are 0 or more")
        if not any(shares.values()):
            raise ValueError(f"Mixture: shares={shares}: no set has a share")
        if num_samples is not None:
            reason = "at least 1 position of an epoch"
            num_samples = check_integer("num_samples", num_samples, 1, reason)
        self.shares, self.num_samples = shares, num_samples
        self.stores = tuple(shares)

    @override
    def __repr__(self) -> str:
        return call_text("Mixture", shares=self.shares, num_samples=self.num_samples)

    @override
    def make(
        self, shards: Shards, seed: int, fields: Fields, window: int | None = None
    ) -> WeightedSampler | MixtureSampler:
        """Make the sampler; see `SamplerFactory.make`.

        Raises:
            ValueError: There are other sets than those that have a share, or one with a share has
                no row.
        """
        joined = shards.of_series if isinstance(shards, WindowShards) else shards
        if not isinstance(joined, JoinedShards) or {*joined.stores} != {*self.shares}:
            found = joined.stores if isinstance(joined, JoinedShards) else "one set without a name"
            raise ValueError(
                f"{self!r}: the training sets are {found}; give each of them a share, such as"
                " train_dataset={'a': ..., 'b': ...} with sampler=Mixture({'a': 0.7, 'b': 0.3})"
            )
        # The sets lie one after the other in the order of a file.
        edges = np.append(joined.firsts, joined.num_rows)
        if isinstance(shards, WindowShards):
            edges = np.append(0, shards.ends)[edges]
        sizes = np.diff(edges)
        shares = np.array([self.shares[name] for name in joined.stores])
        if empty := [
            name
            for name, size, share in zip(joined.stores, sizes, shares, strict=True)
            if share and not size
        ]:
            raise ValueError(f"{self!r}: the training set {empty[0]!r} has no window")
        count = shards.num_rows if self.num_samples is None else self.num_samples
        shares /= shares.max()  # The sum of very large numbers would be infinite.
        if window is not None:
            counts = _rounded(count * (shares / shares.sum()), count)
            return MixtureSampler(MixtureShards.of(shards, sizes.tolist(), counts), seed, window)
        expected = count * shares / shares.sum() / np.maximum(1, sizes)
        return WeightedSampler(WeightedShards.of(shards, expected.repeat(sizes), count), seed)


def _rounded(numbers: NDArray[np.float64], total: int) -> list[int]:
    """Whole numbers next to given ones that add up to a total."""
    found = np.floor(numbers).astype(np.int64)
    largest = np.argsort(found - numbers, kind="stable")
    found[largest[: total - int(found.sum())]] += 1
    counts: list[int] = found.tolist()
    return counts
