"""Which rows each source is asked for, where each data device has a batch of its own."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_memmap.loading.device_streams import send
from lightning_memmap.loading.row_source import EpochRows, Leaf, has_variable
from lightning_memmap.loading.split import SplitRows
from lightning_memmap.loading.variable_rows import joined_rows
from lightning_memmap.sampling import Integers


class Request(NamedTuple):
    """The rows that a source is asked for in one step."""

    locations: Tensor
    """Where they lie, those of one data device after those of another."""
    users: list[int]
    """The data devices."""
    places: list[Integers | None]
    """For each of them, the places of these rows in its batch; None where it has no others."""
    sizes: list[int]
    """How many rows each of them has."""


class StepRequests(NamedTuple):
    """What a step needs."""

    num_rows: int
    """Rows of all data devices."""
    first: int
    """The data device that has the first row."""
    by_source: list[Request]
    """What each source is asked for."""


class Requests:
    """Which rows each source is asked for. A source serves all of its data devices at once.

    Args:
        rows: The rows of the split.
    """

    def __init__(self, rows: SplitRows) -> None:
        self._rows = rows
        owner, shards = rows.topology.owner, range(rows.pool.num_shards)
        #: By data device, the sources that have rows for it.
        self._sources_of: list[list[int]] = [
            np.unique(rows.source_of_shard[[s for s in shards if owner(s) == device]]).tolist()
            for device in range(len(rows.topology.data_devices))
        ]
        #: Whether the shards of one data device live in several places.
        self._is_mixed = any(len(sources) > 1 for sources in self._sources_of)

    def of_steps(
        self, sources: list[EpochRows], positions: range, lengths: list[int]
    ) -> Iterator[StepRequests]:
        """What consecutive steps need.

        Args:
            sources: The rows of all sources in the order of an epoch.
            positions: The positions of all the steps that this process serves.
            lengths: Positions of each step.
        """
        count, start = len(self._sources_of), positions.start // positions.step
        served = [positions[(d - start) % count :: count] for d in range(count)]
        located = self._locate(sources, served)
        done, first = [0] * count, start % count
        for length in lengths:
            rows = [
                slice(begin, begin + len(range((d - first) % count, length, count)))
                for d, begin in enumerate(done)
            ]
            done = [each.stop for each in rows]
            requests = [
                self._request(which, source, located, served, rows)
                for which, source in enumerate(sources)
            ]
            yield StepRequests(length, first, requests)
            first = (first + length) % count

    def _locate(
        self, sources: list[EpochRows], served: list[range]
    ) -> dict[tuple[int, int], Tensor]:
        """Where the rows lie that each data device serves, by source and data device."""
        located = {
            (which, device): torch.from_numpy(sources[which].locate(positions))
            for device, positions in enumerate(served)
            for which in self._sources_of[device]
        }
        if self._is_mixed:
            return located
        return {
            (which, device): found
            if has_variable(sources[which].fields)
            else send(found, sources[which].device)
            for (which, device), found in located.items()
        }

    def _request(
        self,
        which: int,
        source: EpochRows,
        located: dict[tuple[int, int], Tensor],
        served: list[range],
        rows: list[slice],
    ) -> Request:
        """What one source is asked for in a step, of which each data device has some rows."""
        users = [d for d, found in enumerate(self._sources_of) if which in found]
        wanted = [located[which, device][rows[device]] for device in users]
        places: list[Integers | None] = [None] * len(users)
        if self._is_mixed:
            for at, device in enumerate(users):
                positions = np.array(served[device][rows[device]])
                home = self._rows.source_of_shard[positions % self._rows.pool.num_shards]
                places[at] = mine = np.flatnonzero(home == which)
                wanted[at] = wanted[at][torch.from_numpy(mine)]
        locations = wanted[0] if len(wanted) == 1 else torch.cat(wanted)
        if not has_variable(source.fields):
            locations = send(locations, source.device)
        return Request(locations, users, places, [len(each) for each in wanted])


def in_order(
    fetched: Sequence[tuple[Integers | None, list[Leaf]]], device: torch.device
) -> list[Leaf]:
    """The rows of one data device, whose shards may live in several places, in their order.

    Args:
        fetched: For each source, the places of its rows in the batch, and one leaf per field.
        device: The data device, on which they are.
    """
    if len(fetched) == 1:
        return fetched[0][1]
    places = np.concatenate([places for places, _ in fetched if places is not None])
    order = send(torch.from_numpy(np.argsort(places)), device)
    columns = zip(*(leaves for _, leaves in fetched), strict=True)
    joined = map(joined_rows, columns)
    return [leaf if leaf.is_meta else leaf.index_select(0, order) for leaf in joined]
