"""Finds the stores at a path or URL: one store, or one per split."""

import os
import sys
from pathlib import Path

from lightning_memmap.commands.store_options import print_line
from lightning_memmap.errors import MemmapError, StoreNotFoundError, nearest_file
from lightning_memmap.store import Store, open_store
from lightning_memmap.store.building import describe_unfinished_build
from lightning_memmap.store.manifest import MANIFEST
from lightning_memmap.store.paths import StoreUrl, path_or_url
from lightning_memmap.store.remote.files import RemoteFiles
from lightning_memmap.tables import printable


def find_stores(path: str) -> dict[str, Path | StoreUrl]:
    """Find a store, by an empty name, or the stores up to two levels below, by relative path."""
    location = path_or_url(path)
    if isinstance(location, StoreUrl):
        names = RemoteFiles(location).find_stores()
        return {name: location / name if name else location for name in names}
    # Resolved, so that "." has a name.
    directory = Path(os.path.realpath(location))
    if os.path.lexists(directory / MANIFEST):
        return {"": directory}
    # If a split has several datasets, their stores are one level further down.
    manifests = [*directory.glob(f"*/{MANIFEST}"), *directory.glob(f"*/*/{MANIFEST}")]
    relative = (manifest.parent.relative_to(directory).as_posix() for manifest in manifests)
    names = sorted(name for name in relative if name[0] != "." and "/." not in name)
    if not names:
        near = "" if directory.exists() else nearest_file(path)
        raise StoreNotFoundError(f"no store at {directory}, nor in the folders in it{near}")
    splits = {Path(name).parts[0] for name in names}
    for folder in sorted(directory.glob("[!.]*/")):
        if folder.name not in splits and not find_unfinished(str(folder)):
            print(f"skipped {printable(folder)}: it is not a store", file=sys.stderr)
    return {name: directory / name for name in names}


def find_unfinished(path: str) -> dict[str, str]:
    """Describe the unfinished builds at a path or below it, by path of the store."""
    location = path_or_url(path)
    if isinstance(location, StoreUrl):
        return {}
    directory = Path(os.path.realpath(location))
    drafts = [
        draft for below in ("", "*/", "*/*/") for draft in directory.glob(f"{below}g-*/*.json")
    ]
    descriptions = {}
    for store in sorted({draft.parents[1] for draft in drafts}):
        description = describe_unfinished_build(store)
        if description is not None:
            descriptions[str(store)] = description
    return descriptions


def open_stores(path: str) -> dict[str, Store]:
    """Open the store at a path, or the stores below it, by name."""
    stores: dict[str, Store] = {}
    for name, store in open_readable_stores(path).items():
        if isinstance(store, Exception):
            raise store
        stores[name] = store
    return stores


def open_readable_stores(path: str) -> dict[str, Store | MemmapError | OSError]:
    """Open stores like `open_stores`, with an error in place of a store that can't be read.

    Raises:
        MemmapError: The only store at the path can't be read.
    """
    for unfinished, description in find_unfinished(path).items():
        print_line(f"{unfinished}: {description}")
    stores: dict[str, Store | MemmapError | OSError] = {}
    for name, location in find_stores(path).items():
        try:
            stores[name or str(location).rstrip("/").rpartition("/")[2]] = open_store(location)
        except (MemmapError, OSError) as error:
            if not name:
                raise
            stores[name] = error
    return stores
