"""The zipped loader: one super-batch per step from the shards of all data devices."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_memmap._compat.loops import BatchIndices, TrainerProgress
from lightning_memmap.loading.prefetch import prefetched
from lightning_memmap.loading.reading import released_error
from lightning_memmap.loading.shard import ResidentSplit
from lightning_memmap.loading.state import LoaderState
from lightning_memmap.loading.super_batch import SuperBatch
from lightning_memmap.loading.takes import Takes
from lightning_memmap.loading.transform import BatchTransform, OnSuperBatch
from lightning_memmap.placement import DataTopology
from lightning_memmap.sampling import BatchSchedule, Stream, Windows, derive_seed

#: Positions and steps whose order is worked out at once.
_ORDER_BLOCK, _BLOCK_STEPS = 2**18, 1024


class _Block(NamedTuple):
    """Consecutive steps whose order is worked out together."""

    first: int
    """The first position."""
    step_rows: list[int]
    """Rows of each step, over all processes."""


class SuperBatchLoader:
    """Iterates over the super-batches of one epoch.

    The rows of each step, and their order, are those of `lightning_memmap.sampling`. Each iteration
    is of the epoch that was set last. `BatchLoader` counts epochs by itself, and gives plain
    batches.

    Args:
        split: The resident shards.
        batch_size: Rows per data device and step.
        build: Nests one tensor per field like the dataset's samples.
        transform: Batch transform that runs on each data device, see `DeviceTransform`, or on the
            assembled batch, see `OnSuperBatch`.
        shuffle: Permute the rows of each shard, anew each epoch.
        drop_last: Drop an incomplete last step.
        seed: Seed of the order and of random transforms.
        shuffle_window: Rows of a shard that lie together and come together, see `Stream`; by
            default those of the whole shard, or of the windows in which a split is read.
        progress: Tells which of the delivered steps are in the weights of a Trainer, and so in its
            checkpoints. Without one, all are.

    Raises:
        ValueError: ``batch_size`` is below 1, or no step would have its full size under
            ``drop_last``, or the split is read in other windows than it would be shuffled in.
    """

    #: What Lightning's ``BatchSizeFinder`` measures: `batch_sizes`. Not there under
    #: ``overfit_batches``, where Lightning would sample from it.
    dataset: range

    def __init__(
        self,
        split: ResidentSplit,
        batch_size: int,
        *,
        build: Callable[[Sequence[Tensor]], Any],
        transform: BatchTransform | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        shuffle_window: int | None = None,
        progress: TrainerProgress | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: at least 1 row per data device")
        if split.streamed is not None and shuffle and shuffle_window is None:
            shuffle_window = split.streamed.window
        self.stream = Stream(split.num_rows, split.num_shards, seed, shuffle, shuffle_window)
        if split.streamed is not None:
            # Checks the one against the other.
            Windows(self.stream, split.streamed.window)
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._build = build
        self._transform = transform
        self._progress = progress
        self._epoch = 0
        self._began = LoaderState(**vars(self.stream))
        #: Steps of the epoch that were delivered, and what a Trainer had counted at the last one.
        self._delivered: tuple[int, Any] = 0, None
        self._resume: LoaderState | None = None
        self._serve(split)

    def _serve(self, split: ResidentSplit) -> None:
        self._split = split
        self._takes = Takes(split, self.stream, self._build, self._transform)
        if not self.num_steps:
            raise ValueError(
                f"batch_size={self.batch_size}, drop_last=True: the {split.num_rows} rows do not"
                f" fill one step of {self.global_batch}; use a smaller batch_size or"
                " drop_last=False"
            )

    @property
    def global_batch(self) -> int:
        """Rows of a step over all processes, ``G``."""
        return self.batch_size * self._split.topology.num_data_devices

    @property
    def batch_sampler(self) -> Any:
        """Where Lightning looks for ``sampler.set_epoch``, and, in dataset order, for the rows of
        the steps that a prediction writer is told.

        Made anew each time: kept, it would keep the loader and its rows until garbage is collected.
        """
        if self.stream.shuffle:
            return SimpleNamespace(sampler=self)
        return BatchIndices(self, StepRows(self))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration has."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, the same on every rank: after the last step delivered, and
        under a Trainer after the last one that its weights have learned from."""
        steps, counts = self._delivered
        if counts is not None and self._progress is not None:
            steps -= self._progress.num_untrained(counts)
        began = self._began
        if steps <= began.steps:
            return asdict(began)
        _, position = self._plan(began.position).bounds(steps - began.steps - 1)
        return asdict(replace(began, position=position, steps=steps))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a saved stream stood, if the next iteration is of the same epoch.

        The number of data devices and the batch size may be others than before.

        Raises:
            ValueError: It is not such a state: see `LoaderState.read`.
        """
        self._began = self._resume = LoaderState.read(state)
        self._delivered = self._began.steps, None

    @property
    def num_trained(self) -> int | None:
        """The batches of the epoch that a Trainer's weights have learned from, as it counts them;
        None before the first one is delivered."""
        counts = self._delivered[1]
        if counts is None or self._progress is None:
            return None
        return self._progress.num_trained(counts)

    @property
    def batch_sizes(self) -> range:
        """As long as the batch size from which on twice as many rows are of no use: since a step
        has all rows, or, under ``drop_last``, since they would not fill one."""
        rows, num_devices = self.stream.num_rows, self._split.topology.num_data_devices
        return range(rows // (2 * num_devices) + 1 if self.drop_last else -(-rows // num_devices))

    @property
    def transforms_super_batches(self) -> bool:
        """Whether the transform runs on assembled batches."""
        return isinstance(self._transform, OnSuperBatch)

    def of_process(self, rank: int, size: int) -> "SuperBatchLoader":
        """A loader over the same shards that serves the rows of one of several processes.

        Args:
            rank: The process.
            size: How many there are.

        Raises:
            ValueError: They do not divide the shards, or some would have no row.
        """
        topology = DataTopology(self.data_devices, rank, size)
        count, stream = topology.num_data_devices, self.stream
        if stream.num_shards % count or stream.num_rows < count:
            raise ValueError(
                f"{size} processes for a store of {stream.num_rows} rows in"
                f" {stream.num_shards} shards: without a Trainer, the processes must divide the"
                " shards, and each must have a row; build the store with another num_shards"
            )
        loader = copy.copy(self)
        loader._serve(replace(self._split, topology=topology))
        return loader

    def __copy__(self) -> "SuperBatchLoader":
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Never: the rows would go with it.

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            "a loader is neither pickled nor deep-copied, as all its resident rows would be: pickle"
            " the data module instead, and there call setup() and make the loader anew"
        )

    def __repr__(self) -> str:
        devices = ", ".join(map(str, self.data_devices))
        return (
            f"{type(self).__name__}({self.stream.num_rows} rows on {devices},"
            f" batch_size={self.batch_size}, shuffle={self.stream.shuffle})"
        )

    def _start(self) -> LoaderState:
        """Where the epoch begins: at its first row, or where a saved stream stood.

        Raises:
            ValueError: The saved stream had another row order than this one, or leaves fewer rows
                than there are data devices.
        """
        stream, saved = self.stream, self._resume
        if saved is None or saved.epoch != self._epoch:
            return LoaderState(**vars(stream), epoch=self._epoch)
        for name, now in vars(stream).items():
            if (then := getattr(saved, name)) != now:
                raise ValueError(
                    f"the checkpoint stands inside an epoch with {name}={then}, and this loader"
                    f" has {name}={now}, which is another row order: resume with {name}={then}"
                    " (for shards: with a number of data devices that divides it), or from a"
                    " checkpoint of the end of an epoch"
                )
        left, num_devices = stream.num_rows - saved.position, self._split.topology.num_data_devices
        if 0 < left < num_devices and not self.drop_last:
            raise ValueError(
                f"the checkpoint leaves {left} rows of its epoch for {num_devices} data devices, so"
                f" that some would have none: resume with at most {left} data devices, or from"
                " another checkpoint"
            )
        return saved

    def __len__(self) -> int:
        """Steps of the epoch, those before a resume included."""
        start = self._start()
        return start.steps + len(self._plan(start.position))

    @property
    def num_steps(self) -> int:
        """Steps of an epoch that is not resumed."""
        return len(self._plan(0))

    def __iter__(self) -> Iterator[SuperBatch]:
        # Nothing happens before the first step is asked for: Lightning calls iter() before it
        # sets the epoch and loads the state.
        return self._steps()

    @property
    def data_devices(self) -> tuple[torch.device, ...]:
        """The devices that take batches."""
        return self._split.topology.data_devices

    def to(
        self,
        device: torch.device,
        on_step: Callable[[SuperBatch], None] | None = None,
        prefetch: int = 0,
    ) -> "DeviceLoader":
        """A loader that assembles each super-batch on a device and yields plain batches; see
        `DeviceLoader`."""
        return DeviceLoader(self, device, on_step, prefetch)

    def is_at_end(self, position: int) -> bool:
        """Whether no step is left of an epoch from a position on."""
        return not len(self._plan(position))

    def bounds(self, step: int) -> tuple[int, int]:
        """First and one-past-last position of a step of an epoch that is not resumed.

        Raises:
            IndexError: There is no such step.
        """
        return self._plan(0).bounds(step)

    def positions(self, first: int, last: int) -> range:
        """The positions in ``[first, last)`` that this process serves: ``p % size == rank``."""
        rank, size = self._split.topology.rank, self._split.topology.size
        return range(first + (rank - first) % size, last, size)

    def _plan(self, start: int) -> BatchSchedule:
        stream = self.stream
        return BatchSchedule(
            stream.num_rows, self.global_batch, stream.num_shards, self.drop_last, start
        )

    def steps_ahead(self) -> Iterator[SuperBatch]:
        """The steps of the epoch, for one who looks ahead: a step counts as delivered when
        `deliver` is told, in the same order."""
        return self._steps(is_ahead=True)

    def deliver(self, super_batch: SuperBatch) -> None:
        """Count a step of `steps_ahead` as delivered."""
        counts = None if self._progress is None else self._progress.counts()
        # At once: a signal may come at any time.
        self._delivered = self._delivered[0] + 1, counts

    def _steps(self, is_ahead: bool = False) -> Iterator[SuperBatch]:
        if self._split.is_released:
            raise released_error()
        self._began = start = self._start()
        self._delivered, self._resume = (start.steps, None), None
        rank, has_seeds = self._split.topology.rank, self.transforms_super_batches
        step = start.steps
        with self._split.read_ahead(self.stream, start.epoch, start.position) as ahead:
            for block in self._blocks(self._plan(start.position)):
                positions = self.positions(block.first, block.first + sum(block.step_rows))
                lengths = self._lengths(block)
                step_rows = iter(block.step_rows)
                for super_batch in self._takes.take(ahead, start.epoch, step, positions, lengths):
                    super_batch.step_rows = next(step_rows)
                    if has_seeds:
                        super_batch.seed = derive_seed(self.stream.seed, start.epoch, step, rank)
                    step += 1
                    if not is_ahead:
                        self.deliver(super_batch)
                    yield super_batch
                    # Not held while the next one is taken: its memory may be free by then.
                    del super_batch

    def _blocks(self, plan: BatchSchedule) -> Iterator["_Block"]:
        """The steps of a plan, cut into blocks. Those of other sizes are the last of a block."""
        per_block = min(max(1, _ORDER_BLOCK // self.global_batch), _BLOCK_STEPS)
        for step in range(0, max(1, plan.num_full), per_block):
            last = min(step + per_block, plan.num_full)
            is_last = last == plan.num_full
            sizes = [self.global_batch] * (last - step)
            if is_last:
                edges = [plan.bounds(odd) for odd in range(last, len(plan))]
                sizes += [end - begin for begin, end in edges]
            if sizes:
                yield _Block(plan.bounds(step)[0], sizes)

    def _lengths(self, block: "_Block") -> list[int]:
        """How many positions of each step this process serves."""
        first, lengths = block.first, list[int]()
        for rows in block.step_rows:
            # The same in every full step: the data devices divide its rows.
            is_full = rows == self.global_batch and bool(lengths)
            lengths.append(lengths[0] if is_full else len(self.positions(first, first + rows)))
            first += rows
        return lengths


class StepRows(Sequence[list[int]]):
    """The dataset rows of each step of this process, for a loader that does not shuffle."""

    def __init__(self, loader: SuperBatchLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return self._loader.num_steps

    def __getitem__(self, step: Any) -> Any:
        if isinstance(step, slice):
            return [self[index] for index in range(*step.indices(len(self)))]
        return list(self._loader.positions(*self._loader.bounds(step)))


class DeviceLoader:
    """A zipped loader whose super-batches are assembled on one device: it yields plain batches.

    Args:
        loader: The zipped loader; its epoch and its state are shared.
        device: Usually the root device.
        on_step: Is given each super-batch before its batch is yielded.
        prefetch: Coming steps that are made ready on side streams while the consumer has one; see
            `lightning_memmap.loading.prefetch`. With 0 each is made when it is asked for.

    Raises:
        ValueError: ``prefetch`` is below 0.
    """

    def __init__(
        self,
        loader: SuperBatchLoader,
        device: torch.device,
        on_step: Callable[[SuperBatch], None] | None = None,
        prefetch: int = 0,
    ) -> None:
        if prefetch < 0:
            raise ValueError(f"prefetch={prefetch}: the steps made ready ahead, 0 for none")
        self.loader = loader
        self.device = device
        self._on_step = on_step
        self._prefetch = prefetch

    @property
    def batch_sampler(self) -> Any:
        """Where Lightning looks for a sampler; see `SuperBatchLoader.batch_sampler`."""
        return self.loader.batch_sampler

    @property
    def num_steps(self) -> int:
        """Steps of an epoch that is not resumed."""
        return self.loader.num_steps

    @property
    def num_trained(self) -> int | None:
        """Batches that a Trainer has trained on; see `SuperBatchLoader.num_trained`."""
        return self.loader.num_trained

    @property
    def dataset(self) -> range:
        """What Lightning's ``BatchSizeFinder`` measures; see `SuperBatchLoader.batch_sizes`.

        Raises:
            AttributeError: The zipped loader was given none.
        """
        return self.loader.dataset

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration has."""
        self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands; see `SuperBatchLoader.state_dict`."""
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a saved stream stood; see `SuperBatchLoader.load_state_dict`."""
        self.loader.load_state_dict(state)

    def __len__(self) -> int:
        return len(self.loader)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.loader!r}, device={str(self.device)!r})"

    def __iter__(self) -> Iterator[Any]:
        if self._prefetch:
            return prefetched(self.loader, self.device, self._prefetch, self._on_step)
        return self._one_by_one()

    def _one_by_one(self) -> Iterator[Any]:
        for super_batch in self.loader:
            if self._on_step is not None:
                self._on_step(super_batch)
            batch = super_batch.to(self.device)
            del super_batch
            yield batch
            del batch
