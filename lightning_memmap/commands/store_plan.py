"""``lightning-memmap store plan``: which device would hold what, as a table."""

from collections.abc import Mapping

import torch

from lightning_memmap.placement.plan import Residency, SplitSize, divided, plan_placement
from lightning_memmap.placement.topology import DataTopology, check_memory_fraction
from lightning_memmap.sampling.rows import StoreRows
from lightning_memmap.sampling.sampler import SequentialSampler
from lightning_memmap.sizes import format_bytes, parse_bytes
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.tables import GOOD, UNSURE, TitledTable, make_table, text


def plan_devices(
    stores: Mapping[str, Manifest], devices: str, memory: str, memory_fraction: float
) -> TitledTable:
    """Plan for data that is held by devices, and by the host what they have no room for."""
    counts = _counts(devices)
    check_memory_fraction(memory_fraction)
    total = sum(manifest.num_bytes for manifest in stores.values())
    try:
        device_bytes = parse_bytes(memory)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"memory={memory!r:.50}: {error}") from error
    budget = int(device_bytes * memory_fraction)
    rows = []
    for count in counts:
        if short := [name for name, found in stores.items() if found.num_rows < count]:
            why = text(f"{short[0]} has {stores[short[0]].num_rows}", UNSURE)
            rows.append([text(count), *map(text, "---"), text("no", UNSURE), why])
            continue
        held = _held_bytes(stores, count, budget)
        sizes = map(format_bytes, (sum(held), total - sum(held), max(held)))
        fits = text("yes", GOOD) if sum(held) == total else text("no", UNSURE)
        is_restriped = any(manifest.num_shards % count for manifest in stores.values())
        order = text("re-striped", UNSURE) if is_restriped else text("as stored")
        rows.append([text(count), *map(text, sizes), fits, order])
    title = (
        f"{format_bytes(total)} of {', '.join(stores)} on devices of"
        f" {format_bytes(device_bytes)}, {format_bytes(budget)} of each for shards"
    )
    labels = ("devices", "on devices", "in host memory", "fullest device", "fits", "rows")
    return TitledTable(title, make_table(labels, rows))


def _held_bytes(stores: Mapping[str, Manifest], count: int, budget: int) -> list[int]:
    """Bytes of shards on each of ``count`` devices with ``residency="auto"``."""
    topology = DataTopology(tuple(torch.device("cuda", index) for index in range(count)))
    sizes = {}
    for name, found in stores.items():
        pool = divided(name, StoreRows(found.shards), found.num_shards, topology)
        sizes[name] = SplitSize.of(SequentialSampler(pool), found, topology)
    budgets = dict.fromkeys((*topology.data_devices, torch.device("cpu")), budget)
    held = [0] * count
    for shards in plan_placement(sizes, topology, "auto", budget_bytes=budgets).held():
        if shards.residency is Residency.DEVICE:
            held[shards.device_index] += shards.num_bytes
    return held


def _counts(text: str) -> range:
    first, _, last = text.partition("..")
    try:
        counts = range(int(first), int(last or first) + 1)
    except ValueError:
        raise ValueError(f"devices={text!r}: write a count or a range, like 4 or 1..8") from None
    if not counts or counts[0] < 1:
        raise ValueError(f"devices={text!r}: counts start at 1, and the range must not be empty")
    return counts
