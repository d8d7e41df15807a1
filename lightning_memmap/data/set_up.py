"""The set-up of a data module: its open stores, where their shards live, and the order of rows."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec
import numpy as np
import torch
import xxhash
from lightning.pytorch.utilities import rank_zero_warn

from lightning_memmap.data.options import DataOptions
from lightning_memmap.data.split_stores import SplitStores
from lightning_memmap.errors import MemmapError
from lightning_memmap.loading.split import SplitRows, largest_block_bytes, load_split
from lightning_memmap.placement.plan import Placement, SplitShards, divide, plan_placement
from lightning_memmap.placement.topology import DataTopology, device_budgets
from lightning_memmap.sampling.factory import make_sampler
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.rows import Integers, WindowedRows, divisors
from lightning_memmap.sampling.sampler import Sampler, SequentialSampler, ShuffledSampler
from lightning_memmap.sampling.schedule import Blocks, default_block, steps_to_skip
from lightning_memmap.store import Store
from lightning_memmap.store.series import fields_of, windowed

#: Steps whose rows are read before there is a loader.
FIRST_STEPS = 16


@dataclass(frozen=True)
class Planner:
    """Plans a set-up, and carries it out."""

    stores: SplitStores
    topology: DataTopology
    #: Whether training rows come in dataset order, under ``overfit_batches``.
    is_overfitting: bool = False

    def place(self, opened: Mapping[str, Store]) -> Placement:
        """Plan where the shards live."""
        options, topology = self.stores.options, self.topology
        splits = {split: self.shards(split, store) for split, store in opened.items()}
        return plan_placement(splits, topology, options.residency, budget_bytes=self.budgets)

    @cached_property
    def budgets(self) -> Mapping[torch.device, int]:
        """Bytes that shards may take on each device, measured once: after the first epoch of a
        store that was built meanwhile, a model and its optimizer would count as taken."""
        topology = self.topology
        return device_budgets(
            topology.data_devices,
            self.stores.options.memory_fraction,
            topology.num_local_processes,
            topology.processes_per_device,
        )

    def first_rows(self, found: Mapping[str, Store]) -> dict[str, Integers]:
        """The rows of the first training steps, by store, each with its place among them. Of the
        stores no row need be there."""
        # A field cannot be looked up yet, and what is wrong with an order is said at the set-up.
        with suppress(ValueError, MemmapError):
            if (store := self.stores.joined("train", found)) is not None:
                order = self.shards("train", store).order
                num_rows = min(FIRST_STEPS * self.step_rows, order.num_positions)
                rows = order.dataset_rows(0, range(num_rows))
                parts = zip(self.stores.parts("train"), store.each(rows), strict=True)
                return {name: np.stack(each[1:]) for name, each in parts}
        return {}

    @property
    def step_rows(self) -> int:
        """Rows of a training step on all data devices."""
        return self.stores.options.batch_size * self.topology.num_data_devices

    def load(self, opened: Mapping[str, Store], placement: Placement) -> "SetUp":
        """Make the shards resident."""
        options, rows = self.stores.options, dict[str, SplitRows]()
        for split, store in opened.items():
            placed = placement.splits[split]
            found = load_split(store, self.topology, placed, options.forms)
            rows[split] = replace(found, are_numbered=options.with_row_numbers)
        return SetUp(self, opened, placement, rows)

    def shards(self, split: str, store: Store) -> SplitShards:
        """Divide a split into shards, choose its order, and measure the shards."""
        options, topology = self.stores.options, self.topology
        rows = windowed(store, self.stores.rows(split, store), options.forms)
        given = options.num_shards or store.manifest.shards_of(rows.num_rows)
        order = self._order(split, store, divide(split, rows, given, topology))
        if order.num_shards != given and not order.is_sequential:
            *others, last = map(str, divisors(given))
            counts = f"{', '.join(others)} or {last}" if others else last
            rank_zero_warn(
                f"the {split} rows are in {given} shards, which {topology.num_data_devices} data"
                f" devices do not divide: they are re-striped over {order.num_shards}, in another"
                f" order: {counts} data devices keep it"
            )
        block_bytes = 0
        if options.is_streamed:
            held = topology.held(order.num_shards)
            block_bytes = largest_block_bytes(store, Blocks(order), held)
        return SplitShards.of(order, store.manifest, topology, block_bytes)

    def _order(self, split: str, store: Store, pool: Pool) -> Sampler:
        """The order of the rows of a split."""
        options, rows = self.stores.options, pool.rows
        block = options.shuffle_block
        if block is None and options.is_streamed:
            stored = rows.series if isinstance(rows, WindowedRows) else rows
            row_bytes = store.manifest.row_bytes * stored.num_rows / rows.num_rows
            block = default_block(pool.num_shards, row_bytes)
        if split != "train" or self.is_overfitting or not options.shuffle:
            return SequentialSampler(pool, shuffle_block=block)
        if (maker := options.sampler) is None:
            return ShuffledSampler(pool, options.seed, block)
        if options.is_by_batch:
            pool = replace(pool, global_batch=self.step_rows)
        return make_sampler(maker, pool, options.seed, fields_of(store, rows), block)


@dataclass(frozen=True)
class SetUp:
    """What the set-up of a data module has made: open stores, and the rows of each split."""

    planner: Planner
    stores: Mapping[str, Store]
    placement: Placement
    rows: Mapping[str, SplitRows]
    #: Orders that were set after the set-up.
    orders: list[Sampler] = field(default_factory=list)

    @property
    def options(self) -> DataOptions:
        """The options of the data module at its set-up."""
        return self.planner.stores.options

    @property
    def order(self) -> Sampler | None:
        """The order of the training rows; None where they are not set up."""
        return self.placement.splits["train"].order if "train" in self.stores else None

    def order_with(self, options: DataOptions) -> Sampler:
        """The order of the training rows that are set up, as it is set now."""
        was, made = self.options, self.placement.splits["train"].order
        block = options.shuffle_block
        if was.is_streamed and block != was.shuffle_block:
            raise ValueError(
                f"shuffle_block={block}: under residency='stream' the rows are set up with"
                f" shuffle_block={was.shuffle_block}: call setup() after you set it"
            )
        if options.order == was.order:
            return made
        # Where the rows live is as it was set up.
        changed = replace(was, num_shards=made.num_shards, **options.order)
        planner = replace(self.planner, stores=replace(self.planner.stores, options=changed))
        order = planner.shards("train", self.stores["train"]).order
        if order.pool != made.pool:
            raise ValueError(
                f"sampler={options.sampler!r}: it needs other rows than those that are set up: call"
                " setup() after you set it"
            )
        self.orders.append(order)
        return order

    @property
    def train_stores(self) -> dict[str, dict[str, str]]:
        """The contents of the training stores, by part, as far as they are known."""
        found = dict[str, dict[str, str]]()
        for part, store in self.planner.stores.by_part("train", self.stores["train"]):
            manifest = store.manifest
            probes = xxhash.xxh3_64_hexdigest(msgspec.json.encode(manifest.probes))
            found[part] = {"rows": str(manifest.num_rows), "probe rows": probes}
            if store.supply is None:
                # Of another number of shards, the same rows have other checksums.
                found[part][f"in {manifest.num_shards} shards"] = manifest.content
        return found

    @property
    def must_match(self) -> dict[str, object]:
        """What decides which rows a step has, and so must be the same on all ranks."""
        values: dict[str, object] = {
            "seed": self.options.seed,
            "batch_size": self.options.batch_size,
            "eval_batch_size": str(self.options.eval_batch_size),
            "shuffle": self.options.shuffle,
            "drop_last": self.options.drop_last,
            "skip_steps": str(steps_to_skip(self.options.skip_steps)),
            "data devices per process": len(self.placement.topology.data_devices),
            "splits": ", ".join(self.stores),
        }
        if self.order is not None:
            values |= self.order.identity
        for split, store in self.stores.items():
            for part, each in self.planner.stores.by_part(split, store):
                manifest = each.manifest
                if self.options.build != "first":
                    # On some ranks it may be whole, and its checksums are known there alone.
                    probes = msgspec.json.encode(manifest.probes)
                    manifest = msgspec.structs.replace(manifest, checksums={"probe rows": probes})
                values[f"the {part} store"] = manifest.content
            values[f"rows of the {split} store"] = self.placement.splits[split].pool.identity
        return values

    def renewed(self) -> "SetUp":
        """The same set-up, once stores whose rows were to come are whole."""
        opened = {split: store.finished() or store for split, store in self.stores.items()}
        if opened == self.stores:
            return self
        self.release()
        return self.planner.load(opened, self.planner.place(opened))

    @property
    def is_released(self) -> bool:
        """Whether the rows were freed."""
        return any(rows.is_released for rows in self.rows.values())

    def release(self) -> None:
        """Free the rows, and what their orders have computed."""
        for rows in self.rows.values():
            rows.release()
        for order in (self.order, *self.orders):
            if order is not None:
                order.clear()
