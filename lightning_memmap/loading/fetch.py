"""Fetch the rows of the next steps, for one device that receives all rows or for every data device.

Take 7 rows in 4 shards for two data devices, in dataset order, and steps of 4 and 3 rows. The
sources 0 and 1 hold the shards 0, 1 and 2, 3. Small steps are fetched in groups; here each step is
a group::

    step          0           1
    positions     0 1 2 3     4 5 6
    shard         0 1 2 3     0 1 2      position % 4
    source        0 0 1 1     0 0 1
    receiver      0 1 0 1     0 1 0      position % 2

So the source 0 is requested rows 0, 1 for step 0 and rows 4, 5 for step 1, one for each receiver;
the source 1 rows 2, 3 and then row 6, for receiver 0. `merge_in_order` merges what a receiver gets.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.integers import Integers, bounds_of, group_of
from lightning_memmap.loading.buffers import memory_for
from lightning_memmap.loading.device_streams import send
from lightning_memmap.loading.nested import rows_of_device
from lightning_memmap.loading.row_source import Fetched, FieldRows, Steps, Take, merge_in_order
from lightning_memmap.loading.split import SplitRows
from lightning_memmap.placement.topology import DataTopology
from lightning_memmap.sampling.sampler import Sampler

#: One request to a source, for a group of steps: slots sorted by receiver, their row indices within
#: all steps, and the number of rows per receiver.
_Request: TypeAlias = tuple[Tensor, Integers, list[int]]
#: Most bytes of steps that are fetched at once.
_FETCH_BYTES = 2**23
#: Most steps that are fetched at once.
_FETCH_STEPS = 64


class Fetcher:
    """Fetches rows from their sources, for one device that receives all or for every data device.

    Args:
        rows: The rows of a split.
        topology: The devices of this process.
        sampler: The order of the rows.
        assembled_on: The device on which batches are assembled; None if each data device keeps
            its rows.
    """

    def __init__(
        self,
        rows: SplitRows,
        topology: DataTopology,
        sampler: Sampler,
        assembled_on: torch.device | None,
    ) -> None:
        self._rows = rows
        self._sampler = sampler
        devices = topology.data_devices
        # A device that assembles batches receives all rows, if it is the only physical data device
        # and holds them all.
        is_one_source = len(rows.sources) == 1 and {*devices} == {rows.sources[0].device}
        self._receivers = devices
        if is_one_source and assembled_on is not None:
            self._receivers = (assembled_on,)
        owners = [topology.owner(shard) for shard in range(rows.pool.num_shards)]
        pairs = {*zip(rows.source_of_shard.tolist(), owners, strict=True)}
        count = len(self._receivers)
        #: By source, the receivers that it has rows for.
        self._receivers_of = [
            sorted({owner % count for s, owner in pairs if s == source and owner is not None})
            for source in range(len(rows.sources))
        ]
        # Two steps may be in use, each with a batch per data device, and images of a third one are
        # decoded.
        num_buffers = 3 * len(devices) + 2
        fixed = [(field.item_shape, field.dtype) for field in rows.fields if not field.num_variable]
        self._are_variable = any(field.num_variable for field in rows.fields)
        #: By source, a function that returns buffers for a number of rows; None on a GPU.
        self._memory = [
            memory_for(fixed, [self._receivers[receiver] for receiver in receivers], num_buffers)
            if source.device.type == "cpu"
            else None
            for source, receivers in zip(rows.sources, self._receivers_of, strict=True)
        ]

    def fetch(self, takes: list[Take], steps: Steps) -> Iterator[Fetched]:
        """Fetch the rows of consecutive steps, several small ones at once.

        Args:
            takes: By source, the function that copies its rows.
            steps: The steps.
        """
        max_rows = steps.local_sizes[0]
        images = self._rows.images
        row_bytes = self._rows.row_bytes + (0 if images is None else images.row_bytes)
        group_steps = max(1, _FETCH_BYTES // max(1, max_rows * row_bytes))
        group_steps = min(group_steps, _FETCH_STEPS, len(steps.local_sizes))
        pending = self._rows.pending
        dataset_rows = np.zeros(0, np.int64)
        if pending is not None and pending.has_all_rows:
            pending = None
        if self._rows.with_row_numbers or pending is not None:
            dataset_rows = self._sampler.padded_dataset_rows(steps.epoch, steps.positions)
        if pending is not None:
            pending.request(dataset_rows[dataset_rows >= 0])
            # One step at a time: it must not wait for the rows of later ones.
            group_steps = 1
        bounds = bounds_of(steps.local_sizes)
        bounds = np.append(bounds[:-1:group_steps], bounds[-1])
        count = len(self._receivers)
        first_receiver = steps.positions.start // steps.positions.step % count
        by_source = [
            self._requests(source, steps, first_receiver, bounds) for source in range(len(takes))
        ]
        requests = zip(*by_source, strict=True)
        for group, (start, stop) in enumerate(pairwise(bounds.tolist())):
            here = slice(group * group_steps, (group + 1) * group_steps)
            group_of_steps = Steps(
                steps.epoch,
                steps.first_step + here.start,
                steps.positions[start:stop],
                steps.local_sizes[here],
                steps.weights[here],
            )
            if pending is not None and not self._rows.is_released:
                needed = dataset_rows[start:stop]
                pending.wait(needed[needed >= 0])
            # Ordinary tensors in inference mode too: it may end before the last step.
            with torch.inference_mode(False):
                leaves = self._take(takes, next(requests))
                receiver = (first_receiver + start) % count
                fetched = Fetched(group_of_steps, receiver, leaves, self._receivers)
                if self._rows.with_row_numbers:
                    fetched.append_rows(torch.from_numpy(dataset_rows[start:stop]))
            # Not referenced while the next group is fetched, so that its memory can be reused.
            del leaves
            yield fetched
            del fetched

    def _requests(
        self, source: int, steps: Steps, first_receiver: int, bounds: Integers
    ) -> Iterator[_Request]:
        """Yield the request to a source for each group of steps.

        Args:
            source: The index of the source.
            steps: The steps.
            first_receiver: The receiver of the first row.
            bounds: The rows at which groups start and stop, of shape (groups + 1,).
        """
        row_source = self._rows.sources[source]
        receivers = self._receivers_of[source]
        count = len(self._receivers)
        is_single = len(receivers) == 1
        chosen = rows_of_device(receivers[0], first_receiver, count) if is_single else slice(None)
        positions = steps.positions[chosen]
        slots = row_source.locate(self._sampler, steps.epoch, positions)
        rows = np.arange(*chosen.indices(len(steps.positions)))
        if len(self._rows.sources) > 1:
            shards = np.array(positions) % self._rows.pool.num_shards
            is_here = self._rows.source_of_shard[shards] == source
            rows = rows[is_here]
            slots = slots[is_here]
        group_sizes = np.diff(rows.searchsorted(bounds))
        # Rows of each group and receiver, of shape (groups, receivers).
        sizes = group_sizes[:, None]
        if not is_single:
            keys = group_of(group_sizes) * count + (first_receiver + rows) % count
            dtype = np.min_scalar_type(len(bounds) * count)
            permutation = np.argsort(keys.astype(dtype), kind="stable")
            rows = rows[permutation]
            slots = slots[permutation]
            counts = np.bincount(keys, minlength=len(group_sizes) * count)
            sizes = counts.reshape(-1, count)[:, receivers]
        all_slots = torch.from_numpy(slots)
        if not self._are_variable:
            all_slots = send(all_slots, row_source.device)
        group_bounds = bounds_of(group_sizes).tolist()
        # A generator, so that the first step doesn't wait until all are divided.
        for (start, stop), sizes_here in zip(pairwise(group_bounds), sizes.tolist(), strict=True):
            yield all_slots[start:stop], rows[start:stop], sizes_here

    def _take(self, takes: list[Take], requests: Sequence[_Request]) -> list[list[FieldRows]]:
        """Copy the rows of a group of steps, and send them to their receivers."""
        fetched: list[list[tuple[Integers, list[FieldRows]]]] = [[] for _ in self._receivers]
        of_source = zip(takes, self._memory, self._receivers_of, requests, strict=True)
        for take, memory, receivers, (slots, rows, sizes) in of_source:
            leaves = take(slots, None if memory is None else memory(len(slots)))
            split = [leaf.split_with_sizes(sizes) if len(sizes) > 1 else [leaf] for leaf in leaves]
            start = 0
            for index, (receiver, size) in enumerate(zip(receivers, sizes, strict=True)):
                device = self._receivers[receiver]
                sent = [_send(leaf[index], device) for leaf in split]
                fetched[receiver].append((rows[start : start + size], sent))
                start += size
        return [merge_in_order(*pair) for pair in zip(fetched, self._receivers, strict=True)]


def _send(leaf: FieldRows, device: torch.device) -> FieldRows:
    return send(leaf, device) if isinstance(leaf, Tensor) else leaf.to(device)
