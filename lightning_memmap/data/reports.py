"""Reports about a set-up: the placement, slow reads, and stores that earlier runs have left."""

from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only, rank_zero_warn
from rich.console import Console

from lightning_memmap.placement.plan import Placement, Residency, placement_table
from lightning_memmap.placement.topology import measure_free_bytes
from lightning_memmap.sizes import format_bytes
from lightning_memmap.store import Store

#: The placement of each split in the table that this process has printed last.
_printed: dict[str, tuple[Any, ...]] = {}
#: The stores of omitted validation datasets that this process has named.
_named = set[str]()


def print_placement(placement: Placement) -> None:
    """Print where the shards live, unless the last table shows the same, as for another fold."""
    placed = {
        split: (
            shards.order.shuffle_block if shards.is_streamed else None,
            *shards.held(placement.topology, split),
        )
        for split, shards in placement.splits.items()
    }
    if placed.items() - _printed.items():
        rank_zero_only(Console().print)(placement_table(placement))
    _printed.update(placed)


def warn_of_slow_reads(placement: Placement, residency: str) -> bool:
    """Warn if shards in the file mapping exceed the free memory; return whether they do."""
    free = measure_free_bytes(torch.device("cpu"))
    mapped = sum(held.num_bytes for held in placement.held() if held.residency is Residency.MMAP)
    if mapped <= free:
        return False
    rank_zero_warn(
        f"residency={residency!r}: {format_bytes(mapped)} of shards are read through the file"
        f" mapping, and {format_bytes(free)} of memory are free: single rows will be read from"
        " disk, which is slow. residency='stream' reads long runs of rows and shuffles them"
        " within a block (shuffle_block)",
        stacklevel=2,
    )
    return True


def name_stored_validation(store: Store) -> None:
    """Report, once per process, that validation uses a store that an earlier run has left."""
    if store.location not in _named:
        _named.add(store.location)
        rank_zero_info(
            f"val_dataset=None: validating on the {store.num_rows:,} rows stored at"
            f" {store.location}"
        )
