"""The set-up of a data module: its open stores and the resident rows of each split."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from lightning_memmap.data.options import DataOptions
from lightning_memmap.data.planner import Planner
from lightning_memmap.loading.split import SplitRows, load_split
from lightning_memmap.placement.plan import Placement
from lightning_memmap.sampling.sampler import Sampler
from lightning_memmap.sampling.schedule import steps_to_skip
from lightning_memmap.schema.forms import use_center_crops
from lightning_memmap.store import Store


@dataclass(eq=False)
class SetUp:
    """Open stores, and the resident rows of each split, until they are released."""

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
            rows[split] = replace(loaded, are_numbered=options.with_row_numbers)
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
        if options.order == old.order:
            return order
        # The rows stay in the shards of the set-up.
        changed = replace(old, num_shards=order.num_shards, **options.order)
        planner = replace(self.planner, stores=replace(self.planner.stores, options=changed))
        new_order = planner.shards("train", self.stores["train"]).order
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
    def must_match(self) -> dict[str, object]:
        """Everything that decides the rows of a step, and so must be equal on all ranks."""
        weight = self.options.weight
        values: dict[str, object] = {
            "seed": self.options.seed,
            "batch_size": self.options.batch_size,
            "eval_batch_size": str(self.options.eval_batch_size),
            "shuffle": self.options.shuffle,
            "drop_last": self.options.drop_last,
            "weight": weight if isinstance(weight, str | None) else "a function",
            "skip_steps": str(steps_to_skip(self.options.skip_steps)),
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

        The budgets of the first placement still apply. By now the model, its optimizer and cached
        activations are in memory, and would count as taken.
        """
        opened = {
            split: store.completed() if store.is_complete else store
            for split, store in self.stores.items()
        }
        if opened == self.stores:
            return self
        self.release()
        placement = self.planner.place(opened, self.placement.budget_bytes)
        return SetUp.load(self.planner, opened, placement)

    @property
    def is_released(self) -> bool:
        """Whether the rows were freed."""
        return any(rows.is_released for rows in self.rows.values())

    def release(self) -> None:
        """Free the rows, and what their orders have computed."""
        for rows in self.rows.values():
            rows.release()
        for order in (self.order, *self._orders):
            if order is not None:
                order.clear()
