"""The super-batch loader: one super-batch per step from the shards of all data devices."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch

from lightning_memmap._compat.loops import BatchIndices
from lightning_memmap._compat.progress import FitPosition, TrainerProgress
from lightning_memmap.errors import check_integer
from lightning_memmap.loading.fetch import Fetcher
from lightning_memmap.loading.prefetch import default_prefetch, prefetched
from lightning_memmap.loading.row_source import Fetched, Steps, released_error
from lightning_memmap.loading.split import SplitRows
from lightning_memmap.loading.state import LoaderState
from lightning_memmap.loading.step_weight import DeliveredStep, DeliveredSteps, StepWeight
from lightning_memmap.loading.super_batch import Collate, Collator, SuperBatch
from lightning_memmap.loading.transform import BatchTransform
from lightning_memmap.placement.topology import DataTopology
from lightning_memmap.sampling.identity import difference_of
from lightning_memmap.sampling.sampler import Sampler, derive_seed
from lightning_memmap.sampling.schedule import BatchSchedule, SkippedSteps

#: Positions and steps that are located at once.
_BLOCK_POSITIONS, _BLOCK_STEPS = 2**18, 1024


class SuperBatchLoader:
    """The super-batches of one epoch, or their batches, assembled on one device."""

    #: What Lightning's ``BatchSizeFinder`` measures: `batch_sizes`. Absent under
    #: ``overfit_batches``, where Lightning would sample from it.
    dataset: range

    def __init__(
        self,
        rows: SplitRows,
        topology: DataTopology,
        sampler: Sampler,
        batch_size: int,
        *,
        collate: Collate,
        transform: BatchTransform | None = None,
        drop_last: bool = False,
        seed: int = 0,
        progress: TrainerProgress | None = None,
        skip_steps: tuple[tuple[int, int], ...] = (),
        skipped: SkippedSteps | None = None,
        prefetch: int | None = None,
        renew_rows: Callable[[], SplitRows | None] | None = None,
    ) -> None:
        #: The data devices of this process, and which of all processes it is.
        self._topology = topology
        #: The order of the rows.
        self.order = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.seed = seed
        self._collator = Collator(collate, transform)
        self._progress = progress
        #: Where batches are assembled, usually the root device; None for super-batches.
        self.device: torch.device | None = None
        #: Steps that are prefetched while the consumer has one, once batches have a place.
        self.prefetch = 0
        self._prefetch_option = prefetch
        #: What the strategy asks how to weight the loss of a step; copies of the loader share it.
        self.delivered = DeliveredSteps()
        self._epoch = 0
        self._began = self._state_at_start()
        #: Steps of the epoch that were delivered, and what a Trainer had counted at the last one.
        self._delivered: tuple[int, Any] = 0, None
        #: Where the epoch before began, and its steps: a module that accumulates gradients itself
        #: may do so across epochs.
        self._before: tuple[LoaderState, int] | None = None
        self._resume: LoaderState | None = None
        #: Returns the rows of the next epoch, for stores that are still being built.
        self._renew_rows = renew_rows
        self._skip_steps, self._were_skipped = skip_steps, skipped or SkippedSteps()
        self._serve(rows)

    def _serve(self, rows: SplitRows) -> None:
        self._rows = rows
        self._fetcher = Fetcher(rows, self._topology, self.order, self._assembled_on)
        if not self.num_steps:
            raise ValueError(
                f"batch_size={self.batch_size}, drop_last=True: the {self.order.num_positions} rows"
                f" do not fill one step of {self.global_batch}; use a smaller batch_size or"
                " drop_last=False"
            )
        self._skip()
        # Each data device must have a row.
        self._start()

    def _skip(self) -> None:
        #: The steps that the run leaves out.
        self.skipped = self._were_skipped.adding(self._skip_steps, self._whole_epoch)

    @property
    def _assembled_on(self) -> torch.device | None:
        """Where all rows of a step come together, before any transform."""
        return None if self._collator.is_apart else self.device

    @property
    def global_batch(self) -> int:
        """Rows of a step over all processes, ``G``."""
        return self.batch_size * self._topology.num_data_devices

    @property
    def batch_sampler(self) -> Any:
        """Where Lightning looks for ``sampler.set_epoch`` and for the rows of each step."""
        if not self.order.is_sequential:
            return SimpleNamespace(sampler=self)
        return BatchIndices(self, RowsByStep(self))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration has."""
        check_integer("epoch", epoch, 0, "epochs are counted from 0")
        self._epoch = epoch
        if self._resume is None and epoch != self._began.epoch:
            self._before = (self._began, self._delivered[0]) if self._delivered[1] else None
            self._began, self._delivered = self._state_at_start(), (0, None)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, the same on every rank."""
        return self.stands_at()[0].as_dict()

    def stands_at(self) -> tuple[LoaderState, FitPosition | None]:
        """Where the loader stands, and its Trainer; None before the first step of an epoch."""
        began = self._began
        steps, last = self._delivered
        progress = self._progress
        if last is None or progress is None:
            return self._state_after(began, steps), None
        num_delivered = progress.num_delivered(last)
        if num_delivered is None:
            return self._state_after(began, steps), None
        untrained = progress.num_untrained(last)
        here = steps - began.steps
        if untrained > here and self._before is not None:
            # The group has begun in the epoch before, if an optimizer has stepped in that epoch.
            before, num_before = self._before
            rest = untrained - here
            if rest < num_before - before.steps:
                state = self._state_after(before, num_before - rest)
                return state, progress.position(last, num_before - rest, untrained)
        if progress.is_manual and untrained >= here:
            # No optimizer has stepped in this epoch since the fit began. A whole epoch without a
            # step isn't a group.
            is_whole = began.steps == 0 and progress.is_last(num_delivered)
            untrained = 0 if is_whole else here
        state = self._state_after(began, steps - untrained)
        return state, progress.position(last, max(0, num_delivered - untrained), untrained)

    def _state_after(self, began: LoaderState, steps: int) -> LoaderState:
        began = msgspec.structs.replace(began, skipped=self.skipped)
        if steps <= began.steps:
            return began
        schedule = self._schedule(began.position, began.epoch)
        _, position = schedule.bounds(steps - began.steps - 1)
        return msgspec.structs.replace(began, position=position, steps=steps)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a saved loader stood, if the next iteration is of the same epoch."""
        self._began = self._resume = LoaderState.read(state)
        self._before = None
        # What was left out of other rows says nothing of these.
        is_same = self._began.num_positions == self.order.num_positions
        self._were_skipped = self._began.skipped if is_same else SkippedSteps()
        self._skip()
        self._delivered = self._began.steps, None

    @property
    def batch_sizes(self) -> range:
        """A range whose length is the batch size from which on doubling it is of no use."""
        rows, num_devices = self.order.num_positions, self._topology.num_data_devices
        return range(rows // (2 * num_devices) + 1 if self.drop_last else -(-rows // num_devices))

    @property
    def data_devices(self) -> tuple[torch.device, ...]:
        """The devices that serve batches."""
        return self._topology.data_devices

    def assembled(self, device: torch.device | None, prefetch: int = 0) -> "SuperBatchLoader":
        """The same loader with batches that are assembled on a device, or stay apart with None."""
        loader = copy.copy(self)
        loader.device, loader.prefetch = device, prefetch
        loader._fetcher = Fetcher(self._rows, self._topology, self.order, loader._assembled_on)
        return loader

    def placed(self, topology: DataTopology) -> "SuperBatchLoader":
        """The same loader with batches where a topology wants them: assembled, or apart."""
        device = topology.assemble_on
        if device is None and self._collator.is_on_super_batch:
            device = topology.data_devices[0]
        prefetch = self.prefetch_on(topology.data_devices[0] if device is None else device)
        is_placed = (self.device, self.prefetch) == (device, prefetch)
        return self if is_placed else self.assembled(device, prefetch)

    def prefetch_on(self, device: torch.device) -> int:
        """Return the steps to prefetch for a consumer on a device."""
        option = self._prefetch_option
        return default_prefetch(device) if option is None else option

    def of_process(self, rank: int, size: int) -> "SuperBatchLoader":
        """A loader over the same shards that serves the rows of one of several processes."""
        topology = replace(self._topology, rank=rank, size=size)
        count, order = topology.num_data_devices, self.order
        if order.num_shards % count:
            raise ValueError(
                f"{size} processes for a store in {order.num_shards} shards: without a Trainer,"
                " the processes must divide the shards; build the store with another num_shards"
            )
        only = order.pool.global_batch
        if only not in (None, self.batch_size * count):
            raise ValueError(
                f"{size} processes for batches of {only} rows of one training set"
                " (by_batch=True): use a Trainer, whose processes the data module knows, or"
                " by_batch=False"
            )
        loader = copy.copy(self)
        loader._topology = topology
        loader._serve(self._rows)
        return loader

    def __copy__(self) -> "SuperBatchLoader":
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Never: the rows would go with it."""
        raise TypeError(
            "a loader is neither pickled nor deep-copied, as all its resident rows would be: pickle"
            " the data module instead, and there call setup() and make a new loader"
        )

    def __repr__(self) -> str:
        devices = ", ".join(map(str, self.data_devices))
        where = "" if self.device is None else f", device={str(self.device)!r}"
        return (
            f"{type(self).__name__}({self.order.num_positions} rows on {devices},"
            f" batch_size={self.batch_size}, order={type(self.order).__name__}{where})"
        )

    def _state_at_start(self) -> LoaderState:
        order = self.order
        return LoaderState(
            sampler=order.identity,
            num_positions=order.num_positions,
            seed=self.seed,
            epoch=self._epoch,
        )

    def _start(self) -> LoaderState:
        """Where the epoch begins: at its first row, or where a saved loader stood."""
        saved, start = self._resume, self._state_at_start()
        if saved is not None and saved.epoch == self._epoch:
            self._check_order(saved, start)
            start = saved
        stretches = self._schedule(start.position, start.epoch).stretches
        left = min((steps.position(len(steps)) - steps.start for steps in stretches), default=0)
        num_devices = self._topology.num_data_devices
        if 0 < left < num_devices:
            raise ValueError(
                f"{left} rows are left of the epoch for {num_devices} data devices, so that some"
                f" would have none: use at most {left} data devices, a sampler of more rows, or"
                " another checkpoint"
            )
        return start

    def _check_order(self, saved: LoaderState, now: LoaderState) -> None:
        differing = difference_of({"seed": saved.seed}, {"seed": now.seed})
        differing = differing or difference_of(saved.sampler, now.sampler)
        if differing is not None:
            name, was, found, remedy = differing
            raise ValueError(
                f"the checkpoint stands inside an epoch with {name}={was}, and this loader has"
                f" {name}={found}, which is another row order: resume with {remedy}; or from a"
                " checkpoint of the end of an epoch"
            )

    def __len__(self) -> int:
        """Steps of the epoch, those before a resume included."""
        start = self._start()
        return start.steps + len(self._schedule(start.position, start.epoch))

    @property
    def num_steps(self) -> int:
        """Steps of an epoch that is not resumed and leaves none out."""
        return len(self._whole_epoch)

    def num_steps_of(self, epoch: int, position: int = 0) -> int:
        """Steps of an epoch, or those that are left of it from a position on."""
        return len(self._schedule(position, epoch))

    def __iter__(self) -> Iterator[Any]:
        # Nothing happens before the first step is asked for: Lightning calls iter() before it
        # sets the epoch and loads the state.
        if self.prefetch:
            return prefetched(
                self._steps(), self.device, self.data_devices, self.prefetch, self._deliver
            )
        return self._delivered_steps()

    def _delivered_steps(self) -> Iterator[Any]:
        for super_batch in self._steps():
            item = super_batch if self.device is None else super_batch.to(self.device)
            self._deliver(super_batch)
            # Not referenced while the next one is made: its memory may be free by then.
            del super_batch
            yield item
            del item

    def step_positions(self, step: int) -> range:
        """The positions of a step of an epoch that is not resumed which this process serves."""
        return self.positions(*self._whole_epoch.bounds(step))

    def positions(self, first: int, last: int) -> range:
        """The positions in a range that this process serves."""
        rank, size = self._topology.rank, self._topology.size
        return range(first + (rank - first) % size, last, size)

    @property
    def _whole_epoch(self) -> BatchSchedule:
        order = self.order
        return BatchSchedule(
            order.num_positions, self.global_batch, order.num_shards, self.drop_last
        )

    def _schedule(self, start: int, epoch: int) -> BatchSchedule:
        skipped = self.skipped.of_epoch(epoch, self.order.num_positions)
        return replace(self._whole_epoch, start=start, skipped=skipped)

    def _deliver(self, super_batch: SuperBatch) -> None:
        """Count a step as delivered."""
        self.delivered.add(DeliveredStep(super_batch.num_rows, super_batch.weight))
        counts = None if self._progress is None else self._progress.delivery()
        # In one assignment: a signal may come at any time.
        self._delivered = self._delivered[0] + 1, counts

    def _steps(self) -> Iterator[SuperBatch]:
        """The steps of the epoch. Each counts as delivered once `_deliver` is called."""
        rows = None if self._renew_rows is None else self._renew_rows()
        if rows is not None and rows is not self._rows:
            self._serve(rows)
        if self._rows.is_released:
            raise released_error()
        self._began = start = self._start()
        self._delivered, self._resume = (start.steps, None), None
        self.delivered.begin_epoch()
        with closing(ExitStack()) as stack:
            # Closed without the error that ends this generator: in Python 3.10, a context manager
            # keeps the error, and so this frame and the rows, until garbage is collected.
            takes = [
                stack.enter_context(source.epoch(self.order, start.epoch, start.position))
                for source in self._rows.sources
            ]
            fetched: Iterator[Fetched] = chain.from_iterable(
                self._fetcher.fetch(takes, steps) for steps in self._blocks(start)
            )
            if self._rows.images is not None:
                decoded = self._rows.images.decoded(fetched, self.order)
                fetched = stack.enter_context(closing(decoded))
            for found in fetched:
                yield from self._super_batches(found)
                del found

    def _super_batches(self, fetched: Fetched) -> Iterator[SuperBatch]:
        """The super-batches of some steps."""
        collator, steps, first = self._collator, fetched.steps, fetched.first
        topology, devices = self._topology, fetched.devices
        # The last reference to a step's rows goes with its super-batch.
        parts = fetched.by_step()
        pairs = zip(steps.lengths, steps.step_rows, strict=True)
        for number, (length, step_rows) in enumerate(pairs, steps.first_step):
            leaves, batches = [*parts.pop()], []
            for index, device in enumerate(devices):
                batch = collator.collate(leaves.pop(0))
                if collator.is_apart:
                    consumer = topology.rank + topology.size * index
                    seed = derive_seed(self.seed, steps.epoch, number, consumer)
                    batch = collator.transformed(batch, device, seed, index)
                batches.append(batch)
                del batch
            weight = StepWeight(length, step_rows)
            super_batch = SuperBatch(devices, length, weight, first, collator, batches)
            del leaves, batches
            if collator.is_on_super_batch:
                super_batch.seed = derive_seed(self.seed, steps.epoch, number, topology.rank)
            first = (first + length) % len(devices)
            yield super_batch
            del super_batch

    def _blocks(self, start: LoaderState) -> Iterator[Steps]:
        """The steps of an epoch, divided into blocks that are located together."""
        number = start.steps
        per_block = min(max(1, _BLOCK_POSITIONS // self.global_batch), _BLOCK_STEPS)
        for stretch in self._schedule(start.position, start.epoch).stretches:
            for step in range(0, max(1, stretch.num_full), per_block):
                last = min(step + per_block, stretch.num_full)
                sizes = [self.global_batch] * (last - step)
                if last == stretch.num_full:
                    sizes += stretch.tail
                first = stretch.position(step)
                edges = first + np.append(0, np.cumsum(sizes))
                # How many positions this process serves before each step.
                served = -(-(edges - self._topology.rank) // self._topology.size)
                positions = self.positions(first, first + sum(sizes))
                yield Steps(start.epoch, number, positions, np.diff(served).tolist(), sizes)
                number += len(sizes)


class RowsByStep(Sequence[list[int]]):
    """The dataset rows of each step of this process, for a loader in dataset order."""

    def __init__(self, loader: SuperBatchLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return self._loader.num_steps

    def __getitem__(self, step: Any) -> Any:
        if isinstance(step, slice):
            return [self[index] for index in range(*step.indices(len(self)))]
        return self._loader.order.dataset_rows(0, self._loader.step_positions(step)).tolist()
