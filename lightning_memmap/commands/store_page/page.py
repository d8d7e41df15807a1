"""The page: one HTML file that needs nothing else: no script, no font, no network."""

from collections.abc import Mapping
from typing import Any

from lightning_memmap.commands.store_page.distributions import Bar, distributions
from lightning_memmap.commands.store_page.samples import samples
from lightning_memmap.pages import templates
from lightning_memmap.sizes import format_bytes
from lightning_memmap.store import Store

#: More shards than these are summed up in groups.
_MAX_SHARDS = 48


def render_stores(stores: Mapping[str, Store]) -> str:
    """Make the page. Needs jinja2 and Pillow.

    Args:
        stores: The stores by name, such as the splits of a data module.

    Returns:
        The HTML document. Names and values of a store may be untrusted: they are shown as
        text, whatever they look like.
    """
    found = [_describe(name, store) for name, store in stores.items()]
    return templates(__package__).get_template("stores.html").render(stores=found)


def _describe(name: str, store: Store) -> dict[str, Any]:
    manifest, every = store.manifest, range(store.num_rows)
    fields = list(zip(store.schema.fields, store.columns, strict=True))
    sizes = [int(column.num_bytes(every)) for column in manifest.columns]
    return {
        "name": name,
        "path": str(store.path),
        "num_rows": store.num_rows,
        "num_bytes": manifest.num_bytes,
        "num_shards": store.num_shards,
        "source": dict(manifest.source),
        "samples": samples(store),
        "distributions": [
            each for field, column in fields for each in distributions(store, field, column)
        ],
        "fields": [
            (field, Bar(format_bytes(size), size, size / max(max(sizes), 1)))
            for (field, _), size in zip(fields, sizes, strict=True)
        ],
        "shards": _shards(manifest.shard_bytes().tolist()),
    }


def _shards(sizes: list[int]) -> list[Bar]:
    """A bar for each shard, or for each few."""
    step = -(-len(sizes) // _MAX_SHARDS)
    groups = [(first, sizes[first : first + step]) for first in range(0, len(sizes), step)]
    largest = max(max(sum(group) for _, group in groups), 1)
    return [
        Bar(
            str(first) if len(group) == 1 else f"{first} to {first + len(group) - 1}",
            sum(group),
            sum(group) / largest,
        )
        for first, group in groups
    ]
