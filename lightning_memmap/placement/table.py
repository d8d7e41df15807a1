"""The plan as a table for people."""

import torch
from rich.table import Table

from lightning_memmap.placement.plan import HeldShards, Placement, Residency
from lightning_memmap.sizes import format_bytes


def placement_table(placement: Placement) -> Table:
    """A table with a row for each data device, split and residency of this process."""
    table = Table(title="Placement of shards", title_justify="left")
    for name in ("data device", "split", "residency"):
        table.add_column(name)
    names = ["shards", "rows", "bytes", "budget"]
    if any(split.window is not None for split in placement.splits.values()):
        names.append("in host memory")
    for name in names:
        table.add_column(name, justify="right")
    for held in placement.held():
        places = {Residency.DEVICE: held.device, Residency.HOST: torch.device("cpu")}
        place = places.get(held.residency)
        cells = [
            held.device_name,
            held.split,
            held.residency.value,
            str(len(held.shards)),
            f"{held.num_rows:,}",
            format_bytes(held.num_bytes),
            "-" if place is None else format_bytes(placement.budget_bytes[place]),
            _windows(placement, held),
        ]
        table.add_row(*cells[: len(table.columns)])
    return table


def _windows(placement: Placement, held: HeldShards) -> str:
    split = placement.splits[held.split]
    if split.window is None:
        return "-"
    size = format_bytes(2 * split.window_bytes(len(held.shards)))
    return f"2 x {split.window:,} rows a shard, {size}"
