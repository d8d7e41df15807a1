"""Plan where each shard is kept, and reject what does not fit before anything is allocated."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain

import torch
from rich.table import Table

from lightning_memmap.errors import PlacementError
from lightning_memmap.placement.shard_sizes import compute_shard_bytes
from lightning_memmap.placement.topology import DataTopology
from lightning_memmap.sampling.pool import Pool
from lightning_memmap.sampling.rows import Rows, round_up_shards
from lightning_memmap.sampling.sampler import Sampler
from lightning_memmap.sampling.schedule import Blocks
from lightning_memmap.sizes import format_bytes
from lightning_memmap.store.manifest import Manifest


class Residency(str, Enum):
    """The memory that keeps a shard's rows while they are used."""

    #: The memory of its data device.
    DEVICE = "device"
    #: Host memory of this process, filled once by long reads.
    HOST = "host"
    #: The file mapping itself, which the host's page cache keeps as far as it fits.
    MMAP = "mmap"
    #: The files, read in their order: two blocks of rows are in host memory.
    STREAM = "stream"

    def budget_device(self, device: torch.device) -> torch.device | None:
        """Return the device whose budget the shards of a data device are charged to, or None."""
        return {Residency.DEVICE: device, Residency.HOST: _CPU}.get(self)


_CPU = torch.device("cpu")
_RESIDENCIES = ("auto", *(residency.value for residency in Residency))


def make_pool(split: str, rows: Rows, num_shards: int, topology: DataTopology) -> Pool:
    """Divide rows into shards: ``num_shards``, rounded up to a multiple of the data devices."""
    num_rows = rows.num_rows
    num_devices = topology.num_global_data_devices
    if num_rows < num_devices:
        raise PlacementError(
            f"the {split} split has {num_rows} rows, fewer than the {num_devices} data devices: use"
            f" at most {num_rows} data devices"
        )
    return Pool.of(rows, round_up_shards(num_shards, num_devices))


@dataclass(frozen=True)
class SplitShards:
    """The shards of a split: their rows and order, their sizes, and where each is kept.

    Args:
        order: The order of the rows, whose pool is divided for the topology.
        shard_bytes: Bytes of each shard, of length C.
        block_bytes: Bytes of the largest block of this process's shards, if they are streamed.
        residencies: The residency of each shard, of length C; None for shards of other processes.
            Empty until it is planned.
    """

    order: Sampler
    shard_bytes: tuple[int, ...]
    block_bytes: int = 0
    residencies: tuple[Residency | None, ...] = ()

    @classmethod
    def of(
        cls, order: Sampler, manifest: Manifest, topology: DataTopology, block_bytes: int = 0
    ) -> "SplitShards":
        """Compute the bytes of the shards of a split. Their residency is still to be planned."""
        shard_bytes = compute_shard_bytes(manifest, order.pool, topology.num_global_data_devices)
        return cls(order, tuple(shard_bytes.tolist()), block_bytes)

    @property
    def pool(self) -> Pool:
        """The rows of each shard."""
        return self.order.pool

    @property
    def is_streamed(self) -> bool:
        """Whether rows are read block by block."""
        return Residency.STREAM in self.residencies

    def group_by_device(self, topology: DataTopology, split: str = "") -> Iterator["HeldShards"]:
        """Yield the shards that this process holds, by data device and residency."""
        groups = defaultdict[tuple[int, Residency], list[int]](list)
        for shard, residency in enumerate(self.residencies):
            owner = topology.owner(shard)
            if residency is not None and owner is not None:
                groups[owner, residency].append(shard)
        for (index, residency), shards in groups.items():
            yield HeldShards(
                index,
                topology.data_devices[index],
                split,
                residency,
                tuple(shards),
                num_rows=int(self.pool.sizes[shards].sum()),
                num_bytes=sum(self.shard_bytes[shard] for shard in shards),
            )


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


@dataclass(frozen=True)
class Placement:
    """The plan: for every split, where each shard of this process is kept."""

    topology: DataTopology
    splits: Mapping[str, SplitShards]
    budget_bytes: Mapping[torch.device, int] = field(default_factory=dict)

    def held_shards(self) -> list[HeldShards]:
        """Return the shards that this process holds, by data device, split and residency."""
        groups = (s.group_by_device(self.topology, name) for name, s in self.splits.items())
        return sorted(chain.from_iterable(groups), key=lambda held: held.device_index)


def check_residency(residency: str) -> None:
    """Check the residency that a user asks for."""
    if not isinstance(residency, str) or residency not in _RESIDENCIES:
        raise ValueError(f"residency={residency!r}: choose one of {', '.join(_RESIDENCIES)}")


def plan_placement(
    splits: Mapping[str, SplitShards],
    topology: DataTopology,
    residency: str = "auto",
    *,
    budget_bytes: Mapping[torch.device, int],
) -> Placement:
    """Decide where each shard is kept. Nothing is allocated.

    ``auto`` fills the memory of the data devices, then the memory of the host, and leaves the rest
    in the file mapping. For a CPU it is the file mapping, which is host memory already.

    Raises:
        PlacementError: A residency other than ``auto`` doesn't fit into a budget.
    """
    free_bytes = dict(budget_bytes)
    placed = dict[str, SplitShards]()
    for name, shards in splits.items():
        residencies = _choose_residencies(shards, topology, residency, free_bytes)
        placed[name] = replace(shards, residencies=residencies)
    if residency == Residency.STREAM.value:
        _check_blocks(placed, budget_bytes[_CPU])
    for device, free in free_bytes.items():
        if free < 0:
            alternative = (
                "residency='mmap', which leaves them in the files"
                if device == _CPU
                else "residency='auto', which leaves the rest on the host"
            )
            raise PlacementError(
                f"residency={residency!r}: the shards of {device} need"
                f" {_in_bytes(budget_bytes[device] - free)}, more than the"
                f" {_in_bytes(budget_bytes[device])} that may be used there. Use more data devices,"
                f" a larger memory_fraction, smaller dtypes, or {alternative}"
            )
    return Placement(topology, placed, dict(budget_bytes))


def _choose_residencies(
    shards: SplitShards,
    topology: DataTopology,
    residency: str,
    free_bytes: dict[torch.device, int],
) -> tuple[Residency | None, ...]:
    """Choose the residency of each shard of a split, and subtract it from the free bytes."""
    residencies = list[Residency | None]()
    for shard, num_bytes in enumerate(shards.shard_bytes):
        owner = topology.owner(shard)
        if owner is None:
            residencies.append(None)
            continue
        device = topology.data_devices[owner]
        if residency != "auto":
            choices = [Residency(residency)]
        elif device == _CPU:
            choices = [Residency.MMAP]
        else:
            choices = [Residency.DEVICE, Residency.HOST, Residency.MMAP]
        for choice in choices:
            budget_device = choice.budget_device(device)
            if budget_device is None or num_bytes <= free_bytes[budget_device]:
                break
        if budget_device is not None:
            free_bytes[budget_device] -= num_bytes
        residencies.append(choice)
    return tuple(residencies)


def _check_blocks(splits: Mapping[str, SplitShards], budget_bytes: int) -> None:
    """Check that two blocks of each split fit into host memory together."""
    needed = sum(2 * shards.block_bytes for shards in splits.values())
    if needed <= budget_bytes:
        return
    # Bytes of one row of each shard in the largest block.
    row_bytes = [
        shards.block_bytes / Blocks(shards.order).max_rows_per_shard for shards in splits.values()
    ]
    max_rows = int(budget_bytes / max(1, 2 * sum(row_bytes)))
    blocks = ", ".join(
        f"{Blocks(shards.order).max_rows_per_shard} rows ({name})"
        for name, shards in splits.items()
    )
    remedy = f"Use shuffle_block={max_rows} or less" if max_rows else "Not even one row fits"
    raise PlacementError(
        f"residency='stream': two blocks of each split, with {blocks} of each of this process's"
        f" shards, need {_in_bytes(needed)} of host memory, more than the {_in_bytes(budget_bytes)}"
        f" that may be used. {remedy}. Fewer shards or a larger memory_fraction help too"
    )


def _in_bytes(num_bytes: int) -> str:
    return f"{num_bytes} bytes ({format_bytes(num_bytes)})"


def placement_table(placement: Placement) -> Table:
    """Make a table with a row for each data device, split and residency of this process."""
    table = Table(title="Placement of shards", title_justify="left")
    for name in ("data device", "split", "residency"):
        table.add_column(name)
    is_streamed = any(shards.is_streamed for shards in placement.splits.values())
    for name in ["shards", "rows", "bytes", "budget", *["in host memory"] * is_streamed]:
        table.add_column(name, justify="right")
    for held in placement.held_shards():
        budget_device = held.residency.budget_device(held.device)
        split = placement.splits[held.split]
        cells = [
            f"{held.device_index}: {held.device}",
            held.split,
            held.residency.value,
            str(len(held.shards)),
            f"{held.num_rows:,}",
            format_bytes(held.num_bytes),
            "-" if budget_device is None else format_bytes(placement.budget_bytes[budget_device]),
        ]
        if split.is_streamed:
            num_held = len(split.residencies) - split.residencies.count(None)
            num_bytes = 2 * split.block_bytes * len(held.shards) // num_held
            block = Blocks(split.order).max_rows_per_shard
            cells.append(f"2 x {block:,} rows a shard, {format_bytes(num_bytes)}")
        table.add_row(*cells)
    return table
