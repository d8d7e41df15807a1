"""Another order from an epoch on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from typing_extensions import Self, override

from lightning_memmap.errors import Described
from lightning_memmap.sampling.pool import Pool, united
from lightning_memmap.sampling.rows import Integers
from lightning_memmap.sampling.sampler import (
    Fields,
    Sampler,
    SamplerFactory,
    ShuffledSampler,
    made_sampler,
)

#: What makes a sampler; None for rows that are shuffled. In this form and at this place,
#: jsonargparse writes it as null into a config that it prints.
Stage: TypeAlias = Literal[None] | SamplerFactory | Callable[[Pool, int], Sampler]


@dataclass(eq=False, repr=False)
class Curriculum(Described, SamplerFactory):
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

    stages: dict[int, Stage]

    def __post_init__(self) -> None:
        stages = self.stages
        example = "Curriculum({0: Weighted('label'), 5: None})"
        if not isinstance(stages, Mapping) or not all(type(epoch) is int for epoch in stages):
            raise TypeError(f"Curriculum: {stages!r}: give samplers by epoch, such as {example}")
        for epoch, stage in stages.items():
            if isinstance(stage, type) or not (
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
        self.by_batch = any(getattr(stage, "by_batch", False) for stage in stages.values())

    @override
    def make(self, pool: Pool, seed: int, fields: Fields) -> "CurriculumSampler":
        """Make the sampler; see `SamplerFactory.make`.

        Raises:
            ValueError: The orders differ in their positions of an epoch.
        """
        made = tuple(
            (epoch, made_sampler(ShuffledSampler if stage is None else stage, pool, seed, fields))
            for epoch, stage in self.stages.items()
        )
        counts = [sampler.num_positions for _, sampler in made]
        if len({*counts}) > 1:
            raise ValueError(
                f"{self!r}: its epochs have {counts} positions: all need as many, which num_samples"
                " sets"
            )
        return CurriculumSampler.of(EpochOrders(made))


@dataclass(frozen=True)
class EpochOrders:
    """The orders of a curriculum, each with the epoch from which it holds."""

    pairs: tuple[tuple[int, Sampler], ...]

    @property
    def identity(self) -> dict[str, Any]:
        """What tells these from others, as JSON values."""
        return {f"epoch {epoch}": sampler.identity for epoch, sampler in self.pairs}


@dataclass(frozen=True, kw_only=True)
class CurriculumSampler(Sampler):
    """Another order from an epoch on."""

    stages: EpochOrders

    @classmethod
    def of(cls, stages: EpochOrders, block: int | None = None) -> Self:
        """The order over a pool that has the rows of all stages."""
        pool = united([sampler.pool for _, sampler in stages.pairs])
        return cls(pool, stages=stages, shuffle_window=block)

    def _order(self, epoch: int) -> Sampler:
        return [sampler for first, sampler in self.stages.pairs if first <= epoch][-1]

    @override
    def offsets(self, epoch: int, shard: int) -> Integers:
        order, positions = self._order(epoch), range(shard, self.num_positions, self.num_shards)
        held = self.pool.whole(self.pool.index(shard))
        at = np.searchsorted(held, self.pool.whole_of(order.pool, shard))
        found: Integers = at[order.index(epoch, positions, np.zeros_like(self.pool.starts))]
        return found

    @override
    def grid(
        self, epoch: int, first: int, last: int, shards: Integers, starts: Integers
    ) -> Integers:
        order = self._order(epoch)
        held, used = self.pool.begins, order.pool.begins
        if held is None or used is None:
            return super().grid(epoch, first, last, shards, starts)
        # The rows of a shard lie one after the other, in both pools: no table is needed.
        return order.grid(epoch, first, last, shards, starts + (used - held)[shards])

    @override
    def in_blocks(self, block: int) -> Self:
        # Some stages have other rows in their shards then.
        made = ((epoch, sampler.in_blocks(block)) for epoch, sampler in self.stages.pairs)
        return self.of(EpochOrders(tuple(made)), block)

    @override
    def clear(self) -> None:
        super().clear()
        for _, sampler in self.stages.pairs:
            sampler.clear()
