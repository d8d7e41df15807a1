"""The stores that a path or a URL of the command line means."""

import os
import sys
from pathlib import Path

from lightning_memmap.arguments import nearest_file
from lightning_memmap.errors import MemmapError, StoreNotFoundError
from lightning_memmap.store import Store, open_store
from lightning_memmap.store.building import rows_of_unfinished
from lightning_memmap.store.directory import KEY
from lightning_memmap.store.manifest import MANIFEST
from lightning_memmap.store.places import StoreUrl, place_of
from lightning_memmap.store.remote.files import RemoteFiles
from lightning_memmap.tables import printable


def places_in(path: str) -> dict[str, Path | StoreUrl]:
    """The store at a path or URL, by an empty name, or those up to two levels below, by path."""
    place = place_of(path)
    if isinstance(place, StoreUrl):
        return {name: place / name if name else place for name in RemoteFiles(place).stores()}
    # Resolved, so that "." has a name.
    directory = Path(os.path.realpath(place))
    if os.path.lexists(directory / MANIFEST):
        return {"": directory}
    # The stores of several datasets of a split lie one level further down.
    manifests = [*directory.glob(f"*/{MANIFEST}"), *directory.glob(f"*/*/{MANIFEST}")]
    names = sorted(found.parent.relative_to(directory).as_posix() for found in manifests)
    names = [name for name in names if name[0] != "." and "/." not in name]
    if not names:
        near = "" if directory.exists() else nearest_file(path)
        raise StoreNotFoundError(f"no store at {directory}, nor in the folders in it{near}")
    for other in sorted(directory.glob("[!.]*/")):
        is_store = any(Path(name).parts[0] == other.name for name in names)
        if not is_store and not unfinished_in(str(other)):
            print(f"skipped {printable(other)}: it is not a store", file=sys.stderr)
    return {name: directory / name for name in names}


def unfinished_in(path: str) -> dict[str, tuple[int, int]]:
    """The stores at a path or below it that are being built, or were: rows there, and all rows."""
    place = place_of(path)
    if isinstance(place, StoreUrl):
        return {}
    directory = Path(os.path.realpath(place))
    keys = (directory.glob(f"{below}g-*/{KEY}") for below in ("", "*/", "*/*/"))
    stores = sorted({key.parents[1] for each in keys for key in each})
    found = {str(store): rows_of_unfinished(store) for store in stores}
    return {store: rows for store, rows in found.items() if rows is not None}


def stores_in(path: str) -> dict[str, Store]:
    """The store at a path or the stores below it, by name."""
    stores = stores_or_errors(path)
    for found in stores.values():
        if isinstance(found, Exception):
            raise found
    return {name: store for name, store in stores.items() if isinstance(store, Store)}


def stores_or_errors(path: str) -> dict[str, Store | MemmapError | OSError]:
    """Like `stores_in`, with an error in place of a store below the path that cannot be read."""
    found: dict[str, Store | MemmapError | OSError] = {}
    for name, place in places_in(path).items():
        try:
            found[name or str(place).rstrip("/").rpartition("/")[2]] = open_store(place)
        except (MemmapError, OSError) as error:
            if not name:
                raise
            found[name] = error
    return found
