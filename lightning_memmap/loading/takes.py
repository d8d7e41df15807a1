"""Takes: the rows of coming steps, copied into super-batches."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.loading.buffers import BufferPool
from lightning_memmap.loading.read_ahead import ReadAhead
from lightning_memmap.loading.shard import ResidentShards, ResidentSplit
from lightning_memmap.loading.streams import has_streams, send
from lightning_memmap.loading.super_batch import Collator, SuperBatch
from lightning_memmap.loading.transform import BatchTransform, DeviceTransform, OnSuperBatch
from lightning_memmap.sampling import Integers, Stream, derive_seed

#: Small steps are taken several at once, up to so many bytes and steps.
_TAKE_BYTES, _TAKE_STEPS = 2**22, 64


class Takes:
    """Takes rows where they are, into a batch for each data device or into one for all.

    Args:
        split: The resident shards.
        stream: The order of their rows.
        build: Nests one tensor per field like the dataset's samples.
        transform: Batch transform that runs on each data device; see `DeviceTransform`. Or one that
            runs on the assembled batch; see `OnSuperBatch`.
    """

    def __init__(
        self,
        split: ResidentSplit,
        stream: Stream,
        build: Callable[[Sequence[Tensor]], Any],
        transform: BatchTransform | None,
    ) -> None:
        self._split = split
        self._stream = stream
        self._devices = split.topology.data_devices
        on_all = transform if isinstance(transform, OnSuperBatch) else None
        self._assembler = Collator(build, on_all)
        self._transforms = (
            [DeviceTransform(transform, device) for device in self._devices]
            if transform is not None and on_all is None
            else []
        )
        self._pools: dict[int, BufferPool] = {}

    def take(
        self,
        ahead: ReadAhead | None,
        epoch: int,
        first_step: int,
        positions: range,
        lengths: list[int],
    ) -> Iterator[SuperBatch]:
        """Take the rows of consecutive steps, whose order is worked out together.

        Args:
            ahead: What reads the rows of the epoch; None where they are in memory.
            epoch: The epoch.
            first_step: Number of the first step.
            positions: The positions of all the steps that this process serves.
            lengths: How many of them each step has. The first step is one of the longest, but
                for the last two of an epoch.

        Returns:
            A super-batch for each step.
        """
        if self._is_together:
            source = ahead or self._split.sources[0]
            yield from self._take_together(source, epoch, positions, lengths)
            return
        if ahead is not None:
            yield from self._take_ahead(ahead, epoch, first_step, positions, lengths)
        else:
            yield from self._take_apart(epoch, first_step, positions, lengths)

    def _firsts(self, positions: range, lengths: list[int]) -> Iterator[int]:
        """The data device of the first row of each step."""
        begin = positions.start // positions.step
        for length in lengths:
            yield begin % len(self._devices)
            begin += length

    @property
    def _is_together(self) -> bool:
        """Whether all rows lie in one place on the only physical device, and stay as they are:
        then one take serves all logical data devices."""
        places = self._split.places
        return (
            not self._transforms
            and len(places) == 1
            and all(device == places[0] for device in self._devices)
        )

    def _take_apart(
        self, epoch: int, first_step: int, positions: range, lengths: list[int]
    ) -> Iterator[SuperBatch]:
        """Each data device takes a batch of its own where its shards are."""
        count, start = len(self._devices), 0
        shards, offsets = self._stream.at(epoch, positions)
        for index, (length, first) in enumerate(
            zip(lengths, self._firsts(positions, lengths), strict=True)
        ):
            step = slice(start, start + length)
            start += length
            parts = []
            for device in range(count):
                mine = slice((device - first) % count, None, count)
                leaves = self._take_rows(
                    self._devices[device], shards[step][mine], offsets[step][mine]
                )
                parts.append(self._transformed(device, leaves, epoch, first_step + index))
                del leaves
            yield SuperBatch(self._devices, length, first, parts=parts, assembler=self._assembler)
            del parts

    def _take_ahead(
        self,
        ahead: ReadAhead,
        epoch: int,
        first_step: int,
        positions: range,
        lengths: list[int],
    ) -> Iterator[SuperBatch]:
        """Each data device has a batch of its own. All of a step are taken at once: the window of
        the first one's last row may be gone before the second one's first."""
        count, start = len(self._devices), 0
        locations = ahead.locate_positions(self._stream, epoch, positions)
        for index, (length, first) in enumerate(
            zip(lengths, self._firsts(positions, lengths), strict=True)
        ):
            step = locations[start : start + length]
            start += length
            shares = [step[(device - first) % count :: count] for device in range(count)]
            taken = self._take_host_rows(ahead, torch.from_numpy(np.concatenate(shares)))
            columns = [leaf.split_with_sizes([len(share) for share in shares]) for leaf in taken]
            parts = [
                self._transformed(
                    device,
                    [send(leaf, self._devices[device]) for leaf in leaves],
                    epoch,
                    first_step + index,
                )
                for device, leaves in enumerate(zip(*columns, strict=True))
            ]
            del taken, columns
            yield SuperBatch(self._devices, length, first, parts=parts, assembler=self._assembler)
            del parts

    def _take_host_rows(self, ahead: ReadAhead, locations: Tensor) -> list[Tensor]:
        if all(device.type == "cpu" for device in self._devices):
            return self._take_into_buffer(ahead, locations)
        # Memory that copies to a device read from is not ours to use again before they are done:
        # torch knows when.
        return ahead.take(locations, pin_memory=any(map(has_streams, self._devices)))

    def _take_together(
        self,
        source: ResidentShards | ReadAhead,
        epoch: int,
        positions: range,
        lengths: list[int],
    ) -> Iterator[SuperBatch]:
        locations = source.locate_positions(self._stream, epoch, positions)
        places = send(torch.from_numpy(locations), source.device)
        # Several small steps in one take; the steps are views of what it gives.
        longest = lengths[0]
        together = max(1, _TAKE_BYTES // max(1, longest * source.row_bytes))
        together = min(together, _TAKE_STEPS, len(lengths))
        count, start = len(self._devices), 0
        first = positions.start // positions.step % count
        for index in range(0, len(lengths), together):
            steps_of_take = lengths[index : index + together]
            stop = start + sum(steps_of_take)
            # Ordinary tensors in inference mode too: it may be over before the last of these steps.
            ordinary = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
            with ordinary or nullcontext():
                leaves = self._take_into_buffer(source, places[start:stop], together * longest)
                columns = [leaf.split_with_sizes(steps_of_take) for leaf in leaves]
            steps = [list(step) for step in zip(*columns, strict=True)]
            start = stop
            del leaves, columns
            # The last reference to a step's views goes with its super-batch.
            steps.reverse()
            for length in steps_of_take:
                yield SuperBatch(
                    self._devices, length, first, whole=steps.pop(), assembler=self._assembler
                )
                first = (first + length) % count

    def _take_into_buffer(
        self, source: ResidentShards | ReadAhead, locations: Tensor, usual_rows: int = 0
    ) -> list[Tensor]:
        """Take rows into a buffer, on the CPU.

        Args:
            source: Where they are.
            locations: Where they lie there.
            usual_rows: Rows of most takes. Smaller ones use the same memory.
        """
        if source.device.type != "cpu":
            return source.take(locations)
        num_rows = len(locations)
        pool = self._pool_for(max(num_rows, usual_rows), source)
        return source.take(locations, pool.get(num_rows))

    def _pool_for(self, num_rows: int, source: ResidentShards | ReadAhead) -> BufferPool:
        if num_rows not in self._pools:
            shapes = [((num_rows, *t.shape[1:]), t.dtype) for t in source.tensors]
            # Two steps may be under way, each with a batch on every data device.
            self._pools[num_rows] = BufferPool(shapes, 2 * len(self._devices) + 2)
        return self._pools[num_rows]

    def _transformed(self, index: int, leaves: list[Tensor], epoch: int, step: int) -> Any:
        batch = self._assembler.build(leaves)
        if self._transforms:
            rank = self._split.topology.rank + self._split.topology.size * index
            return self._transforms[index](batch, derive_seed(self._stream.seed, epoch, step, rank))
        return batch

    def _take_rows(self, device: torch.device, shards: Integers, offsets: Integers) -> list[Tensor]:
        of_row = self._split.source_of_shard[shards]
        used = np.unique(of_row)
        parts = []
        for which in used.tolist():
            source = self._split.sources[which]
            mine = np.flatnonzero(of_row == which)
            places = source.locate(shards[mine], offsets[mine], self._stream.num_shards)
            locations = send(torch.from_numpy(places), source.device)
            if device.type == "cpu":
                taken = self._take_into_buffer(source, locations)
            else:
                # From host memory by way of page-locked memory, whether the shard is there or not.
                is_on_host = source.device.type == "cpu" and has_streams(device)
                taken = source.take(locations, pin_memory=is_on_host)
                taken = [send(leaf, device) for leaf in taken]
            parts.append((mine, taken))
        if len(parts) == 1:
            return parts[0][1]
        # Some shards of this device live elsewhere: their rows are put back into stream order.
        order = torch.from_numpy(np.argsort(np.concatenate([mine for mine, _ in parts])))
        order = send(order, device)
        columns = zip(*(leaves for _, leaves in parts), strict=True)
        return [torch.cat(leaves).index_select(0, order) for leaves in columns]
