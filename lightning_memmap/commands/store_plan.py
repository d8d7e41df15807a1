"""``lightning-memmap store plan``: which device would hold what, as tables."""

import warnings
from collections.abc import Mapping
from functools import partial

import torch

from lightning_memmap.loading.split import largest_window_bytes
from lightning_memmap.placement import (
    DataTopology,
    Placement,
    Residency,
    SplitSize,
    check_memory_fraction,
    plan_placement,
)
from lightning_memmap.sizes import format_bytes, parse_bytes
from lightning_memmap.store import Store
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.tables import Cell, Column, Table

#: The most devices that are tried in search of the fewest that hold the data.
_MAX_DEVICES = 4096


def plan_devices(
    stores: Mapping[str, Manifest], devices: str, memory: str, memory_fraction: float
) -> Table:
    """Plan for data that is held by devices, and by the host what they have no room for.

    Args:
        stores: Manifests of the stores by name.
        devices: Counts of devices, like 4 or 1..8.
        memory: Memory of one device, like 80GiB.
        memory_fraction: Share of it that shards may take.

    Returns:
        A row for each count; as a note, the fewest devices that hold the data.

    Raises:
        ValueError: An argument is out of range, or there are more devices than rows.
    """
    counts = _counts(devices)
    check_memory_fraction(memory_fraction)
    total = sum(manifest.num_bytes for manifest in stores.values())
    total_bytes = device_bytes(memory)
    budget = int(total_bytes * memory_fraction)
    rows = []
    for count in counts:
        held = _held_bytes(stores, count, budget)
        fits = sum(held) == total
        anew = any(manifest.num_shards % count for manifest in stores.values())
        rows.append(
            [
                Cell(str(count)),
                Cell(format_bytes(sum(held)), bar=sum(held) / max(1, total)),
                Cell(format_bytes(total - sum(held)), bar=1 - sum(held) / max(1, total)),
                Cell(format_bytes(max(held)), bar=max(held) / max(1, budget)),
                Cell("yes", "good") if fits else Cell("no", "unsure"),
                _order(anew),
            ]
        )
    fewest = _fewest_devices(stores, budget)
    note = (
        f"Even {_MAX_DEVICES} devices do not hold the data."
        if fewest is None
        else f"The fewest devices that hold the data: {fewest}"
    )
    title = (
        f"{format_bytes(total)} of {', '.join(stores)} on devices of"
        f" {format_bytes(total_bytes)}, {format_bytes(budget)} of each for shards"
    )
    labels = ("devices", "on devices", "in host memory", "fullest device", "fits", "rows")
    return Table(title, [Column(label) for label in labels], rows, [Cell(note)])


def device_bytes(memory: str) -> int:
    """Read the memory of one device, like 80GiB.

    Raises:
        ValueError: It is no size.
    """
    try:
        return parse_bytes(memory)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"memory={memory!r:.50}: {error}") from error


def plan_windows(stores: Mapping[str, Store], devices: str, window: int | None) -> Table:
    """Plan for data that is read window by window.

    Args:
        stores: The stores by name.
        devices: Counts of devices, like 4 or 1..8.
        window: Rows of a shard in a window; by default what makes 512 MiB.

    Returns:
        A row for each count and store.

    Raises:
        ValueError: An argument is out of range, or there are more devices than rows.
    """
    counts = _counts(devices)
    if window is not None and window < 1:
        raise ValueError(f"shuffle_window={window}: at least 1 row of a shard")
    total = sum(store.manifest.num_bytes for store in stores.values())
    cpu = torch.device("cpu")
    rows = []
    for count in counts:
        together = _streamed(stores, DataTopology((cpu,) * count), window)
        apart = _streamed(stores, DataTopology((cpu,), 0, count), window)
        for name, size in together.items():
            num_rows, num_shards = size.pool.num_rows, size.pool.num_shards
            mixed = min(num_rows, size.window * num_shards)
            rows.append(
                [
                    Cell(str(count)),
                    Cell(name),
                    Cell(f"{size.window:,}"),
                    Cell(f"{mixed:,}", bar=mixed / max(1, num_rows)),
                    Cell(format_bytes(2 * size.window_bytes)),
                    Cell(format_bytes(2 * apart[name].window_bytes)),
                    _order(num_shards != stores[name].num_shards),
                ]
            )
    title = (
        f"{format_bytes(total)} of {', '.join(stores)} read window by window: host memory for two"
        " windows"
    )
    labels = ("rows per shard", "rows mixed", "one process", "one of as many", "rows")
    columns = [Column("devices"), Column("store", is_text=True), *map(Column, labels)]
    return Table(title, columns, rows)


def _order(is_anew: bool) -> Cell:
    return Cell("re-striped", "unsure") if is_anew else Cell("as stored")


def _streamed(
    stores: Mapping[str, Store], topology: DataTopology, window: int | None
) -> dict[str, SplitSize]:
    """The sizes of the stores and of their windows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            name: SplitSize.of(
                name,
                store.manifest,
                topology,
                window=window,
                measure=partial(largest_window_bytes, store),
            )
            for name, store in stores.items()
        }


def _placed(stores: Mapping[str, Manifest], topology: DataTopology, budget: int) -> Placement:
    with warnings.catch_warnings():
        # Instead of a warning, the table has a column for counts that re-stripe the rows.
        warnings.simplefilter("ignore")
        sizes = {name: SplitSize.of(name, found, topology) for name, found in stores.items()}
        budgets = dict.fromkeys((*topology.data_devices, torch.device("cpu")), budget)
        return plan_placement(sizes, topology, "auto", budget_bytes=budgets)


def _held_bytes(stores: Mapping[str, Manifest], count: int, budget: int) -> list[int]:
    """Bytes of shards on each of ``count`` devices with ``residency="auto"``."""
    devices = tuple(torch.device("cuda", index) for index in range(count))
    held = [0] * count
    for shards in _placed(stores, DataTopology(devices), budget).held():
        if shards.residency is Residency.DEVICE:
            held[shards.device_index] += shards.num_bytes
    return held


def _fewest_devices(stores: Mapping[str, Manifest], budget: int) -> int | None:
    total = sum(manifest.num_bytes for manifest in stores.values())
    most = min(_MAX_DEVICES, *(manifest.num_rows for manifest in stores.values()))
    for count in range(max(1, -(-total // max(1, budget))), most + 1):
        if sum(_held_bytes(stores, count, budget)) == total:
            return count
    return None


def _counts(text: str) -> range:
    first, _, last = text.partition("..")
    try:
        counts = range(int(first), int(last or first) + 1)
    except ValueError:
        raise ValueError(f"devices={text!r}: write a count or a range, like 4 or 1..8") from None
    if not counts or counts[0] < 1:
        raise ValueError(f"devices={text!r}: counts start at 1, and the range must not be empty")
    return counts
