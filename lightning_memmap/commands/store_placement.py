"""Tables of the bytes that devices, host and disk hold, for `store_plan`."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from rich.text import Text

from lightning_memmap.commands.store_rates import Trial
from lightning_memmap.placement.plan import Residency, SplitShards, make_pool, plan_placement
from lightning_memmap.placement.topology import DataTopology, check_memory_fraction
from lightning_memmap.sampling.rows import StoreRows, default_shards
from lightning_memmap.sampling.sampler import SequentialSampler
from lightning_memmap.schema.fields import Field
from lightning_memmap.schema.schema import Schema
from lightning_memmap.schema.structure import leaf_node
from lightning_memmap.sizes import format_bytes, format_duration, parse_bytes
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.tables import GOOD, UNSURE, TitledTable, make_table, text


@dataclass(frozen=True)
class Machine:
    """The memory for shards of each device, and of the host."""

    device_bytes: int
    host_bytes: int
    memory_fraction: float

    @classmethod
    def of(cls, memory: str, host_memory: str | int, memory_fraction: float) -> "Machine":
        """Read sizes such as ``80GiB``."""
        check_memory_fraction(memory_fraction)
        host = host_memory if isinstance(host_memory, int) else _bytes("host_memory", host_memory)
        return cls(_bytes("memory", memory), host, memory_fraction)

    @property
    def device_budget(self) -> int:
        """Bytes for shards on each device."""
        return int(self.device_bytes * self.memory_fraction)

    @property
    def host_budget(self) -> int:
        """Bytes for shards in the memory of the host."""
        return int(self.host_bytes * self.memory_fraction)


def _bytes(name: str, size: str) -> int:
    try:
        return parse_bytes(size)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name}={size!r:.50}: {error}") from error


@dataclass(frozen=True)
class MemoryUse:
    """The bytes in each memory for a number of devices."""

    on_devices: int
    in_host_memory: int
    on_disk: int
    fullest_device: int

    @property
    def residency(self) -> str:
        """The value of ``residency`` to use."""
        if self.on_disk:
            return "stream"
        return "auto" if self.in_host_memory else "device"


def make_planned_manifest(row_bytes: int, num_rows: int) -> Manifest:
    """Make the manifest of a store that isn't built yet."""
    schema = Schema(leaf_node(Field("value", torch.uint8, (row_bytes,))))
    return Manifest.draft(num_rows, default_shards(num_rows), schema)


def plan_devices(stores: Mapping[str, Manifest], counts: range, machine: Machine) -> TitledTable:
    """Make a table of the bytes that devices, host and disk hold.

    Args:
        stores: Manifests by name.
        counts: Counts of devices, ascending.
        machine: The available memory.
    """
    total = sum(manifest.num_bytes for manifest in stores.values())
    rows = []
    plans: dict[int, MemoryUse] = {}
    for count in counts:
        if small := [name for name, manifest in stores.items() if manifest.num_rows < count]:
            reason = text(f"{small[0]} has {stores[small[0]].num_rows}", UNSURE)
            rows.append([count, *"----", text("none", UNSURE), reason])
            continue
        plans[count] = use = plan_memory(stores, count, machine)
        sizes = (use.on_devices, use.in_host_memory, use.on_disk, use.fullest_device)
        residency = text(use.residency, GOOD if use.residency == "device" else UNSURE)
        is_restriped = any(manifest.num_shards % count for manifest in stores.values())
        order = text("re-striped", UNSURE) if is_restriped else text("as stored")
        rows.append([count, *map(format_bytes, sizes), residency, order])
    title = (
        f"{format_bytes(total)} of {', '.join(stores)} on devices of"
        f" {format_bytes(machine.device_bytes)}, {format_bytes(machine.device_budget)} of each for"
        f" shards, and {format_bytes(machine.host_budget)} of the host"
    )
    labels = (
        "devices", "on devices", "in host memory", "on disk", "fullest device", "residency",
        "rows",
    )  # fmt: skip
    return TitledTable(title, make_table(labels, rows), _notes(plans, total, machine))


def _notes(plans: Mapping[int, MemoryUse], total: int, machine: Machine) -> list[Text]:
    notes = []
    least = next((count for count, use in plans.items() if use.residency == "device"), None)
    if least is not None:
        notes.append(text(f"{least} or more devices hold all rows.", GOOD))
    elif plans:
        notes.append(text(f"{max(plans)} devices don't hold all rows.", UNSURE))
    if any(use.residency == "stream" for use in plans.values()):
        notes.append(
            text(
                f"stream: devices and host together are too small, so an epoch reads all"
                f" {format_bytes(total)} from disk. Blocks of rows, up to"
                f" {format_bytes(machine.host_budget)}, are in host memory; shuffling is in blocks."
            )
        )
    return notes


def describe_texts(num_bytes: int) -> list[Text]:
    """Describe the bytes that are in host memory with every residency."""
    if not num_bytes:
        return []
    size = format_bytes(num_bytes)
    return [text(f"{size} are texts or encoded images: they stay in host memory.", UNSURE)]


def describe_build(trial: Trial) -> list[Text]:
    """Describe how long a build takes, and the trial."""
    is_written_only = trial.how == "from memory"
    words = "Writing the store takes" if is_written_only else "Building the store takes"
    notes = [text(f"{words} about {format_duration(trial.build_s)}: {trial}.")]
    if is_written_only:
        notes.append(
            text("Reading and decoding the dataset isn't part of it: --dataset measures that.")
        )
    return notes


def plan_memory(stores: Mapping[str, Manifest], count: int, machine: Machine) -> MemoryUse:
    """Plan ``residency="auto"`` for a number of devices: the bytes in each memory.

    If the host is too small for the rest, all shards stay in the files: they are streamed.
    """
    topology = DataTopology(tuple(torch.device("cuda", index) for index in range(count)))
    sizes = {}
    for name, manifest in stores.items():
        pool = make_pool(name, StoreRows(manifest.shards), manifest.num_shards, topology)
        sizes[name] = SplitShards.of(SequentialSampler(pool), manifest, topology)
    budgets = dict.fromkeys(topology.data_devices, machine.device_budget)
    budgets[torch.device("cpu")] = machine.host_budget
    devices = Counter[int]()
    memories = Counter[Residency]()
    for shards in plan_placement(sizes, topology, "auto", budget_bytes=budgets).held_shards():
        memories[shards.residency] += shards.num_bytes
        if shards.residency is Residency.DEVICE:
            devices[shards.device_index] += shards.num_bytes
    if memories[Residency.MMAP]:
        return MemoryUse(0, 0, memories.total(), 0)
    return MemoryUse(
        on_devices=memories[Residency.DEVICE],
        in_host_memory=memories[Residency.HOST],
        on_disk=0,
        fullest_device=max(devices.values(), default=0),
    )


def parse_device_counts(text: str) -> range:
    """Read counts of devices, such as ``4`` or ``1..8``."""
    lowest, _, highest = text.partition("..")
    try:
        counts = range(int(lowest), int(highest or lowest) + 1)
    except ValueError:
        raise ValueError(f"devices={text!r}: write a count or a range, like 4 or 1..8") from None
    if not counts or counts[0] < 1:
        raise ValueError(f"devices={text!r}: counts start at 1, and the range must not be empty")
    return counts
