"""``lightning-memmap store info`` and ``store verify``."""

from pathlib import Path
from textwrap import shorten

import numpy as np
from rich.console import Console

from lightning_memmap.arguments import print_error
from lightning_memmap.commands.store_find import find_unfinished, open_readable_stores
from lightning_memmap.commands.store_options import print_line
from lightning_memmap.errors import MemmapError, StoreNotFoundError
from lightning_memmap.integers import ceil_div
from lightning_memmap.sizes import format_bytes
from lightning_memmap.store import Store, verify_store
from lightning_memmap.store.directory import list_unknown_files
from lightning_memmap.store.paths import path_or_url
from lightning_memmap.store.progress import show_progress
from lightning_memmap.tables import make_table, printable

#: The names of classes are cut off after this many characters.
_MAX_CLASSES_TEXT = 160


def info(path: str) -> int:
    """Print what a store holds.

    Args:
        path: Directory or URL of a store, or of one store per split.
    """
    try:
        stores = open_readable_stores(path)
    except StoreNotFoundError:
        if find_unfinished(path):
            return 0
        raise
    code = 0
    for store in stores.values():
        if isinstance(store, Exception):
            print_error(store)
            code = 2
        else:
            print_info(store, Console(markup=False))
    return code


def print_info(store: Store, console: Console) -> None:
    """Print what a store holds."""
    manifest = store.manifest
    no_bytes = np.zeros(store.num_shards, np.int64)
    shard_bytes = sum((column.shard_bytes for column in manifest.columns), no_bytes)
    console.print(printable(store.location), style="bold", soft_wrap=True)
    console.print(
        f"{store.num_rows:,} rows, {format_bytes(manifest.num_bytes)},"
        f" {store.num_shards} shards of {format_bytes(shard_bytes.min())} to"
        f" {format_bytes(shard_bytes.max())}"
    )
    if store.classes:
        names = shorten(", ".join(store.classes), _MAX_CLASSES_TEXT, placeholder=" ...")
        console.print(f"{len(store.classes)} classes: {names}", soft_wrap=True)
    source = ", ".join(f"{key} {value}" for key, value in manifest.source.items())
    console.print(printable(f"from {source}"))
    labels = ("field", "dtype", "shape", "kind", "bytes per row", "bytes", "bytes per shard")
    rows = []
    for field, column in zip(store.schema.fields, manifest.columns, strict=True):
        row_bytes = column.mean_bytes(1)
        row = (
            field.name,
            str(field.dtype).removeprefix("torch."),
            field.shape,
            field.kind,
            f"{row_bytes} on average" if field.num_variable else row_bytes,
            format_bytes(column.num_bytes),
            format_bytes(row_bytes * ceil_div(store.num_rows, store.num_shards)),
        )
        rows.append(row)
    console.print(make_table(labels, rows, labels[1:4]))


def verify(path: str) -> int:
    """Check every byte of a store.

    Args:
        path: Directory or URL of a store, or of one store per split.
    """
    is_damaged = False
    for store in open_readable_stores(path).values():
        try:
            if isinstance(store, Exception):
                raise store
            is_damaged |= _verify_store(store)
        except (MemmapError, OSError) as error:
            print_error(error)
            is_damaged = True
    return int(is_damaged)


def _verify_store(store: Store) -> bool:
    """Print the result for one store, and return whether it is damaged."""
    location = store.location
    is_local = isinstance(path_or_url(location), Path)
    with show_progress("verifying", sum(store.manifest.file_bytes.values()), 1) as advance:
        damages = verify_store(location, advance=advance)
    for damage in damages:
        print_line(damage, "red")
    if damages and not is_local:
        print_line(f"{location}: damaged files in the cache are fetched again at their next use")
    if is_local:
        for name in list_unknown_files(store.path, store.manifest):
            print_line(f"{location}: {name} is not part of the store and is never read")
    if not damages:
        print_line(f"{location}: all {store.manifest.num_checksums} checksums match")
    return bool(damages)
