"""The set-up of a data module: planned, loaded, and reported.

A plan decides how each split is divided into shards, in which order, and where shards are kept. A
set-up holds the open stores and the resident rows.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn
from rich.console import Console

from lightning_memmap.data.options import DataOptions
from lightning_memmap.data.split_stores import SplitStores
from lightning_memmap.errors import MemmapError
from lightning_memmap.integers import Integers
from lightning_memmap.loading.split import SplitRows, load_split, max_block_bytes
from lightning_memmap.placement.plan import (
    Placement,
    Residency,
    SplitShards,
    make_pool,
    placement_table,
    plan_placement,
)
from lightning_memmap.placement.topology import DataTopology, compute_budgets, measure_free_bytes
from lightning_memmap.sampling.curriculum import Curriculum
from lightning_memmap.sampling.factory import make_sampler
from lightning_memmap.sampling.packed import Packed
from lightning_memmap.sampling.packed_sampler import PackedSampler
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.rows import WindowedRows, divisors
from lightning_memmap.sampling.sampler import Sampler, SequentialSampler, ShuffledSampler
from lightning_memmap.sampling.schedule import Blocks, default_block, steps_to_skip
from lightning_memmap.schema.forms import use_center_crops
from lightning_memmap.sizes import format_bytes
from lightning_memmap.store import Store
from lightning_memmap.store.series import cut_into_windows, make_fields

#: Steps whose rows a background build reads first, before there is a loader.
FIRST_STEPS = 16
#: The placement of each split in the table that this process has printed last.
_printed: dict[str, tuple[Any, ...]] = {}
#: The stores of omitted validation datasets that this process has named.
_named = set[str]()


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
        splits = {split: self.plan_split(split, store) for split, store in opened.items()}
        if budget_bytes is None:
            budget_bytes = compute_budgets(topology, options.memory_fraction)
        return plan_placement(splits, topology, options.residency, budget_bytes=budget_bytes)

    def find_first_step_rows(self, stores: Mapping[str, Store]) -> dict[str, Integers]:
        """Return the rows of the first training steps, by store, with their positions.

        The stores may still be empty.
        """
        # Fields can't be looked up yet. Errors in the order are raised by the set-up.
        with suppress(ValueError, MemmapError):
            if (store := self.stores.joined("train", stores)) is not None:
                order = self.plan_split("train", store).order
                num_rows = min(FIRST_STEPS * self.step_rows, order.num_positions)
                rows = order.dataset_rows(0, range(num_rows))
                parts = zip(self.stores.parts("train"), store.split_by_store(rows), strict=True)
                return {name: np.stack(part[1:]) for name, part in parts}
        return {}

    @property
    def step_rows(self) -> int:
        """Rows of a training step on all data devices."""
        return self.stores.options.batch_size * self.topology.num_global_data_devices

    def plan_split(self, split: str, store: Store) -> SplitShards:
        """Divide a split into shards, choose its order, and measure the shards."""
        options = self.stores.options
        topology = self.topology
        rows = cut_into_windows(store, self.stores.rows(split, store), options.windows)
        num_shards = options.num_shards or store.manifest.choose_num_shards(rows.num_rows)
        order = self._make_order(split, store, make_pool(split, rows, num_shards, topology))
        if order.num_shards != num_shards and not order.is_sequential:
            _warn_of_restriping(split, num_shards, topology.num_global_data_devices, order)
        block_bytes = 0
        if options.is_streamed:
            held = topology.shards_of_process(order.num_shards)
            block_bytes = max_block_bytes(store, Blocks(order), held)
        return SplitShards.of(order, store.manifest, topology, block_bytes)

    def _make_order(self, split: str, store: Store, pool: Pool) -> Sampler:
        """Make the order of the rows of a split."""
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
            fields = make_fields(store, rows)
            return packed.make_evaluated(pool, fields, split == "predict", block)
        if is_evaluated or not options.shuffle:
            return SequentialSampler(pool, shuffle_block=block)
        if maker is None:
            return ShuffledSampler(pool, options.seed, block)
        if options.is_by_batch:
            pool = replace(pool, global_batch=self.step_rows)
        return make_sampler(maker, pool, options.seed, make_fields(store, rows), block)


@dataclass(eq=False)
class SetUp:
    """Open stores, and the resident rows of each split, until these are freed."""

    planner: Planner
    stores: Mapping[str, Store]
    placement: Placement
    rows: Mapping[str, SplitRows]
    #: Orders that were made by `make_order`, whose tables are freed with the rows.
    _orders: list[Sampler] = field(default_factory=list)

    @classmethod
    def load(cls, planner: Planner, stores: Mapping[str, Store], placement: Placement) -> "SetUp":
        """Make the shards of this process resident where a placement wants them."""
        options = planner.stores.options
        rows = dict[str, SplitRows]()
        for split, store in stores.items():
            decode = options.decode if split == "train" else use_center_crops(options.decode)
            loaded = load_split(store, planner.topology, placement.splits[split], decode)
            rows[split] = replace(loaded, with_row_numbers=options.with_row_numbers)
        return cls(planner, stores, placement, rows)

    @property
    def options(self) -> DataOptions:
        """The options of the data module at its set-up."""
        return self.planner.stores.options

    @property
    def order(self) -> Sampler | None:
        """The order of the training rows; None if they are not set up."""
        return self.placement.splits["train"].order if "train" in self.stores else None

    def make_order(self, options: DataOptions) -> Sampler:
        """Return the order of the training rows under options that were set after the set-up."""
        old = self.options
        order = self.placement.splits["train"].order
        block = options.shuffle_block
        if old.is_streamed and block != old.shuffle_block:
            raise ValueError(
                f"shuffle_block={block}: under residency='stream' the rows are set up with"
                f" shuffle_block={old.shuffle_block}: call setup() after you set it"
            )
        if options.order_options == old.order_options:
            return order
        # The rows stay in the shards of the set-up.
        changed = replace(old, num_shards=order.num_shards, **options.order_options)
        planner = replace(self.planner, stores=replace(self.planner.stores, options=changed))
        new_order = planner.plan_split("train", self.stores["train"]).order
        is_same_block = new_order.shuffle_block == order.shuffle_block
        if new_order.pool != order.pool or (old.is_streamed and not is_same_block):
            raise ValueError(
                f"sampler={options.sampler!r}: needs other rows than those that are set up: call"
                " setup() after you set it"
            )
        self._orders.append(new_order)
        return new_order

    @property
    def train_stores(self) -> dict[str, dict[str, str]]:
        """Row counts and checksums that identify the contents of each training store."""
        parts = self.planner.stores.split_by_part("train", self.stores["train"])
        return {part: store.contents for part, store in parts}

    @property
    def rank_invariants(self) -> dict[str, object]:
        """Everything that decides the rows of a step, and so must be equal on all ranks."""
        options = self.options
        names = "seed", "batch_size", "shuffle", "drop_last"
        values: dict[str, object] = {
            **{name: getattr(options, name) for name in names},
            "eval_batch_size": str(options.eval_batch_size),
            "weight": options.weight if isinstance(options.weight, str | None) else "a function",
            "skip_steps": str(steps_to_skip(options.skip_steps)),
            "data devices per process": len(self.placement.topology.data_devices),
            "splits": ", ".join(self.stores),
        }
        if self.order is not None:
            values |= self.order.identity
        for split, store in self.stores.items():
            for part, stored in self.planner.stores.split_by_part(split, store):
                manifest = stored.manifest
                if self.options.build != "first":
                    # Only ranks on which the store is complete know its checksums.
                    probes = msgspec.json.encode(manifest.probes)
                    manifest = msgspec.structs.replace(manifest, checksums={"probe rows": probes})
                values[f"the {part} store"] = manifest.content
            values[f"rows of the {split} store"] = self.placement.splits[split].pool.identity
        return values

    def renewed(self) -> "SetUp":
        """Return a new set-up if stores were completed since, and else this one.

        The budgets of the first placement apply, because the model, its optimizer and cached
        activations have taken memory since.
        """
        opened = {
            split: store.completed() if store.is_complete else store
            for split, store in self.stores.items()
        }
        if opened == self.stores:
            return self
        self.free_rows()
        placement = self.planner.place(opened, self.placement.budget_bytes)
        return SetUp.load(self.planner, opened, placement)

    @property
    def is_released(self) -> bool:
        """Whether the rows were freed."""
        return any(rows.is_released for rows in self.rows.values())

    def free_rows(self) -> None:
        """Free the rows, and what their orders have computed."""
        for rows in self.rows.values():
            rows.release()
        for order in (self.order, *self._orders):
            if order is not None:
                order.clear()


def _warn_of_restriping(split: str, num_shards: int, num_devices: int, order: Sampler) -> None:
    """Warn that the data devices do not divide the shards of a store, so that the order differs."""
    counts = [*map(str, divisors(num_shards))]
    usable = f"{', '.join(counts[:-1])} or {counts[-1]}" if counts[1:] else counts[0]
    rank_zero_warn(
        f"the {split} rows are in {num_shards} shards, which {num_devices} data devices do not"
        f" divide: they are striped again over {order.num_shards}, in another order. {usable} data"
        " devices would keep the order"
    )


def print_placement(placement: Placement) -> None:
    """Print where the shards live, unless the last table shows the same, as for another fold."""
    placed = {
        split: (
            shards.order.shuffle_block if shards.is_streamed else None,
            *shards.group_by_device(placement.topology, split),
        )
        for split, shards in placement.splits.items()
    }
    if placed.items() - _printed.items():
        rank_zero_only(Console().print)(placement_table(placement))
        for split, shards in placement.splits.items():
            if isinstance(shards.order, PackedSampler) and shards.order.wastes_packs:
                rank_zero_info(
                    f"{split}: {shards.order.padding_fraction:.1%} of the packs is padding, with"
                    f" {shards.order.shuffle_block} packs of each shard in a block: a larger"
                    " shuffle_block leaves less"
                )
    _printed.update(placed)


def warn_of_slow_reads(placement: Placement, residency: str) -> bool:
    """Warn if shards in the file mapping exceed the free memory; return whether they do."""
    free = measure_free_bytes(torch.device("cpu"))
    mapped = sum(
        held.num_bytes for held in placement.held_shards() if held.residency is Residency.MMAP
    )
    if mapped <= free:
        return False
    rank_zero_warn(
        f"residency={residency!r}: {format_bytes(mapped)} of shards are read through the file"
        f" mapping, and {format_bytes(free)} of memory are free: single rows will be read from"
        " disk, which is slow. residency='stream' reads long runs of rows and shuffles them"
        " within a block (shuffle_block)",
        stacklevel=2,
    )
    return True


def name_stored_validation(store: Store) -> None:
    """Report, once per process, that validation uses a store that an earlier run has left."""
    if store.location not in _named:
        _named.add(store.location)
        rank_zero_info(
            f"val_dataset=None: validating on the {store.num_rows:,} rows stored at"
            f" {store.location}"
        )
