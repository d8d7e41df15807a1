"""Resident shards: rows in memory, and the take that copies some of them into a batch."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.loading.buffers import Buffers, copy_rows
from lightning_memmap.loading.lanes import Lanes
from lightning_memmap.loading.layout import Layout
from lightning_memmap.loading.read_ahead import ReadAhead, StreamedShards
from lightning_memmap.loading.staging import Staging
from lightning_memmap.loading.streams import has_streams
from lightning_memmap.placement import DataTopology, Residency, SplitPlacement
from lightning_memmap.sampling import Integers, RowSubset, Stream, shard_rows, shard_starts
from lightning_memmap.store import Store
from lightning_memmap.store.row_file import open_row_files

#: Rows that lie apart whose places are worked out at once.
_READ_ROWS = 2**16
#: A warning says where less of what is read than this is used.
_LEAST_SHARE = 0.4


@dataclass(frozen=True)
class ResidentShards:
    """Rows of some shards in one place.

    Args:
        tensors: One tensor per field, each of shape (rows here, *field shape).
        starts: Where each shard of the stream starts in the tensors, int64 of shape (C,), -1 for
            shards that are not here. None where the rows lie in the order of other shards, and
            ``store`` says how.
        store: The layout of the file mapping that the tensors are, for ``starts=None``.
    """

    tensors: list[Tensor]
    starts: Integers | None
    store: Layout | None = None

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.tensors[0].device

    def locate(self, shards: Integers, offsets: Integers, num_shards: int) -> Integers:
        """Where rows lie in the tensors.

        Args:
            shards: Shards of the stream, int64 of shape (B,).
            offsets: Offsets within them, int64 of shape (B,).
            num_shards: Shards of the stream, ``C``.

        Returns:
            Positions along the first dimension of the tensors, int64 of shape (B,).
        """
        if self.starts is not None:
            return self.starts[shards] + offsets
        assert self.store is not None
        return self.store.places(offsets * num_shards + shards)

    def locate_positions(self, stream: Stream, epoch: int, positions: range) -> Integers:
        """Where the rows lie that supply positions of a stream; see `locate`."""
        if self.starts is not None:
            return stream.places(epoch, positions, self.starts)
        return self.locate(*stream.at(epoch, positions), stream.num_shards)

    def take(
        self, locations: Tensor, out: Buffers | None = None, *, pin_memory: bool = False
    ) -> list[Tensor]:
        """Copy rows into one batch.

        Args:
            locations: Where the rows lie, int64 of shape (B,), on this device.
            out: Buffers to copy into where the rows are on a CPU. New ones are made where it is
                None.
            pin_memory: Whether new ones are page-locked, for copies to a device. torch's host
                allocator uses their memory again once they are gone and the copies are done.

        Returns:
            One tensor of shape (B, *field shape) per field, on this device.

        Raises:
            IndexError: A location is outside the rows that are here.
        """
        if self.device.type != "cpu":
            return [tensor.index_select(0, locations) for tensor in self.tensors]
        if out is None:
            shapes = [((len(locations), *t.shape[1:]), t.dtype) for t in self.tensors]
            out = Buffers.empty(shapes, pin_memory=pin_memory)
        copy_rows(self._memory, locations, out)
        return out.tensors

    @cached_property
    def _memory(self) -> Buffers:
        return Buffers.of(self.tensors)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all fields."""
        return self._memory.row_bytes


@dataclass(frozen=True)
class ResidentSplit:
    """All shards of one split that this process holds.

    Args:
        topology: The data devices and this process's place.
        num_rows: Rows of the split.
        num_shards: Shards of the stream.
        sources: The places that rows are taken from.
        source_of_shard: Index into ``sources`` for each shard of the stream, int64 of shape
            (C,), -1 for shards of other processes.
        streamed: All shards that this process holds, where they are read window by window
            instead; there are no other sources then.
    """

    topology: DataTopology
    num_rows: int
    num_shards: int
    sources: list[ResidentShards]
    source_of_shard: Integers
    streamed: StreamedShards | None = None

    def read_ahead(
        self, stream: Stream, epoch: int, position: int
    ) -> AbstractContextManager[ReadAhead | None]:
        """What reads the rows of an epoch from a position on; None where they are in memory."""
        if self.streamed is None:
            return nullcontext()
        return self.streamed.read_ahead(stream, epoch, position)

    @property
    def places(self) -> list[torch.device]:
        """Where rows are taken."""
        if self.streamed is not None:
            return [self.streamed.device]
        return [source.device for source in self.sources]

    @property
    def is_released(self) -> bool:
        """Whether the rows were let go of."""
        return self.streamed.is_released if self.streamed is not None else not self.sources

    def release(self) -> None:
        """Let go of the rows. A loader over this split, which a Trainer keeps long after it has
        used it, gives no more batches then."""
        self.sources.clear()
        if self.streamed is not None:
            self.streamed.release()


def load_split(
    store: Store, topology: DataTopology, plan: SplitPlacement, subset: RowSubset | None = None
) -> ResidentSplit:
    """Bring the shards of a split to where the plan wants them.

    Device and pinned shards are copied from the store in long reads, each shard once; those in
    the file mapping are not read yet, nor are those that will be read window by window.

    Args:
        store: The open store.
        topology: The data devices and this process's place.
        plan: Where each shard goes.
        subset: The rows of the store that the split is; all of them where it is None.

    Raises:
        OSError: A file of a store that is read window by window cannot be opened.
    """
    layout = Layout(store.num_rows, store.num_shards, subset)
    if plan.window is not None:
        streamed = _streamed(store, layout, topology, plan, plan.window)
        nowhere = np.full(plan.num_shards, -1, np.int64)
        return ResidentSplit(topology, plan.num_rows, plan.num_shards, [], nowhere, streamed)
    groups: dict[tuple[Residency, torch.device], list[int]] = {}
    for shard, residency in enumerate(plan.residency):
        owner = topology.owner(shard)
        if residency is None or owner is None:
            continue
        on_device = residency is Residency.DEVICE
        place = topology.data_devices[owner] if on_device else torch.device("cpu")
        groups.setdefault((residency, place), []).append(shard)
    sources: list[ResidentShards] = []
    source_of_shard = np.full(plan.num_shards, -1, np.int64)
    for (residency, device), shards in groups.items():
        source_of_shard[shards] = len(sources)
        if residency is Residency.MMAP:
            sources.append(_mapped(store, layout, plan.num_shards))
        else:
            pin = residency is Residency.PINNED
            sources.append(_copied(store, layout, shards, plan, device, pin=pin))
    return ResidentSplit(topology, plan.num_rows, plan.num_shards, sources, source_of_shard)


def _streamed(
    store: Store, layout: Layout, topology: DataTopology, plan: SplitPlacement, window: int
) -> StreamedShards:
    lane_rows = min(window, int(shard_rows(plan.num_rows, plan.num_shards)[0]))
    lanes = Lanes(
        store.schema.fields,
        open_row_files(store),
        layout,
        num_rows=plan.num_rows,
        num_shards=plan.num_shards,
        shards=[shard for shard, residency in enumerate(plan.residency) if residency is not None],
        lane_rows=lane_rows,
        pin=any(device.type == "cuda" for device in topology.data_devices),
    )
    if (share := lanes.share_used([range(lane_rows)])) < _LEAST_SHARE:
        warnings.warn(
            f"residency='stream': {1 / share:.0f} bytes of the {plan.split} store are read for"
            " each one that is used, since the rows of this process lie apart in its files: build"
            " a store of these rows alone, or one whose num_shards the data devices divide",
            stacklevel=2,
        )
    return StreamedShards(lanes, window)


def _mapped(store: Store, layout: Layout, num_shards: int) -> ResidentShards:
    tensors = [tensor.as_subclass(Tensor) for tensor in store.tensors]
    if layout.is_as_stored(num_shards):
        return ResidentShards(tensors, shard_starts(store.num_rows, num_shards))
    return ResidentShards(tensors, None, layout)


def _copied(
    store: Store,
    layout: Layout,
    shards: list[int],
    plan: SplitPlacement,
    device: torch.device,
    *,
    pin: bool,
) -> ResidentShards:
    rows = shard_rows(plan.num_rows, plan.num_shards)[shards]
    starts = np.full(plan.num_shards, -1, np.int64)
    starts[shards] = np.cumsum(rows) - rows
    total = int(rows.sum())
    tensors = []
    with ExitStack() as stack:
        # From a file mapping, which is not page-locked, a device would copy through the driver's
        # own small buffers, and not begin before the pages are read.
        staging = stack.enter_context(Staging(device)) if has_streams(device) else None
        for field, mapped in zip(store.schema.fields, store.tensors, strict=True):
            target = torch.empty(
                (total, *field.shape), dtype=field.dtype, device=device, pin_memory=pin
            )
            for shard, count in zip(shards, rows.tolist(), strict=True):
                part = target[starts[shard] : starts[shard] + count]
                read = _reader(mapped.as_subclass(Tensor), layout, shard, plan.num_shards)
                if staging is None:
                    read(0, part)
                else:
                    staging.copy(part, read)
            tensors.append(target)
    return ResidentShards(tensors, starts)


def _reader(
    mapped: Tensor, layout: Layout, shard: int, num_shards: int
) -> Callable[[int, Tensor], None]:
    """What fills a tensor on the CPU with the rows of a shard of the stream, from one on."""

    def read(first: int, out: Tensor) -> None:
        start = int(shard_starts(layout.num_rows, num_shards)[shard]) + first
        out.copy_(mapped[start : start + len(out)])

    def read_apart(first: int, out: Tensor) -> None:
        # The rows of a shard of another striping lie apart.
        for begin in range(0, len(out), _READ_ROWS):
            piece = out[begin : begin + _READ_ROWS]
            offsets = np.arange(len(piece), dtype=np.int64) + (first + begin)
            places = torch.from_numpy(layout.places(offsets * num_shards + shard))
            torch.index_select(mapped, 0, places, out=piece)

    return read if layout.is_as_stored(num_shards) else read_apart
