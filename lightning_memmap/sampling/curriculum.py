"""Orders that change at chosen epochs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
from typing_extensions import Self, override

from lightning_memmap.errors import ReprAsCall
from lightning_memmap.integers import Integers
from lightning_memmap.sampling.factory import Fields, SamplerFactory, make_sampler
from lightning_memmap.sampling.packed_sampler import PackedDocuments, PackedSampler
from lightning_memmap.sampling.pool import Pool, unite_pools
from lightning_memmap.sampling.sampler import Sampler, ShuffledSampler
from lightning_memmap.sampling.table_sampler import TableSampler

#: The sampler of a stage, as for ``sampler``; None for a shuffle. jsonargparse writes None as null
#: into the configs that it prints only in this form and at this place.
Stage: TypeAlias = Literal[None] | SamplerFactory | Callable[[Pool, int], Sampler]


@dataclass(eq=False, repr=False)
class Curriculum(ReprAsCall, SamplerFactory):
    """Changes the order at chosen epochs, for ``MemmapDataModule(sampler=...)``.

    The rows of all stages stay resident from the beginning.

    Args:
        stages: The sampler of each stage by its first epoch, counted from 0: as for ``sampler``, or
            None for a shuffle. Epoch 0 must be among them. All must have the same number of
            positions in an epoch; or all are `Packed` with the same fields and length, such as with
            other shares, and the packs of some are divided further. Evaluated splits are packed as
            by the first one.

    Raises:
        TypeError: ``stages`` is not such a dict.
        ValueError: Epoch 0 is missing, or the stages mix different training sets.
    """

    stages: dict[int, Stage]

    def __post_init__(self) -> None:
        stages = self.stages
        example = "Curriculum({0: Weighted('label'), 5: None})"
        if not isinstance(stages, Mapping) or not all(type(epoch) is int for epoch in stages):
            raise TypeError(
                f"Curriculum: stages={stages!r}: pass samplers by epoch, such as {example}"
            )
        for epoch, stage in stages.items():
            if isinstance(stage, type) or not (
                stage is None or callable(stage) or isinstance(stage, SamplerFactory)
            ):
                raise TypeError(
                    f"Curriculum: stages[{epoch}]={stage!r} can't make a sampler: pass, for"
                    f" example, {example}"
                )
        if 0 not in stages or min(stages) < 0:
            raise ValueError(
                f"Curriculum: stages for the epochs {sorted(stages)}: the first must be epoch 0, as"
                f" in {example}"
            )
        self.stages = {epoch: stages[epoch] for epoch in sorted(stages)}
        named = [
            s.training_sets if isinstance(s, SamplerFactory) else () for s in self.stages.values()
        ]
        if len({frozenset(names) for names in named}) > 1:
            raise ValueError(
                f"{self!r}: its stages mix different training sets: name all of them in each stage,"
                " with a share of 0 if needed"
            )
        self.training_sets = named[0]
        self.by_batch = any(getattr(stage, "by_batch", False) for stage in stages.values())

    @override
    def make(
        self, pool: Pool, seed: int, fields: Fields
    ) -> "CurriculumSampler | PackedCurriculumSampler":
        """Make the sampler; see `SamplerFactory.make`.

        Raises:
            ValueError: The stages differ in their number of positions or in the fields or length of
                packs, or only some pack rows.
        """
        stages = tuple(
            (epoch, make_sampler(ShuffledSampler if stage is None else stage, pool, seed, fields))
            for epoch, stage in self.stages.items()
        )
        packed = [(epoch, order) for epoch, order in stages if isinstance(order, PackedSampler)]
        if len(packed) == len(stages):
            return PackedCurriculumSampler.of(tuple(packed))
        if packed:
            raise ValueError(
                f"{self!r}: stages[{packed[0][0]}] packs rows, and other stages don't, so batches"
                " would change their form: use Packed in all stages"
            )
        counts = [sampler.num_positions for _, sampler in stages]
        if len({*counts}) > 1:
            raise ValueError(
                f"{self!r}: its stages have {counts} positions in an epoch: make them equal with"
                " num_samples"
            )
        return CurriculumSampler.of(EpochOrders(stages))


@dataclass(frozen=True)
class EpochOrders:
    """The orders of a curriculum, each with its first epoch."""

    pairs: tuple[tuple[int, Sampler], ...]

    @property
    def identity(self) -> dict[str, Any]:
        """The values that identify these orders, as JSON values."""
        return {f"epoch {epoch}": sampler.identity for epoch, sampler in self.pairs}

    def index(self, epoch: int) -> int:
        """Return the index of the order of an epoch."""
        return sum(start <= epoch for start, _ in self.pairs) - 1

    def clear(self) -> None:
        """Free the tables of all orders."""
        for _, sampler in self.pairs:
            sampler.clear()


@dataclass(frozen=True, kw_only=True)
class CurriculumSampler(TableSampler):
    """An order that changes at chosen epochs, over a pool with the rows of all stages."""

    stages: EpochOrders

    @classmethod
    def of(cls, stages: EpochOrders, block: int | None = None) -> Self:
        """Make the order over a pool that holds the rows of all stages."""
        samplers = [sampler for _, sampler in stages.pairs]
        pool = unite_pools([sampler.pool for sampler in samplers])
        num_samples = samplers[0].num_positions
        return cls(pool, stages=stages, shuffle_block=block, num_samples=num_samples)

    def _order(self, epoch: int) -> Sampler:
        return self.stages.pairs[self.stages.index(epoch)][1]

    @property
    @override
    def epoch_columns(self) -> Sequence[Any]:
        return [column for _, order in self.stages.pairs for column in order.epoch_columns]

    @override
    def results_in(self, epoch: int) -> dict[str, Any]:
        return self._order(epoch).results_in(epoch)

    @override
    def offsets(self, epoch: int, shard: int) -> Integers:
        order = self._order(epoch)
        positions = range(shard, self.num_positions, self.num_shards)
        stage_offsets = order.locate(epoch, positions, np.zeros_like(self.pool.starts))
        offsets: Integers = self.pool.offsets_of(order.pool, shard)[stage_offsets]
        return offsets

    @override
    def in_blocks(self, block: int) -> Self:
        # In blocks, some stages hold other rows in their shards.
        stages = ((epoch, sampler.in_blocks(block)) for epoch, sampler in self.stages.pairs)
        return self.of(EpochOrders(tuple(stages)), block)

    @override
    def clear(self) -> None:
        super().clear()
        self.stages.clear()


@dataclass(frozen=True, kw_only=True)
class PackedCurriculumSampler(PackedSampler):
    """An order of packs that changes at chosen epochs, over a pool with the rows of all stages."""

    stages: EpochOrders

    @classmethod
    def of(cls, stages: tuple[tuple[int, PackedSampler], ...]) -> Self:
        """Make the order of some stages, with as many packs as the one that has most.

        Raises:
            ValueError: Their packs differ in their fields or length, or the documents of one can't
                be divided into as many packs.
        """
        orders = [order for _, order in stages]
        if len({order.options.limits for order in orders}) > 1:
            limits = [dict(order.options.limits) for order in orders]
            raise ValueError(
                f"Curriculum: the stages have packs of {limits}: set the same fields and length in"
                " each, so that all batches have the same shape"
            )
        num_packs = max(order.num_packs for order in orders)
        orders = [order.with_packs(num_packs) for order in orders]
        epochs = [epoch for epoch, _ in stages]
        return cls(
            unite_pools([order.pool for order in orders]),
            orders[0].seed,
            options=orders[0].options,
            documents=orders[0].documents,
            num_packs=num_packs,
            max_documents=max(order.max_documents for order in orders),
            stages=EpochOrders(tuple(zip(epochs, orders, strict=True))),
        )

    @property
    def _orders(self) -> list[PackedSampler]:
        return [order for _, order in self.stages.pairs if isinstance(order, PackedSampler)]

    @cached_property
    def _pool_indices(self) -> list[Integers]:
        """By stage, the index in the pool of each row of the stage's pool."""
        starts = self.pool.starts.tolist()
        return [
            np.concatenate(
                [start + self.pool.offsets_of(pool, shard) for shard, start in enumerate(starts)]
            )
            for pool in (order.pool for order in self._orders)
        ]

    @override
    def documents_at(self, epoch: int, positions: Integers) -> PackedDocuments:
        stage = self.stages.index(epoch)
        packed = self._orders[stage].documents_at(epoch, positions)
        return packed._replace(pool_index=self._pool_indices[stage][packed.pool_index])

    @property
    @override
    def padding_fraction(self) -> float:
        return self._orders[0].padding_fraction

    @property
    @override
    def cuts_rows(self) -> bool:
        return any(order.cuts_rows for order in self._orders)

    @property
    @override
    def max_seqlen(self) -> dict[str, int]:
        longest = [order.max_seqlen for order in self._orders]
        return {name: max(most[name] for most in longest) for name in longest[0]}

    @override
    def in_blocks(self, block: int) -> Self:
        raise ValueError(
            f"shuffle_block={block}: the stages of a curriculum of packs would have different"
            " blocks: omit shuffle_block, and use residency='mmap' or 'host' instead of 'stream'"
        )

    @override
    def clear(self) -> None:
        super().clear()
        self.stages.clear()
