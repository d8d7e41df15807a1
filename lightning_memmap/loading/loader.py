"""The super-batch loader: one super-batch per step, from the shards of all data devices."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_memmap._compat.loops import BatchIndices
from lightning_memmap._compat.progress import FitPosition, TrainerProgress
from lightning_memmap.errors import check_integer
from lightning_memmap.integers import bounds_of, ceil_div, num_strided, strided
from lightning_memmap.loading.device_streams import has_streams
from lightning_memmap.loading.fetch import Fetcher
from lightning_memmap.loading.prefetch import prefetched
from lightning_memmap.loading.progress import LoaderProgress, LoaderState
from lightning_memmap.loading.row_random import RowRandom
from lightning_memmap.loading.row_source import Fetched, Steps, released_error
from lightning_memmap.loading.split import SplitRows
from lightning_memmap.loading.step_weight import (
    CountItems,
    DeliveredSteps,
    item_weights,
    row_weights,
)
from lightning_memmap.loading.super_batch import (
    Collate,
    Collator,
    CountInBatch,
    StepSeeds,
    SuperBatch,
)
from lightning_memmap.loading.transform import BatchTransform
from lightning_memmap.placement.topology import DataTopology
from lightning_memmap.sampling.identity import difference_of
from lightning_memmap.sampling.sampler import Sampler
from lightning_memmap.sampling.schedule import BatchSchedule, SkippedSteps

#: Limits of the positions and steps that are located at once.
_LOCATED_POSITIONS = 2**18
_LOCATED_STEPS = 1024
#: Steps to prefetch for a device that works asynchronously.
_DEFAULT_PREFETCH = 2


class SuperBatchLoader:
    """Yields the super-batches of one epoch, or their batches assembled on one device.

    Args:
        rows: The rows of the split that this process holds.
        topology: The data devices of this process, and its rank.
        sampler: The order of the rows.
        batch_size: Rows per data device and step.
        collate: Nests one leaf per field like the dataset's samples.
        transform: The batch transform.
        drop_last: Whether to drop an incomplete last step.
        seed: Seed of random transforms.
        trainer_progress: Counts the steps that a Trainer has trained on; None without a Trainer.
        skip_steps: Half-open ranges of steps to skip, counted over all epochs.
        skipped: The steps that the run has skipped so far.
        prefetch: Steps to prefetch; by default 2 for a device with streams.
        count_items: Counts the items of the loss at consecutive positions of an epoch; None if
            every position is one.
        count_in_batch: Counts the items of the loss in each row of a batch, instead.
        renew_rows: Returns the rows for the next epoch, while stores are being built.
    """

    #: The range that Lightning's ``BatchSizeFinder`` measures: `batch_sizes`. Absent under
    #: ``overfit_batches``, because Lightning would sample from it.
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
        trainer_progress: TrainerProgress | None = None,
        skip_steps: tuple[tuple[int, int], ...] = (),
        skipped: SkippedSteps | None = None,
        prefetch: int | None = None,
        count_items: CountItems | None = None,
        count_in_batch: CountInBatch | None = None,
        renew_rows: Callable[[], SplitRows | None] | None = None,
    ) -> None:
        self._topology = topology
        self.order = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.seed = seed
        self._collator = Collator(collate, transform)
        #: The device that batches are assembled on, usually the root device; None for
        #: super-batches.
        self.device: torch.device | None = None
        #: Steps to prefetch, once the device is known.
        self.prefetch = 0
        self._prefetch_option = prefetch
        #: Tells the strategy how to weight the loss of a step. Copies of the loader share it.
        self.delivered = DeliveredSteps()
        self._count_items = count_items
        self._epoch = 0
        self._progress = LoaderProgress(
            self._state_at_start(), trainer_progress, self.delivered, count_in_batch
        )
        self._renew_rows = renew_rows
        self._skip_steps = skip_steps
        self._skipped_before = skipped or SkippedSteps()
        self._serve(rows)

    def _serve(self, rows: SplitRows) -> None:
        """Serve other rows, or the rows of another rank, from the next iteration on."""
        self._rows = rows
        self._fetcher = self._make_fetcher()
        if not self.num_steps:
            raise ValueError(
                f"batch_size={self.batch_size}, drop_last=True: the {self.order.num_positions} rows"
                f" do not fill one step of {self.global_batch}: use a smaller batch_size or"
                " drop_last=False"
            )
        self._update_skipped()
        self._checked_schedule(self._resumed_state())

    def _make_fetcher(self) -> Fetcher:
        fetch_on = self._collator.fetch_on(self.device)
        return Fetcher(self._rows, self._topology, self.order, fetch_on)

    def _update_skipped(self) -> None:
        #: The steps that the run skips.
        self.skipped = self._skipped_before.adding(self._skip_steps, self._whole_epoch)

    @property
    def global_batch(self) -> int:
        """Rows of a step over all processes, ``G``."""
        return self.batch_size * self._topology.num_global_data_devices

    @property
    def batch_sampler(self) -> Any:
        """The object whose ``sampler.set_epoch`` Lightning calls, with the rows of each step."""
        if not self.order.is_sequential:
            return SimpleNamespace(sampler=self)
        return BatchIndices(self, RowsByStep(self))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        check_integer("epoch", epoch, 0, "epochs are counted from 0")
        self._epoch = epoch
        self._progress.enter_epoch(self._state_at_start())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader, which is the same on every rank."""
        return self.trained_state()[0].as_dict()

    def trained_state(self) -> tuple[LoaderState, FitPosition | None]:
        """Return the state after the last step that the weights were trained on.

        Returns:
            The state, and the counters of the Trainer. The counters are None before the first step
            of an epoch and without a Trainer.
        """
        return self._progress.trained_state(self._state_after)

    def _state_after(self, start_state: LoaderState, num_steps: int) -> LoaderState:
        state = msgspec.structs.replace(
            start_state, skipped=self.skipped, global_batch=self.global_batch
        )
        if num_steps <= state.steps:
            return state
        _, position = self._checked_schedule(state).bounds(num_steps - state.steps - 1)
        return msgspec.structs.replace(state, position=position, steps=num_steps)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a saved state, if the next iteration is of the same epoch."""
        loaded = LoaderState.read(state)
        if loaded.global_batch not in (None, self.global_batch):
            rank_zero_info(
                f"the checkpoint was saved with {loaded.global_batch} rows in a step, and this"
                f" loader has {self.global_batch} (batch_size times data devices): other rows form"
                " a step, and each row still comes once per epoch"
            )
        self._progress.load(loaded)
        # Skips recorded for a different number of rows do not apply.
        is_same = loaded.num_positions == self.order.num_positions
        self._skipped_before = loaded.skipped if is_same else SkippedSteps()
        self._update_skipped()

    @property
    def batch_sizes(self) -> range:
        """A range as long as the largest batch size that ``BatchSizeFinder`` needs to try."""
        num_rows = self.order.num_positions
        num_devices = self._topology.num_global_data_devices
        if self.drop_last:
            return range(num_rows // (2 * num_devices) + 1)
        return range(ceil_div(num_rows, num_devices))

    @property
    def contents(self) -> Mapping[str, str]:
        """The identity of the content of the dataset; see `Fields`."""
        return self._rows.contents

    @property
    def data_devices(self) -> tuple[torch.device, ...]:
        """The devices that serve batches."""
        return self._topology.data_devices

    def assembled(self, device: torch.device | None, prefetch: int = 0) -> "SuperBatchLoader":
        """Return a copy that assembles its batches on a device; with None, super-batches."""
        loader = copy.copy(self)
        loader.device = device
        loader.prefetch = prefetch
        loader._fetcher = loader._make_fetcher()
        return loader

    def on_device_of(self, topology: DataTopology) -> "SuperBatchLoader":
        """Return a loader with batches on the device that a topology wants them on."""
        device = self._collator.assemble_on(topology)
        prefetch = self.prefetch_on(topology.data_devices[0] if device is None else device)
        is_placed = (self.device, self.prefetch) == (device, prefetch)
        return self if is_placed else self.assembled(device, prefetch)

    def prefetch_on(self, device: torch.device) -> int:
        """Return the steps to prefetch for a consumer on a device."""
        if self._prefetch_option is not None:
            return self._prefetch_option
        return _DEFAULT_PREFETCH if has_streams(device) else 0

    def of_process(self, rank: int, size: int) -> "SuperBatchLoader":
        """Return a copy that serves the rows of one of several processes."""
        topology = replace(self._topology, rank=rank, data_parallel_size=size)
        num_devices = topology.num_global_data_devices
        order = self.order
        if order.num_shards % num_devices:
            raise ValueError(
                f"{size} processes for a store in {order.num_shards} shards: without a Trainer,"
                " the processes must divide the shards: build the store with another num_shards"
            )
        global_batch = order.pool.global_batch
        if global_batch not in (None, self.batch_size * num_devices):
            raise ValueError(
                f"{size} processes for batches of {global_batch} rows of one training set"
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
        copied._progress = copy.copy(self._progress)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Raise an error, because a copy would contain the rows."""
        raise TypeError(
            "a loader can't be pickled or deep-copied, because all its resident rows would be"
            " copied: pickle the data module instead, call its setup() there, and make a new loader"
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

    def _resumed_state(self) -> LoaderState:
        """Return the state in which the epoch begins: at its first row, or a loaded state."""
        state = self._state_at_start()
        if (loaded := self._progress.loaded_in(self._epoch)) is None:
            return state
        self._check_order({"seed": loaded.seed}, {"seed": state.seed})
        self._check_order(loaded.sampler, state.sampler)
        return loaded

    def _checked_schedule(self, state: LoaderState) -> BatchSchedule:
        """Return the steps from a state on, if every data device has a row in each of them."""
        schedule = self._schedule(state.epoch, state.position)
        stretches = schedule.stretches
        num_rows = min((steps.position(len(steps)) - steps.start for steps in stretches), default=0)
        num_devices = self._topology.num_global_data_devices
        if 0 < num_rows < num_devices:
            raise ValueError(
                f"{num_rows} rows remain in the epoch for {num_devices} data devices, so some would"
                f" have no row: use at most {num_rows} data devices, a sampler of more rows, or"
                " another checkpoint"
            )
        return schedule

    def _with_results(self, state: LoaderState) -> LoaderState:
        """Record which results the order of the epoch depends on, or check the recorded ones."""
        results = self.order.results_in(state.epoch)
        if state.results is not None and state.position:
            self._check_order({"results": state.results}, {"results": results})
        return msgspec.structs.replace(state, results=results or None)

    def _check_order(self, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        if (difference := difference_of(saved, now)) is not None:
            name, old, new, remedy = difference
            raise ValueError(
                f"the checkpoint was saved inside an epoch with {name}={old}, and this loader has"
                f" {name}={new}, which is another row order: resume with {remedy}; or from a"
                " checkpoint of the end of an epoch"
            )

    def __len__(self) -> int:
        """Return the steps of the epoch, including those before a resume."""
        state = self._resumed_state()
        return state.steps + len(self._checked_schedule(state))

    @property
    def num_steps(self) -> int:
        """Steps of an epoch that is not resumed and skips none."""
        return len(self._whole_epoch)

    def num_steps_of(self, epoch: int, position: int = 0) -> int:
        """Return the steps of an epoch from a position on."""
        return len(self._schedule(epoch, position))

    def __iter__(self) -> Iterator[Any]:
        # Lazy up to the first next(): Lightning calls iter() before it sets the epoch and loads the
        # state.
        if self.prefetch:
            deliver = self._progress.deliver
            return prefetched(self._steps(), self.device, self.data_devices, self.prefetch, deliver)
        return self._delivered_steps()

    def _delivered_steps(self) -> Iterator[Any]:
        device = self.device
        assemble = self._collator.assemble_and_transform
        deliver = self._progress.deliver
        for super_batch in self._steps():
            item = super_batch if device is None else assemble(super_batch, device)
            deliver(super_batch, item)
            # Drop the reference, so that its memory can be reused for the next one.
            del super_batch
            yield item
            del item

    def step_positions(self, step: int) -> range:
        """Return the positions that this process serves in a step of an epoch without resume."""
        return self.positions(*self._whole_epoch.bounds(step))

    def positions(self, start: int, stop: int) -> range:
        """Return the positions in ``[start, stop)`` that this process serves."""
        topology = self._topology
        return strided(start, stop, topology.rank, topology.data_parallel_size)

    @property
    def max_step_rows(self) -> int:
        """The rows of this process in the largest step of an epoch that is not resumed."""
        # All but the last two are equal.
        steps = {0, max(0, self.num_steps - 2), self.num_steps - 1}
        return max(len(self.step_positions(step)) for step in steps)

    @property
    def start_state(self) -> LoaderState:
        """The state in which the current epoch began, or was resumed."""
        return self._progress.start_state

    def local_positions(self, steps: Iterable[int]) -> list[range]:
        """Return the positions that this process serves in steps of the current epoch."""
        state = self.start_state
        schedule = self._checked_schedule(state)
        return [self.positions(*schedule.bounds(step - state.steps)) for step in steps]

    @property
    def _whole_epoch(self) -> BatchSchedule:
        order = self.order
        return BatchSchedule(
            order.num_positions, self.global_batch, order.num_shards, self.drop_last
        )

    def _schedule(self, epoch: int, position: int) -> BatchSchedule:
        skipped = self.skipped.of_epoch(epoch, self.order.num_positions)
        return replace(self._whole_epoch, start=position, skipped=skipped)

    def _steps(self) -> Iterator[SuperBatch]:
        """Yield the steps of the epoch, none of which counts as delivered yet."""
        rows = None if self._renew_rows is None else self._renew_rows()
        if rows is not None and rows is not self._rows:
            self._serve(rows)
        if self._rows.is_released:
            raise released_error()
        state = self._resumed_state()
        schedule = self._checked_schedule(state)
        state = self._with_results(state)
        # It must not refer to the loader, which refers to its progress.
        self._progress.begin(state, partial(_count_in_steps, self._count_items, schedule, state))
        with closing(ExitStack()) as stack:
            # close() does not receive the error that ends this generator. In Python 3.10, a context
            # manager keeps the error, and so this frame and the rows, until the next collection.
            takes = [
                stack.enter_context(source.epoch(self.order, state.epoch, state.position))
                for source in self._rows.sources
            ]
            fetched: Iterator[Fetched] = chain.from_iterable(
                self._fetcher.fetch(takes, steps) for steps in self._step_groups(state, schedule)
            )
            if self._rows.images is not None:
                decoded = self._rows.images.decoded(fetched, self.order, self.seed)
                fetched = stack.enter_context(closing(decoded))
            yield from chain.from_iterable(map(self._super_batches, fetched))

    def _super_batches(self, fetched: Fetched) -> Iterator[SuperBatch]:
        """Yield the super-batches of some steps."""
        collator = self._collator
        steps = fetched.steps
        devices = fetched.devices
        first_device = fetched.first_receiver
        random = None
        if collator.takes_random:
            random = RowRandom.at(self.order, steps.epoch, steps.positions, self.seed)
        row = 0
        seeds = None
        rank = self._topology.rank
        num_processes = self._topology.data_parallel_size
        # The rows of a step are freed with its super-batch.
        leaves_of_steps = fetched.by_step()
        pairs = zip(steps.local_sizes, steps.weights, strict=True)
        for step, (num_rows, weight) in enumerate(pairs, steps.first_step):
            if collator.has_transform:
                rows_random = random and random.restarted(rows=slice(row, row + num_rows))
                seeds = StepSeeds(self.seed, steps.epoch, step, rank, num_processes, rows_random)
            batches = collator.collate_and_transform(
                leaves_of_steps.pop(), devices, first_device, seeds
            )
            super_batch = SuperBatch(
                devices, num_rows, weight, first_device, collator, batches, seeds
            )
            del batches
            row += num_rows
            first_device = (first_device + num_rows) % len(devices)
            yield super_batch
            del super_batch

    def _step_groups(self, state: LoaderState, schedule: BatchSchedule) -> Iterator[Steps]:
        """Yield the steps of an epoch in groups that are located together."""
        first_step = state.steps
        max_steps = min(max(1, _LOCATED_POSITIONS // self.global_batch), _LOCATED_STEPS)
        for stretch in schedule.stretches:
            for step in range(0, max(1, stretch.num_full), max_steps):
                stop = min(step + max_steps, stretch.num_full)
                global_sizes = [self.global_batch] * (stop - step)
                if stop == stretch.num_full:
                    global_sizes += stretch.tail
                start = stretch.position(step)
                yield self._steps_at(state.epoch, first_step, start, global_sizes)
                first_step += len(global_sizes)

    def _steps_at(self, epoch: int, first_step: int, start: int, global_sizes: list[int]) -> Steps:
        """Return consecutive steps of these sizes from a position on, with their weights."""
        topology = self._topology
        bounds = start + bounds_of(global_sizes)
        stop = int(bounds[-1])
        positions = self.positions(start, stop)
        local_stops = num_strided(bounds, topology.rank, topology.data_parallel_size)
        local_sizes = np.diff(local_stops).tolist()
        if self._count_items is None:
            weights = row_weights(local_sizes, global_sizes)
        else:
            items = self._count_items(epoch, range(start, stop))
            local_items = items[positions.start - start :: topology.data_parallel_size]
            weights = item_weights(local_items, local_sizes, items, global_sizes)
        return Steps(epoch, first_step, positions, local_sizes, weights)


def _count_in_steps(
    count_items: CountItems | None, schedule: BatchSchedule, state: LoaderState, steps: range
) -> float:
    """Count the items in steps of an epoch that begins in a state, without those before or after.

    Args:
        count_items: Counts the items at positions; None if every position is one.
        schedule: The steps from the state on.
        state: The state.
        steps: The indices of steps in the epoch.
    """
    start = max(0, steps.start - state.steps)
    stop = min(steps.stop - state.steps, len(schedule))
    positions = [range(*schedule.bounds(step)) for step in range(start, stop)]
    if count_items is None:
        return sum(map(len, positions))
    return sum(float(np.sum(count_items(state.epoch, here))) for here in positions)


class RowsByStep:
    """The dataset rows of each step of this process, for a loader in dataset order."""

    def __init__(self, loader: SuperBatchLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return self._loader.num_steps

    def __getitem__(self, step: int) -> list[int]:
        rows: list[int]
        rows = self._loader.order.dataset_rows(0, self._loader.step_positions(step)).tolist()
        return rows
