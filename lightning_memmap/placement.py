"""Placement: which shard lives where. The plan is made, and refused, before anything is allocated.

The data devices of all data-parallel processes are numbered: rank ``r`` of ``R`` with ``D`` data
devices has ``r, r + R, r + 2R, ...``, ``W = R * D`` in all. Data device ``w`` owns the shards ``c``
with ``c % W == w``.
"""

import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import torch
from rich.table import Table

from lightning_memmap.errors import PlacementError
from lightning_memmap.host_memory import available_bytes
from lightning_memmap.sampling import default_window, shard_rows, striping


class Residency(str, Enum):
    """Where a shard's rows live while they are used."""

    DEVICE = "device"
    """In the memory of its data device."""
    PINNED = "pinned"
    """In page-locked host memory, from which a GPU copies fast and asynchronously."""
    MMAP = "mmap"
    """In the file mapping itself: in the host's page cache as far as it fits."""
    STREAM = "stream"
    """In the files, read in their order: only two windows of rows are in host memory."""


RESIDENCIES = ("auto", *(residency.value for residency in Residency))


class Sized(Protocol):
    """What a plan needs to know of a store."""

    @property
    def num_rows(self) -> int:
        """Rows of the store."""

    @property
    def num_shards(self) -> int:
        """Shards that the store was written with."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all fields."""


@dataclass(frozen=True)
class DataTopology:
    """The data devices of this process, and its place among the data-parallel processes.

    Args:
        data_devices: Devices that hold shards and take batches. One device may be named more
            than once: these are logical data devices.
        rank: Data-parallel rank of this process.
        size: Data-parallel processes.
    """

    data_devices: tuple[torch.device, ...]
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not self.data_devices:
            raise ValueError("data_devices=(): at least one device must hold the data")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank={self.rank}: outside the {self.size} processes")

    @property
    def num_data_devices(self) -> int:
        """Data devices of all processes, ``W``."""
        return self.size * len(self.data_devices)

    def owner(self, shard: int) -> int | None:
        """The index of the data device that owns a shard; None where another process does."""
        if shard % self.size != self.rank:
            return None
        return shard // self.size % len(self.data_devices)


@dataclass(frozen=True)
class SplitPlacement:
    """Where the shards of one split live.

    Args:
        split: Name of the split.
        num_rows: Rows of the split.
        num_shards: Shards of the stream, a multiple of the number of data devices.
        row_bytes: Bytes of one row over all fields.
        residency: One entry per shard; None for a shard of another process.
        window: Rows of a shard in a window, where the split is read window by window.
    """

    split: str
    num_rows: int
    num_shards: int
    row_bytes: int
    residency: tuple[Residency | None, ...]
    window: int | None = None

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the shards of this process that stay in the file mapping."""
        rows = shard_rows(self.num_rows, self.num_shards)
        held = [residency is Residency.MMAP for residency in self.residency]
        return int(rows[held].sum()) * self.row_bytes

    def window_bytes(self, num_shards: int) -> int:
        """Host memory for a window of so many shards."""
        longest = -(-self.num_rows // self.num_shards)
        return num_shards * min(self.window or 0, longest) * self.row_bytes


@dataclass(frozen=True)
class Placement:
    """The plan: for every split, where each shard of this process lives.

    Args:
        topology: The data devices and this process's place.
        splits: By name.
        budget_bytes: By device, the bytes that shards may take there.
    """

    topology: DataTopology
    splits: Mapping[str, SplitPlacement]
    budget_bytes: Mapping[torch.device, int] = field(default_factory=dict)

    def table(self) -> Table:
        """The plan as a table: a row for each data device, split and residency."""
        table = Table(title="Placement of shards", title_justify="left")
        for name in ("data device", "split", "residency"):
            table.add_column(name)
        names = ["shards", "rows", "bytes", "budget"]
        is_streamed = any(split.window is not None for split in self.splits.values())
        for name in (*names, "in host memory") if is_streamed else names:
            table.add_column(name, justify="right")
        for index, device in enumerate(self.topology.data_devices):
            for split in self.splits.values():
                groups: dict[Residency, list[int]] = defaultdict(list)
                for shard, residency in enumerate(split.residency):
                    if residency is not None and self.topology.owner(shard) == index:
                        groups[residency].append(shard)
                rows = shard_rows(split.num_rows, split.num_shards)
                for residency, shards in groups.items():
                    num_rows = int(rows[shards].sum())
                    budget = self.budget_bytes[device] if residency is Residency.DEVICE else None
                    table.add_row(
                        f"{index}: {device}",
                        split.split,
                        residency.value,
                        str(len(shards)),
                        f"{num_rows:,}",
                        format_bytes(num_rows * split.row_bytes),
                        format_bytes(budget) if budget is not None else "-",
                        *([_windows_text(split, len(shards))] if is_streamed else []),
                    )
        return table


def plan_placement(
    stores: Mapping[str, Sized],
    topology: DataTopology,
    residency: str = "auto",
    *,
    budget_bytes: Mapping[torch.device, int],
    pinned_budget_bytes: int,
    window: int | None = None,
    window_budget_bytes: int | None = None,
) -> Placement:
    """Decide what lives where.

    ``auto`` fills the data devices first and falls back shard by shard, to pinned host memory
    and then to the file mapping. For a CPU it is the file mapping: that is host memory already,
    and shared by all processes.

    Args:
        stores: The stores by split, the most important first.
        topology: The data devices and this process's place.
        residency: ``auto``, ``device``, ``pinned``, ``mmap`` or ``stream``.
        budget_bytes: By device, the bytes that shards may take there.
        pinned_budget_bytes: Bytes that may be page-locked on this host.
        window: For ``stream``, rows of a shard in a window; by default, what
            `lightning_memmap.sampling.default_window` says of each store.
        window_budget_bytes: For ``stream``, bytes of host memory that all windows of this process
            may take; None for as many as they need.

    Raises:
        ValueError: An unknown residency.
        PlacementError: The data does not fit, or a split has fewer rows than there are
            data devices. The message gives both numbers and the ways out.
    """
    if residency not in RESIDENCIES:
        raise ValueError(f"residency={residency!r}: choose one of {', '.join(RESIDENCIES)}")
    used: dict[torch.device, int] = defaultdict(int)
    pinned = 0
    splits = {}
    for name, store in stores.items():
        num_shards = _stream_shards(name, store, topology)
        sizes = (shard_rows(store.num_rows, num_shards) * store.row_bytes).tolist()
        chosen: list[Residency | None] = []
        for shard, size in enumerate(sizes):
            owner = topology.owner(shard)
            if owner is None:
                chosen.append(None)
                continue
            device = topology.data_devices[owner]
            choice = _choose(
                residency,
                device,
                fits_device=used[device] + size <= budget_bytes[device],
                fits_pinned=pinned + size <= pinned_budget_bytes,
            )
            used[device] += size * (choice is Residency.DEVICE)
            pinned += size * (choice is Residency.PINNED)
            chosen.append(choice)
        rows = window or default_window(num_shards, store.row_bytes)
        splits[name] = SplitPlacement(
            name,
            store.num_rows,
            num_shards,
            store.row_bytes,
            tuple(chosen),
            rows if residency == Residency.STREAM.value else None,
        )
    _check_windows(splits.values(), window_budget_bytes)
    for device, needed in used.items():
        if needed > budget_bytes[device]:
            raise PlacementError(
                f"residency='device': the shards of {device} need {needed} bytes"
                f" ({format_bytes(needed)}), and {budget_bytes[device]} bytes"
                f" ({format_bytes(budget_bytes[device])}) may be used there. Use more data"
                " devices, a larger memory_fraction, smaller dtypes, or residency='auto', which"
                " leaves the rest in host memory"
            )
    if pinned > pinned_budget_bytes:
        raise PlacementError(
            f"residency='pinned': the shards need {pinned} bytes ({format_bytes(pinned)}) of"
            f" page-locked memory, and {pinned_budget_bytes} bytes"
            f" ({format_bytes(pinned_budget_bytes)}) may be used. Use residency='auto' or 'mmap'"
        )
    return Placement(topology, splits, dict(budget_bytes))


def _check_windows(splits: Iterable[SplitPlacement], budget_bytes: int | None) -> None:
    """Check that two windows of each split fit into memory together.

    Raises:
        PlacementError: They do not.
    """
    held = {split: len(split.residency) - split.residency.count(None) for split in splits}
    needed = sum(2 * split.window_bytes(num_shards) for split, num_shards in held.items())
    if budget_bytes is None or needed <= budget_bytes:
        return
    row_bytes = sum(2 * num_shards * split.row_bytes for split, num_shards in held.items())
    most = budget_bytes // row_bytes
    windows = ", ".join(f"{split.window} rows ({split.split})" for split in held)
    raise PlacementError(
        f"residency='stream': two windows of each split, of {windows} of each of the shards of this"
        f" process, need {needed} bytes ({format_bytes(needed)}) of host memory, and {budget_bytes}"
        f" bytes ({format_bytes(budget_bytes)}) may be used. "
        + (
            f"Use shuffle_window={most} or less, or a larger memory_fraction"
            if most
            else "Not even windows of one row fit: use fewer shards, or a larger memory_fraction"
        )
    )


def _windows_text(split: SplitPlacement, num_shards: int) -> str:
    if split.window is None:
        return "-"
    return f"2 x {split.window:,} rows a shard, {format_bytes(2 * split.window_bytes(num_shards))}"


def _choose(
    residency: str, device: torch.device, *, fits_device: bool, fits_pinned: bool
) -> Residency:
    if residency != "auto":
        if residency == "pinned" and device.type != "cuda":
            raise PlacementError(
                f"residency='pinned': page-locked memory serves CUDA devices, and the data device"
                f" is {device}. Use residency='auto'"
            )
        return Residency(residency)
    if device.type == "cpu":
        return Residency.MMAP
    if fits_device:
        return Residency.DEVICE
    return Residency.PINNED if fits_pinned and device.type == "cuda" else Residency.MMAP


def _stream_shards(split: str, store: Sized, topology: DataTopology) -> int:
    total = topology.num_data_devices
    if store.num_rows < total:
        raise PlacementError(
            f"the {split} split has {store.num_rows} rows for {total} data devices, so that some"
            f" would have none: use at most {store.num_rows} data devices"
        )
    num_shards = striping(store.num_shards, total)
    if num_shards != store.num_shards:
        warnings.warn(
            f"the {split} store has {store.num_shards} shards, which {total} data devices do not"
            f" divide: its rows are dealt anew to {num_shards}, and the row order differs from"
            f" that of other device counts. Build it with num_shards={num_shards} to avoid this",
            stacklevel=2,
        )
    return num_shards


def device_budgets(devices: Sequence[torch.device], fraction: float) -> dict[torch.device, int]:
    """The bytes that shards may take on each device: a share of what is free now.

    Raises:
        ValueError: ``fraction`` is not in (0, 1], or a device does not exist.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"memory_fraction={fraction}: choose more than 0 and at most 1")
    return {device: int(free_bytes(device) * fraction) for device in devices}


def free_bytes(device: torch.device) -> int:
    """Memory of a device that is free now, in bytes.

    Raises:
        ValueError: The device does not exist here.
    """
    if device.type == "cpu":
        return available_bytes()
    if device.type == "cuda":
        check_device(device)
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps" and torch.backends.mps.is_available():
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    raise ValueError(f"data device {device}: its free memory is not known; use CPU, CUDA or MPS")


def check_device(device: torch.device) -> None:
    """Check that a device exists on this machine.

    Raises:
        ValueError: It does not; the message says which devices do.
    """
    if device.type == "cpu":
        return
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "mps" and torch.backends.mps.is_available():
        count = 1
    if (device.index or 0) >= count:
        found = ", ".join(["cpu", *(f"{device.type}:{index}" for index in range(count))])
        raise ValueError(f"device {device} does not exist here; there are: {found}")


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}i": 2 ** (10 * power) for power, unit in enumerate("KMGT", 1)}


def parse_bytes(text: str) -> int:
    """A number of bytes from a text such as ``80GiB``, ``1.5 TB`` or ``4096``.

    Raises:
        ValueError: The text is not a number with a known unit.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?i?)B?\s*", text)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a size: write it like 80GiB, 1.5TB or 4096")
    return int(float(match[1]) * _UNITS[match[2]])


def format_bytes(count: int) -> str:
    """Bytes for people, in binary units."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
