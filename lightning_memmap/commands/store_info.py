"""``lightning-memmap store info``: what a store holds."""

from textwrap import shorten

from rich.console import Console
from rich.table import Table

from lightning_memmap.sizes import format_bytes
from lightning_memmap.store import Store
from lightning_memmap.tables import printable

#: The most letters of the names of classes.
_MAX_CLASSES_TEXT = 160


def print_info(store: Store, console: Console) -> None:
    """Print what a store holds."""
    manifest = store.manifest
    shard_bytes = manifest.shard_bytes()
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
    table = Table()
    for name in ("field", "dtype", "shape", "kind"):
        table.add_column(name)
    for name in ("bytes per row", "bytes", "bytes per shard"):
        table.add_column(name, justify="right")
    for field, column in zip(store.schema.fields, manifest.columns, strict=True):
        num_bytes, row_bytes = column.num_bytes, column.mean_bytes(1)
        table.add_row(
            printable(field.name),
            str(field.dtype).removeprefix("torch."),
            str(field.shape),
            str(field.kind),
            str(row_bytes) if not field.num_variable else f"{row_bytes} on average",
            format_bytes(num_bytes),
            format_bytes(row_bytes * -(-store.num_rows // store.num_shards)),
        )
    console.print(table)
