"""Another order from an epoch on."""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lightning_memmap.errors import call_text
from lightning_memmap.sampling.block_shuffled import BlockShuffledSampler
from lightning_memmap.sampling.factory import Fields, SamplerFactory, made_sampler
from lightning_memmap.sampling.sampler import Sampler, WindowedSampler
from lightning_memmap.sampling.shards import Integers, Shards
from lightning_memmap.sampling.shuffled import ShuffledSampler
from lightning_memmap.sampling.windows import ReadWindows

#: What makes a sampler; None for rows that are shuffled. In this form and at this place,
#: jsonargparse writes it as null into a config that it prints.
Stage: TypeAlias = Literal[None] | SamplerFactory | Callable[[Shards, int], Sampler]


class Curriculum(SamplerFactory):
    """Changes the order from given epochs on, for ``MemmapDataModule(sampler=...)``.

    The rows of all the orders are held from the beginning.

    Args:
        stages: By the epoch from which it holds, counted from 0, what makes the order: as for
            ``sampler``, or None for rows that are shuffled. There is one for epoch 0. All have as
            many positions in an epoch.

    Raises:
        TypeError: ``stages`` is not such a dict.
        ValueError: There is none for epoch 0, or they mix different training sets.
    """

    def __init__(self, stages: dict[int, Stage]) -> None:
        example = "Curriculum({0: Weighted('label'), 5: None})"
        if not isinstance(stages, Mapping) or not all(type(epoch) is int for epoch in stages):
            raise TypeError(f"Curriculum: {stages!r}: give samplers by epoch, such as {example}")
        for epoch, stage in stages.items():
            is_class = isinstance(stage, type)
            if is_class or not (
                stage is None or callable(stage) or isinstance(stage, SamplerFactory)
            ):
                raise TypeError(f"Curriculum: epoch {epoch}: {stage!r} is no sampler: {example}")
        if 0 not in stages or min(stages) < 0:
            raise ValueError(
                f"Curriculum: stages for the epochs {sorted(stages)}: the first one is epoch 0:"
                f" {example}"
            )
        self.stages = {epoch: stages[epoch] for epoch in sorted(stages)}
        mixed = [s.stores if isinstance(s, SamplerFactory) else () for s in self.stages.values()]
        if len({frozenset(names) for names in mixed}) > 1:
            raise ValueError(
                f"{self!r}: its samplers mix different training sets: give each of them a share in"
                " all, which may be 0"
            )
        self.stores = mixed[0]

    @override
    def __repr__(self) -> str:
        return call_text("Curriculum", stages=self.stages)

    @override
    def make(
        self, shards: Shards, seed: int, fields: Fields, window: int | None = None
    ) -> "CurriculumSampler":
        """Make the sampler; see `SamplerFactory.make`.

        Raises:
            ValueError: The orders differ in their positions of an epoch, or one of them cannot
                come in windows.
        """

        def shuffled(shards: Shards, seed: int) -> Sampler:
            if window is None:
                return ShuffledSampler(shards, seed)
            return BlockShuffledSampler(shards, seed, window)

        made = [
            made_sampler(shuffled if stage is None else stage, shards, seed, fields, window)
            for stage in self.stages.values()
        ]
        counts = [sampler.num_positions for sampler in made]
        if len({*counts}) > 1:
            raise ValueError(
                f"{self!r}: its epochs have {counts} positions: all need as many, which num_samples"
                " sets"
            )
        union = SharedShards.of(shards, tuple(sampler.shards for sampler in made))
        stages = EpochOrders(tuple(self.stages), tuple(made))
        if window is None:
            return CurriculumSampler(union, stages)
        for sampler in made:
            ReadWindows(sampler, window)  # Functions make what they want.
        return WindowedCurriculumSampler(union, stages, window)


@dataclass(frozen=True)
class EpochOrders:
    """The orders of a curriculum.

    Args:
        epochs: The first epoch of each, ascending from 0.
        samplers: The orders.
    """

    epochs: tuple[int, ...]
    samplers: tuple[Sampler, ...]

    @property
    def identity(self) -> dict[str, Any]:
        """What tells these from others, as JSON values."""
        pairs = zip(self.epochs, self.samplers, strict=True)
        return {f"epoch {epoch}": sampler.identity for epoch, sampler in pairs}


@dataclass(frozen=True, kw_only=True)
class SharedShards(Shards):
    """The rows that several orders need, each of which has its own shards of them.

    A shard has the rows of that shard in all of these orders, each once, by their places in a file.

    Args:
        num_rows: Rows of all shards together.
        num_shards: Shards, ``C``.
        subset: Which rows of the dataset these are; all of them where it is None.
        shared: The rows, and the shards that they are divided into by number.
        used: The shards of each order.
    """

    shared: Shards
    used: tuple[Shards, ...]

    @classmethod
    def of(cls, shared: Shards, used: tuple[Shards, ...]) -> "SharedShards":
        """The shards that hold the rows of several orders.

        Args:
            shared: The rows, and the shards that they are divided into by number.
            used: The shards of each order.
        """
        places = _places(shared, used)
        count = sum(len(each) for each in places)
        return cls(count, shared.num_shards, shared.subset, shared=shared, used=used)

    @property
    @override
    def identity(self) -> dict[str, Any]:
        return self.shared.identity

    @property
    @override
    def base(self) -> Shards:
        return self.shared

    @cached_property
    def _places(self) -> list[Integers]:
        """The places in a file of the rows of each shard, ascending."""
        return _places(self.shared, self.used)

    @cached_property
    def _all_places(self) -> Integers:
        return np.concatenate(self._places)

    @cached_property
    def sizes(self) -> Integers:
        """Rows of each shard, int64 of shape (C,)."""
        return np.array([len(places) for places in self._places], np.int64)

    def offsets_of(self, number: int) -> NDArray[Any]:
        """Where the rows of an order are.

        Args:
            number: Which of the orders.

        Returns:
            For each row of the order's shards, shard after shard, its offset within the shard here:
            integers of shape (rows of the order,).
        """
        used = self.used[number]
        found = [
            np.searchsorted(places, _places_of(self.shared, used, shard))
            for shard, places in enumerate(self._places)
        ]
        dtype = np.uint32 if self.num_rows < 2**32 else np.int64
        return np.concatenate(found).astype(dtype)

    @override
    def dataset_rows(self, shards: Integers, offsets: Integers) -> Integers:
        return self.shared.dataset_rows_at(self._all_places[self.starts[shards] + offsets])

    @override
    def rows_of(self, shard: int) -> Integers:
        return self.shared.dataset_rows_at(self._places[shard])

    @override
    def starts_in(self, stored: Shards) -> Integers | None:
        firsts = [int(places[0]) if len(places) else 0 for places in self._places]
        is_run = all(
            not len(places) or int(places[-1]) - first + 1 == len(places)
            for first, places in zip(firsts, self._places, strict=True)
        )
        return np.array(firsts, np.int64) if is_run and self.shared == stored else None

    @override
    def locations_in(self, stored: Shards, shards: Integers, offsets: Integers) -> Integers:
        if self.shared == stored:
            found: Integers = self._all_places[self.starts[shards] + offsets]
            return found
        return super().locations_in(stored, shards, offsets)


def _places_of(shared: Shards, used: Shards, shard: int) -> Integers:
    offsets = np.arange(used.sizes[shard], dtype=np.int64)
    return used.locations_in(shared, np.full_like(offsets, shard), offsets)


def _places(shared: Shards, used: tuple[Shards, ...]) -> list[Integers]:
    return [
        np.unique(np.concatenate([_places_of(shared, each, shard) for each in used]))
        for shard in range(shared.num_shards)
    ]


@dataclass(frozen=True)
class CurriculumSampler(Sampler):
    """Another order from an epoch on.

    Args:
        shards: The rows of all orders.
        stages: The orders.
    """

    shards: SharedShards
    stages: EpochOrders

    @property
    @override
    def num_positions(self) -> int:
        return self.stages.samplers[0].num_positions

    @override
    def grid(
        self, epoch: int, first: int, last: int, shards: Integers, starts: Integers
    ) -> Integers:
        number = bisect_right(self.stages.epochs, epoch) - 1
        sampler = self.stages.samplers[number]
        found = sampler.grid(epoch, first, last, shards, sampler.shards.starts[shards])
        # Behind the last position, places may be anywhere.
        offsets = self._offsets[number].take(found, mode="wrap").reshape(-1, len(shards))
        rows: Integers = np.add(offsets, starts, dtype=np.int64).ravel()
        return rows

    @cached_property
    def _offsets(self) -> list[NDArray[Any]]:
        return [self.shards.offsets_of(number) for number in range(len(self.stages.samplers))]


@dataclass(frozen=True)
class WindowedCurriculumSampler(CurriculumSampler, WindowedSampler):
    """Another order from an epoch on, each of which comes in windows.

    Args:
        shards: The rows of all orders.
        stages: The orders.
        shuffle_window: Positions of a shard in a window of any of them.
    """

    shuffle_window: int

    @property
    @override
    def window_rows(self) -> int:
        return self.shuffle_window
