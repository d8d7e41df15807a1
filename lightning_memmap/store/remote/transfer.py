"""Whole stores, pushed to a URL and pulled from one. Both go on where they were interrupted."""

import os
from contextlib import suppress
from pathlib import Path

from lightning_memmap.errors import StoreError, StoreNotFoundError
from lightning_memmap.store.building import allocate_files
from lightning_memmap.store.directory import (
    KEY,
    StoreDirectory,
    check_free,
    is_store,
    remove_tree,
)
from lightning_memmap.store.files import TEMPORARY, open_plain, own_directory, read_own, sync_path
from lightning_memmap.store.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, check_files
from lightning_memmap.store.places import StoreUrl, make_parent, place_of, store_directory
from lightning_memmap.store.progress import show_progress
from lightning_memmap.store.remote.files import RemoteFiles
from lightning_memmap.store.remote.shards import (
    RemoteManifest,
    RemoteShards,
    make_records,
)
from lightning_memmap.store.store import Store, open_directory


def push_store(
    path: str | Path, url: str, *, overwrite: bool = False, progress: bool = True
) -> None:
    """Copy a store to a URL.

    The manifest is written last: there is no store at the URL before all of it is there. A push
    that was interrupted goes on with the files that are missing.

    Args:
        path: Directory of the store.
        url: Where it goes, such as ``s3://bucket/stores/train``. Nothing else may be there.
        overwrite: Replace a store that is there, which stays until the new one is whole.
        progress: Show a progress bar.

    Raises:
        ValueError: ``path`` is a URL, or ``url`` is not.
        StoreNotFoundError: There is no store at ``path``, or no such bucket.
        StoreError: The store is damaged or replaced meanwhile, something else is at the URL or is
            pushed there at the same time, or it cannot be reached.
    """
    directory = store_directory(path)
    data = _read_plain(directory)
    manifest = Manifest.decode(data, str(directory))
    check_files(directory / manifest.generation, manifest)
    there = RemoteFiles(_url(url))
    found = there.read_if_there(MANIFEST, MAX_MANIFEST_BYTES)
    if found == data:
        return
    if found is not None and not overwrite:
        raise StoreError(
            f"there is another store at {url}: replace it with overwrite=True (--overwrite), or"
            " choose another URL"
        )
    sizes = _objects(manifest)
    with show_progress("pushing", sum(sizes.values()), 1, hidden=not progress) as advance:
        for name, num_bytes in sizes.items():
            if there.size(name) != num_bytes:
                there.put(directory / name, name)
            advance(num_bytes)
    if _read_plain(directory) != data:
        raise StoreError(f"the store at {directory} was replaced meanwhile: push it again")
    there.write(MANIFEST, data)
    if found is not None:
        with suppress(StoreError):  # Nobody names them any more.
            for name in _objects(Manifest.decode(found, url)):
                if name not in sizes:
                    there.remove(name)


def _objects(manifest: Manifest) -> dict[str, int]:
    """The size of each object of a store at a URL, by its name."""
    return {
        f"{manifest.generation}/{name}": size
        for column in manifest.columns
        for name, size in column.file_bytes.items()
    }


def pull_store(
    url: str, path: str | Path, *, overwrite: bool = False, progress: bool = True
) -> Store:
    """Copy a store from a URL into a directory, and compare every byte with its checksums.

    The store is there once it is whole. A pull that was interrupted goes on with the shards that
    are missing.

    Args:
        url: Where it is.
        path: The directory that it goes to.
        overwrite: Replace a store that is there, which stays until the new one is whole.
        progress: Show a progress bar.

    Returns:
        The open store.

    Raises:
        ValueError: ``path`` is a URL, or ``url`` is not.
        StoreNotFoundError: There is no store at the URL.
        StoreError: It cannot be reached, is damaged, or was replaced meanwhile; or something else
            is in the directory.
        OSError: The disk is full, or the files cannot be written.
    """
    directory = StoreDirectory(store_directory(path))
    files = RemoteFiles(_url(url))
    remote = RemoteManifest.read(files)
    check_free(directory.path, "path")
    make_parent(directory.path)
    with directory.locked():
        if is_store(directory.path):
            if _read_plain(directory.path) == remote.data:
                return open_directory(directory.path)
            if not overwrite:
                raise StoreError(
                    f"{directory.path} has another store: replace it with overwrite=True"
                    " (--overwrite), or choose another directory"
                )
        shards = RemoteShards(remote, files, _begin(directory, remote))
        manifest = remote.manifest
        numbers = shards.missing(range(len(manifest.columns)), range(manifest.num_shards))
        hidden, num_bytes = not progress, int(shards.num_bytes(numbers).sum())
        with show_progress("pulling", num_bytes, 1, hidden=hidden) as advance:
            shards.fetch(numbers, advance)
        directory.commit(manifest)
    return open_directory(directory.path)


def stores_at(url: str) -> dict[str, str]:
    """Find the store at a URL, or the stores in the directory there, one for each split.

    Returns:
        The URL of each store, by its path from there: ``train``, ``val/0``; an empty path for the
        URL itself.

    Raises:
        StoreNotFoundError: There is none.
        StoreError: The URL cannot be reached.
    """
    place = _url(url)
    if _has_store(place):
        return {"": place}
    found = {}
    try:
        names = RemoteFiles(place).folders()
    except StoreNotFoundError as error:
        raise StoreNotFoundError(
            f"no store at {url}, and no directory that can be listed: give the URL of one store,"
            f" such as {place / 'train'}: {error}"
        ) from error
    for name in names:
        if _has_store(place / name):
            found[name] = str(place / name)
            continue
        within = RemoteFiles(place / name).folders()
        found |= {f"{name}/{each}": str(place / name / each) for each in within}
    found = {name: each for name, each in found.items() if "/" not in name or _has_store(each)}
    if not found:
        raise StoreNotFoundError(f"no store at {url}, nor in the directories there")
    return found


def _has_store(url: str) -> bool:
    try:
        return bool(RemoteFiles(StoreUrl(url)).read(MANIFEST, 0, 1))
    except StoreNotFoundError:
        return False


def _read_plain(directory: Path) -> bytes:
    """The bytes of the manifest of a store."""
    try:
        with open(open_plain(directory / MANIFEST), "rb") as file:
            return file.read(MAX_MANIFEST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise StoreNotFoundError(f"no store at {directory}") from None


def _url(given: str) -> StoreUrl:
    place = place_of(given)
    if not isinstance(place, StoreUrl):
        raise ValueError(f"url={given!r}: give one like s3://bucket/stores/train")
    return place


def _begin(directory: StoreDirectory, remote: RemoteManifest) -> Path:
    """Find the files that an interrupted pull of the same store has left, or make them."""
    path = directory.files(remote.manifest)
    for found in directory.unfinished(KEY):
        if found == path:
            with own_directory(path) as opened:
                if read_own(KEY, opened, MAX_MANIFEST_BYTES) == remote.data:
                    return path
        remove_tree(found)
    directory.begin(path.name)
    manifest = remote.manifest
    allocate_files(path, manifest.columns, directory.path)
    make_records(path, manifest)
    temporary = path / (KEY + TEMPORARY)
    temporary.write_bytes(remote.data)
    sync_path(temporary)
    # Its name says that everything else is there.
    os.rename(temporary, path / KEY)
    return path
