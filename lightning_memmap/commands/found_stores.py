"""The stores that a path or a URL of the command line means."""

import os
import sys
from pathlib import Path

from lightning_memmap.arguments import nearest_file
from lightning_memmap.errors import MemmapError, StoreNotFoundError
from lightning_memmap.store import Store, open_store
from lightning_memmap.store.places import StoreUrl, place_of
from lightning_memmap.store.remote.transfer import stores_at
from lightning_memmap.tables import printable


def stores_in(path: str) -> dict[str, Store]:
    """The store at a path or the stores below it, by name.

    Raises:
        MemmapError: There is no store, or one cannot be read.
    """
    stores = {}
    for name, found in stores_or_errors(path).items():
        if isinstance(found, Exception):
            raise found
        stores[name] = found
    return stores


def stores_or_errors(path: str) -> dict[str, Store | MemmapError | OSError]:
    """Like `stores_in`, with an error in place of a store below the path that cannot be read."""
    if isinstance(place_of(path), StoreUrl):
        try:
            return {path.rstrip("/").rpartition("/")[2]: open_store(path)}
        except StoreNotFoundError:
            return {name: open_store(url) for name, url in stores_at(path).items()}
    # Resolved, so that "." has a name.
    directory = Path(os.path.realpath(path))
    try:
        return {directory.name: open_store(directory)}
    except StoreNotFoundError as error:
        found: dict[str, Store | MemmapError | OSError] = {}
        others = []
        for child in _folders(directory):
            # The stores of several datasets of a split lie one level further down.
            opened = {path: _opened(path) for path in (child, *_folders(child))}
            stores = {path: store for path, store in opened.items() if store is not None}
            found |= {path.relative_to(directory).as_posix(): stores[path] for path in stores}
            if not stores:
                others.append(child)
        if not found:
            near = "" if directory.exists() else nearest_file(path)
            raise StoreNotFoundError(f"{error}{near}") from None
        for other in others:
            print(f"skipped {printable(other)}: it is not a store", file=sys.stderr)
        return found


def _opened(path: Path) -> Store | MemmapError | OSError | None:
    """The store at a path, why it cannot be opened, or None where there is none."""
    try:
        return open_store(path)
    except StoreNotFoundError:
        return None
    except (MemmapError, OSError) as error:
        return error


def _folders(directory: Path) -> list[Path]:
    """The folders in a directory, without hidden ones and what may not be looked into."""
    try:
        children = sorted(directory.iterdir()) if directory.is_dir() else []
    except PermissionError:
        return []
    return [child for child in children if child.is_dir() and not child.name.startswith(".")]
