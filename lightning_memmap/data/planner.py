"""Plans a set-up: how each split is divided into shards, in which order, and where shards live."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_memmap.data.split_stores import SplitStores
from lightning_memmap.errors import MemmapError
from lightning_memmap.loading.split import largest_block_bytes
from lightning_memmap.placement.plan import Placement, SplitShards, divide, plan_placement
from lightning_memmap.placement.topology import DataTopology, compute_budgets
from lightning_memmap.sampling.curriculum import Curriculum
from lightning_memmap.sampling.factory import make_sampler
from lightning_memmap.sampling.packed import Packed
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.rows import Integers, WindowedRows, divisors
from lightning_memmap.sampling.sampler import Sampler, SequentialSampler, ShuffledSampler
from lightning_memmap.sampling.schedule import Blocks, default_block
from lightning_memmap.store import Store
from lightning_memmap.store.series import make_fields, windowed

#: Steps whose rows a background build reads first, before there is a loader.
FIRST_STEPS = 16


@dataclass(frozen=True)
class Planner:
    """Plans the order and the placement of each split of a data module."""

    stores: SplitStores
    topology: DataTopology
    #: Whether training rows are read in dataset order, under ``overfit_batches``.
    is_overfitting: bool = False

    def place(
        self, opened: Mapping[str, Store], budget_bytes: Mapping[torch.device, int] | None = None
    ) -> Placement:
        """Plan where the shards live.

        Args:
            opened: The open stores by split.
            budget_bytes: Bytes that shards may take on each device. By default the free memory is
                measured now.
        """
        options = self.stores.options
        topology = self.topology
        splits = {split: self.shards(split, store) for split, store in opened.items()}
        if budget_bytes is None:
            budget_bytes = compute_budgets(
                topology.data_devices,
                options.memory_fraction,
                topology.num_local_processes,
                topology.processes_per_device,
            )
        return plan_placement(splits, topology, options.residency, budget_bytes=budget_bytes)

    def first_rows(self, stores: Mapping[str, Store]) -> dict[str, Integers]:
        """Return the rows of the first training steps, by store, with their positions.

        The stores may still be empty.
        """
        # Fields can't be looked up yet. Errors in the order are raised by the set-up.
        with suppress(ValueError, MemmapError):
            if (store := self.stores.joined("train", stores)) is not None:
                order = self.shards("train", store).order
                num_rows = min(FIRST_STEPS * self.step_rows, order.num_positions)
                rows = order.dataset_rows(0, range(num_rows))
                parts = zip(self.stores.parts("train"), store.each(rows), strict=True)
                return {name: np.stack(part[1:]) for name, part in parts}
        return {}

    @property
    def step_rows(self) -> int:
        """Rows of a training step on all data devices."""
        return self.stores.options.batch_size * self.topology.num_data_devices

    def shards(self, split: str, store: Store) -> SplitShards:
        """Divide a split into shards, choose its order, and measure the shards."""
        options = self.stores.options
        topology = self.topology
        rows = windowed(store, self.stores.rows(split, store), options.windows)
        num_shards = options.num_shards or store.manifest.choose_num_shards(rows.num_rows)
        order = self._order(split, store, divide(split, rows, num_shards, topology))
        if order.num_shards != num_shards and not order.is_sequential:
            counts = [*map(str, divisors(num_shards))]
            usable = f"{', '.join(counts[:-1])} or {counts[-1]}" if counts[1:] else counts[0]
            rank_zero_warn(
                f"the {split} rows are in {num_shards} shards, which {topology.num_data_devices}"
                f" data devices do not divide: they are striped again over {order.num_shards}, in"
                f" another order. {usable} data devices would keep the order"
            )
        block_bytes = 0
        if options.is_streamed:
            held = topology.held(order.num_shards)
            block_bytes = largest_block_bytes(store, Blocks(order), held)
        return SplitShards.of(order, store.manifest, topology, block_bytes)

    def _order(self, split: str, store: Store, pool: Pool) -> Sampler:
        """Return the order of the rows of a split."""
        options = self.stores.options
        rows = pool.rows
        block = options.shuffle_block
        if block is None and options.is_streamed:
            stored = rows.series if isinstance(rows, WindowedRows) else rows
            row_bytes = store.manifest.row_bytes * stored.num_rows / rows.num_rows
            block = default_block(pool.num_shards, row_bytes)
        maker = options.sampler
        is_evaluated = split != "train" or self.is_overfitting
        packed = maker.stages[0] if isinstance(maker, Curriculum) else maker
        if isinstance(packed, Packed) and is_evaluated:
            return packed.make_fixed(split, pool, make_fields(store, rows), block)
        if is_evaluated or not options.shuffle:
            return SequentialSampler(pool, shuffle_block=block)
        if maker is None:
            return ShuffledSampler(pool, options.seed, block)
        if options.is_by_batch:
            pool = replace(pool, global_batch=self.step_rows)
        return make_sampler(maker, pool, options.seed, make_fields(store, rows), block)
