"""The plan: which shard lives where, decided, and refused, before anything is allocated."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain

import numpy as np
import torch
from rich.table import Table

from lightning_memmap.errors import PlacementError
from lightning_memmap.placement.topology import DataTopology
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.rows import Rows, striping
from lightning_memmap.sampling.sampler import Sampler
from lightning_memmap.sampling.schedule import Blocks
from lightning_memmap.sizes import format_bytes
from lightning_memmap.store.manifest import Manifest


class Residency(str, Enum):
    """Where a shard's rows live while they are used."""

    #: In the memory of its data device.
    DEVICE = "device"
    #: In memory of this process on the host, read once and in long pieces.
    HOST = "host"
    #: In the file mapping itself: in the host's page cache as far as it fits.
    MMAP = "mmap"
    #: In the files, read in their order: only two windows of rows are in host memory.
    STREAM = "stream"

    def memory(self, device: torch.device) -> torch.device | None:
        """The device whose memory shards of a data device take; None where they take none."""
        return {Residency.DEVICE: device, Residency.HOST: _CPU}.get(self)


_CPU = torch.device("cpu")
_RESIDENCIES = ("auto", *(residency.value for residency in Residency))


def divided(split: str, rows: Rows, num_shards: int, topology: DataTopology) -> Pool:
    """Divide the rows of a split into as many shards, or the next more that a topology divides."""
    num_rows, total = rows.num_rows, topology.num_data_devices
    if num_rows < total:
        raise PlacementError(
            f"the {split} split has {num_rows} rows for {total} data devices, so that some would"
            f" have none: use at most {num_rows} data devices"
        )
    return Pool.of(rows, striping(num_shards, total))


@dataclass(frozen=True)
class SplitSize:
    """A split, divided into shards for a topology, and its size."""

    order: Sampler
    shard_bytes: tuple[int, ...]
    window_bytes: int = 0

    @classmethod
    def of(
        cls, order: Sampler, store: Manifest, topology: DataTopology, window_bytes: int = 0
    ) -> "SplitSize":
        """The size of a split in an order whose pool was divided for a topology."""
        shard_bytes = store.shard_bytes(order.pool, topology.num_data_devices)
        return cls(order, tuple(shard_bytes.tolist()), window_bytes)

    @property
    def pool(self) -> Pool:
        """The rows of each shard."""
        return self.order.pool


@dataclass(frozen=True)
class SplitPlacement:
    """Where the shards of one split live."""

    size: SplitSize
    residency: tuple[Residency | None, ...]

    @property
    def pool(self) -> Pool:
        """The rows of each shard of the split."""
        return self.size.pool

    @property
    def window(self) -> int | None:
        """Rows of a shard in a window; None where the split is not read window by window."""
        return self.size.order.shuffle_window if Residency.STREAM in self.residency else None

    def held(self, topology: DataTopology, split: str = "") -> Iterator["HeldShards"]:
        """What this process holds of the split, by data device and residency."""
        found = defaultdict[tuple[int, Residency], list[int]](list)
        for shard, residency in enumerate(self.residency):
            owner = topology.owner(shard)
            if residency is not None and owner is not None:
                found[owner, residency].append(shard)
        sizes, num_bytes = self.pool.sizes, np.array(self.size.shard_bytes)
        for (index, residency), held in found.items():
            rows, size = int(sizes[held].sum()), int(num_bytes[held].sum())
            device = topology.data_devices[index]
            yield HeldShards(index, device, split, residency, tuple(held), rows, size)


@dataclass(frozen=True)
class HeldShards:
    """The shards of one split that one data device holds with one residency."""

    device_index: int
    device: torch.device
    split: str
    residency: Residency
    shards: tuple[int, ...]
    num_rows: int
    num_bytes: int

    @property
    def device_name(self) -> str:
        """The data device for people, such as ``1: cuda:1``."""
        return f"{self.device_index}: {self.device}"


@dataclass(frozen=True)
class Placement:
    """The plan: for every split, where each shard of this process lives."""

    topology: DataTopology
    splits: Mapping[str, SplitPlacement]
    budget_bytes: Mapping[torch.device, int] = field(default_factory=dict)

    def held(self) -> list[HeldShards]:
        """What this process holds, by data device, then by split and residency."""
        found = [each.held(self.topology, name) for name, each in self.splits.items()]
        return sorted(chain.from_iterable(found), key=lambda held: held.device_index)


def check_residency(residency: str) -> None:
    """Check the residency that a user asks for."""
    if not isinstance(residency, str) or residency not in _RESIDENCIES:
        raise ValueError(f"residency={residency!r}: choose one of {', '.join(_RESIDENCIES)}")


def plan_placement(
    splits: Mapping[str, SplitSize],
    topology: DataTopology,
    residency: str = "auto",
    *,
    budget_bytes: Mapping[torch.device, int],
) -> Placement:
    """Decide what lives where. Nothing is allocated."""
    # ``auto`` fills the data devices first and falls back shard by shard, to the memory of the host
    # and then to the file mapping. For a CPU it is the file mapping: that is host memory already.
    used: dict[torch.device, int] = defaultdict(int)

    def choose(shard: int, size: int) -> Residency | None:
        if (owner := topology.owner(shard)) is None:
            return None
        device = topology.data_devices[owner]
        choices = [Residency.DEVICE, Residency.HOST, Residency.MMAP]
        if residency != "auto" or device == _CPU:
            choices = [Residency(residency) if residency != "auto" else Residency.MMAP]
        for choice in choices:
            memory = choice.memory(device)
            if memory is None or used[memory] + size <= budget_bytes[memory]:
                break
        if memory is not None:
            used[memory] += size
        return choice

    placed = {
        name: SplitPlacement(
            split, tuple(map(choose, range(split.pool.num_shards), split.shard_bytes))
        )
        for name, split in splits.items()
    }
    if residency == Residency.STREAM.value:
        _check_windows(placed, budget_bytes[_CPU])
    for device, needed in used.items():
        if needed > budget_bytes[device]:
            others = (
                "residency='mmap', which leaves them in the files"
                if device == _CPU
                else "residency='auto', which leaves the rest on the host"
            )
            may_be = _exactly(budget_bytes[device])
            raise PlacementError(
                f"residency={residency!r}: the shards of {device} need {_exactly(needed)}, and"
                f" {may_be} may be used there. Use more data devices, a larger memory_fraction,"
                f" smaller dtypes, or {others}"
            )
    return Placement(topology, placed, dict(budget_bytes))


def _check_windows(splits: Mapping[str, SplitPlacement], budget_bytes: int) -> None:
    """Check that two windows of each split fit into memory together."""
    placed = [split.size for split in splits.values()]
    needed = sum(2 * size.window_bytes for size in placed)
    if needed <= budget_bytes:
        return
    # Of one row of each shard, in a window as large as any.
    per_row = [size.window_bytes / Blocks(size.order).longest for size in placed]
    most = int(budget_bytes / max(1, 2 * sum(per_row)))
    windows = ", ".join(f"{split.window} rows ({name})" for name, split in splits.items())
    remedy = f"Use shuffle_window={most} or less" if most else "Not even windows of one row fit"
    raise PlacementError(
        f"residency='stream': two windows of each split, of {windows} of each of the shards of this"
        f" process, need {_exactly(needed)} of host memory, and {_exactly(budget_bytes)} may be"
        f" used. {remedy}: fewer shards or a larger memory_fraction help too"
    )


def _exactly(num_bytes: int) -> str:
    return f"{num_bytes} bytes ({format_bytes(num_bytes)})"


def placement_table(placement: Placement) -> Table:
    """A table with a row for each data device, split and residency of this process."""
    table = Table(title="Placement of shards", title_justify="left")
    for name in ("data device", "split", "residency"):
        table.add_column(name)
    is_streamed = any(split.window is not None for split in placement.splits.values())
    for name in ["shards", "rows", "bytes", "budget", *["in host memory"] * is_streamed]:
        table.add_column(name, justify="right")
    for held in placement.held():
        memory, split = held.residency.memory(held.device), placement.splits[held.split]
        cells = [
            held.device_name,
            held.split,
            held.residency.value,
            str(len(held.shards)),
            f"{held.num_rows:,}",
            format_bytes(held.num_bytes),
            "-" if memory is None else format_bytes(placement.budget_bytes[memory]),
        ]
        if split.window is not None:
            num_held = len(split.residency) - split.residency.count(None)
            num_bytes = 2 * split.size.window_bytes * len(held.shards) // num_held
            cells.append(f"2 x {split.window:,} rows a shard, {format_bytes(num_bytes)}")
        table.add_row(*cells)
    return table
