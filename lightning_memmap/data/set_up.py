"""The set-up of a data module: its open stores, where their shards live, and the order of rows."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from lightning_memmap.data.options import DataOptions
from lightning_memmap.data.split_stores import SplitStores
from lightning_memmap.data.splits import argument_of
from lightning_memmap.loading import SplitRows, load_split
from lightning_memmap.loading.split import largest_window_bytes
from lightning_memmap.placement import (
    DataTopology,
    Placement,
    Residency,
    SplitSize,
    device_budgets,
    plan_placement,
)
from lightning_memmap.sampling import (
    Pool,
    Sampler,
    SamplerFactory,
    SequentialSampler,
    ShuffledSampler,
)
from lightning_memmap.sampling.factory import made_sampler
from lightning_memmap.sampling.schedule import steps_to_skip
from lightning_memmap.store import Store
from lightning_memmap.store.growing import GrowingStore
from lightning_memmap.store.series import fields_of, windowed


@dataclass(frozen=True)
class SetUp:
    """What the set-up of a data module has made.

    Args:
        options: The options of the data module at its set-up.
        stores: The open stores by split.
        placement: Where the shards live.
        rows: The rows of each split.
        order: The order of the training rows; None where they are not set up.
    """

    options: DataOptions
    stores: Mapping[str, Store]
    placement: Placement
    rows: Mapping[str, SplitRows]
    order: Sampler | None

    @property
    def must_match(self) -> dict[str, object]:
        """What decides which rows a step has, and so must be the same on all ranks."""
        values: dict[str, object] = {
            "seed": self.options.seed,
            "batch_size": self.options.batch_size,
            "shuffle": self.options.shuffle,
            "drop_last": self.options.drop_last,
            "skip_steps": str(steps_to_skip(self.options.skip_steps)),
            "data devices per process": len(self.placement.topology.data_devices),
            "splits": ", ".join(self.stores),
        }
        if self.order is not None:
            values |= self.order.identity
        for split, store in self.stores.items():
            manifest = store.manifest
            if self.options.build != "first":
                # On some ranks it may be whole already, and its checksums are known there alone.
                manifest = replace(manifest, checksums={})
            values[f"the {split} store"] = manifest.content
            values[f"rows of the {split} store"] = self.placement.splits[split].pool.identity
        return values

    @property
    def is_released(self) -> bool:
        """Whether the rows were freed."""
        return any(rows.is_released for rows in self.rows.values())

    def release(self) -> None:
        """Free the rows, and what their order has computed."""
        for rows in self.rows.values():
            rows.release()
        if self.order is not None:
            self.order.clear()


@dataclass(frozen=True)
class Planner:
    """Plans a set-up, and carries it out.

    Args:
        stores: The stores of the data module.
        topology: The data devices and this process's rank.
        is_overfitting: Whether training rows come in dataset order, under ``overfit_batches``.
    """

    stores: SplitStores
    topology: DataTopology
    is_overfitting: bool

    def open(self, splits: Iterable[str]) -> dict[str, Store]:
        """Open the stores of splits, of which some may have none.

        Args:
            splits: Names of the splits.

        Raises:
            StoreError: As of `SplitStores.open`.
            ValueError: An option is given for a split that has no rows, or no store of its own.
        """
        opened = {}
        for split in splits:
            if (store := self.stores.open(split)) is not None:
                opened[split] = store
            stored = self.stores.stored_split(split)
            for argument, given_for in self.stores.options.by_split():
                if given_for == split and store is None:
                    raise ValueError(
                        f"{argument} for {split!r}: there are no such rows: give"
                        f" {argument_of(split)}, or leave {split!r} out of {argument}"
                    )
                if given_for == split != stored and argument == "fingerprint":
                    raise ValueError(
                        f"fingerprint for {split!r}: its rows are held out of the store of"
                        f" {stored!r}: give the fingerprint for {stored!r}"
                    )
        return opened

    def place(self, opened: Mapping[str, Store]) -> Placement:
        """Plan where the shards live.

        Args:
            opened: The open stores by split.

        Raises:
            PlacementError: The shards do not fit, or there are fewer rows than data devices.
            ValueError: Training cannot do with the fields that the strategy names.
        """
        if "train" in opened:
            self.check_train_fields(opened["train"])
        options, topology = self.stores.options, self.topology
        sizes = {split: self.size(split, store) for split, store in opened.items()}
        budgets = device_budgets(
            topology.data_devices, options.memory_fraction, topology.num_local_processes
        )
        placement = plan_placement(sizes, topology, options.residency, budget_bytes=budgets)
        # Rows of a store that is being built are read from its files.
        growing = {
            split: replace(
                placed, residency=tuple(each and Residency.MMAP for each in placed.residency)
            )
            for split, placed in placement.splits.items()
            if isinstance(opened[split], GrowingStore)
        }
        return replace(placement, splits={**placement.splits, **growing})

    def load(self, opened: Mapping[str, Store], placement: Placement) -> SetUp:
        """Make the shards resident.

        Args:
            opened: The open stores by split.
            placement: Where the shards are to live.

        Raises:
            StoreError: A store cannot have its residency; see `load_split`.
            ValueError: The training rows cannot be fetched in their order.
        """
        options, splits = self.stores.options, placement.splits
        forms = options.fields.forms
        rows = {
            split: load_split(store, self.topology, splits[split], forms)
            for split, store in opened.items()
        }
        if options.with_row_numbers:
            rows = {split: replace(found, are_numbered=True) for split, found in rows.items()}
        order = None
        if "train" in opened:
            size = splits["train"].size
            # The plan has made it, except where training rows come in dataset order.
            order = self.order(opened["train"], size) if self.is_overfitting else size.order
            if not self.is_overfitting:
                rows["train"].check_order(order)
        return SetUp(options, opened, placement, rows, order)

    def size(self, split: str, store: Store) -> SplitSize:
        """Divide a split into shards, and find its size.

        Args:
            split: Its name.
            store: The store that has its rows.

        Raises:
            PlacementError: There are fewer rows than data devices.
            ValueError: The member, which folds and parts need, is not known or out of range.
        """
        options = self.stores.options
        has_order = split == "train" and not self.is_overfitting
        is_streamed = options.residency == Residency.STREAM.value
        return SplitSize.of(
            split,
            store.manifest,
            self.topology,
            windowed(store, self.stores.rows(split, store), options.fields.forms),
            options.shuffle_window,
            partial(self._make_order, store) if has_order else None,
            partial(largest_window_bytes, store) if is_streamed else None,
            options.num_shards,
        )

    def order(self, store: Store, size: SplitSize) -> Sampler:
        """The order of the training rows.

        Args:
            store: The store that has them.
            size: Their shards, and the window.

        Raises:
            ValueError: The sampler needs other rows than those of ``size``.
        """
        options = self.stores.options
        pool = Pool.of(size.pool.rows, size.pool.num_shards)
        order = self._make_order(store, pool, options.shuffle_window or size.window)
        if order.pool != size.pool and not self.is_overfitting:
            raise ValueError(
                f"sampler={options.sampler!r}: it needs other rows than those that are set up: call"
                " setup() after you set it"
            )
        return order

    def _make_order(self, store: Store, pool: Pool, window: int) -> Sampler:
        options = self.stores.options
        is_whole = options.shuffle_window is None and options.residency != Residency.STREAM.value
        block = None if is_whole else window
        if (maker := options.sampler) is not None:
            if isinstance(maker, SamplerFactory):
                maker = maker.for_batches(options.batch_size * self.topology.num_data_devices)
            fields = fields_of(store, pool.rows)
            return made_sampler(maker, pool, options.seed, fields, block)
        if not options.shuffle:
            return SequentialSampler(pool)
        return ShuffledSampler(pool, options.seed, block)

    def check_train_fields(self, store: Store) -> None:
        """Check that training can do with the fields that the strategy names.

        Args:
            store: The store of the training rows.

        Raises:
            ValueError: The store lacks one of them, or there is a transform, which may read others.
        """
        if (needed := self.topology.train_fields) is None:
            return
        names = [field.name for field in store.schema.fields]
        if unknown := sorted(needed - set(names)):
            raise ValueError(
                f"the strategy asks for the fields {unknown}, and the train store has {names}: name"
                " fields of the store (memmap_pipeline takes them from input_fields and loss_fields"
                " of the module)"
            )
        others = [field for field in store.schema.fields if field.name not in needed]
        if variable := [field.name for field in others if field.num_variable]:
            raise ValueError(
                f"the rows of field {variable[0]!r} differ in length, and this process would not"
                " hold it, since the module has input_fields and loss_fields: leave both out"
            )
        if self.stores.options.transform is not None:
            raise ValueError(
                "transform: it may read any field, and this process holds only some of them, since"
                " the module has input_fields and loss_fields: leave both out, or do in"
                " training_step, in the first stage or in loss() what the transform does"
            )
