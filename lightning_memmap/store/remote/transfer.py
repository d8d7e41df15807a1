"""Whole stores, pushed to a URL and pulled from one. Both go on where they were interrupted."""

import os
from collections.abc import Iterable
from contextlib import nullcontext
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
from lightning_memmap.store.files import TEMPORARY, own_directory, read_own, sync_path
from lightning_memmap.store.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, check_files
from lightning_memmap.store.places import StoreUrl, make_parent, place_of, store_directory
from lightning_memmap.store.progress import show_progress
from lightning_memmap.store.remote.fetcher import RemoteManifest, ShardFetcher
from lightning_memmap.store.remote.files import RemoteFiles
from lightning_memmap.store.store import Store, open_directory

#: The manifest of what is being pushed.
_UNFINISHED = MANIFEST + TEMPORARY
_STATES = "states" + TEMPORARY


def push_store(
    path: str | Path, url: str, *, overwrite: bool = False, progress: bool = True
) -> None:
    """Copy a store to a URL.

    The manifest is written last: there is no store at the URL before all of it is there. A push
    that was interrupted goes on with the files that are missing.

    Args:
        path: Directory of the store.
        url: Where it goes, such as ``s3://bucket/stores/train``. Nothing else may be there.
        overwrite: Replace a store that is there. While it is replaced, there is none: for others
            who use it, push a new version to a URL of its own.
        progress: Show a progress bar.

    Raises:
        ValueError: ``path`` is a URL, or ``url`` is not.
        StoreNotFoundError: There is no store at ``path``, or no such bucket.
        StoreError: The store is damaged or replaced meanwhile, something else is at the URL or is
            pushed there at the same time, or it cannot be reached.
    """
    directory = store_directory(path)
    manifest = Manifest.read(directory)
    files_here = directory / manifest.generation
    check_files(files_here, manifest)
    data = manifest.encode()
    there = RemoteFiles(_url(url))
    found = _read(there, MANIFEST)
    if found == data:
        there.remove(_UNFINISHED)  # Of a push that was killed just before its end.
        return
    if found is not None and not overwrite:
        raise StoreError(
            f"there is another store at {url}: replace it with overwrite=True (--overwrite), or"
            " choose another URL"
        )
    sizes = {
        f"{manifest.generation}/{name}": size
        for column in manifest.columns
        for name, size in column.file_bytes.items()
    }
    unfinished = _read(there, _UNFINISHED)
    if unfinished != data:
        if found is None and unfinished is None and not overwrite:
            _check_free(there, sizes)
        # Files that are there from now on are of this store.
        for name in (MANIFEST, *sizes):
            there.remove(name)
        there.write(_UNFINISHED, data)
    with show_progress("pushing", sum(sizes.values()), 1, hidden=not progress) as advance:
        for name, num_bytes in sizes.items():
            if there.size(name) != num_bytes:
                there.put(directory / name, name)
            advance(num_bytes)
    if Manifest.read(directory) != manifest:
        raise StoreError(f"the store at {directory} was replaced meanwhile: push it again")
    if data not in (_read(there, _UNFINISHED), _read(there, MANIFEST)):
        raise StoreError(f"another process has pushed another store to {url} meanwhile")
    there.write(MANIFEST, data)
    there.remove(_UNFINISHED)


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
            if Manifest.read(directory.path) == remote.manifest:
                return open_directory(directory.path)
            if not overwrite:
                raise StoreError(
                    f"{directory.path} has another store: replace it with overwrite=True"
                    " (--overwrite), or choose another directory"
                )
        pulling = _begin(directory, remote)
        fetcher = ShardFetcher(remote, files, pulling, pulling / _STATES, _no_lock)
        manifest = remote.manifest
        numbers = fetcher.absent(range(len(manifest.columns)), range(manifest.num_shards))
        hidden, num_bytes = not progress, fetcher.num_bytes(numbers)
        with show_progress("pulling", num_bytes, 1, hidden=hidden) as advance:
            fetcher.fetch(numbers, advance)
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
    return RemoteFiles(StoreUrl(url)).size(MANIFEST) is not None


def _url(given: str) -> StoreUrl:
    place = place_of(given)
    if not isinstance(place, StoreUrl):
        raise ValueError(f"url={given!r}: give one like s3://bucket/stores/train")
    return place


def _read(files: RemoteFiles, name: str) -> bytes | None:
    """A manifest; None where there is none."""
    size = files.size(name)
    return None if size is None else files.read(name, 0, size)


def _check_free(there: RemoteFiles, names: Iterable[str]) -> None:
    """Check that no file of a store would replace one of somebody else.

    Raises:
        StoreError: One would.
    """
    for name in names:
        if there.size(name) is not None:
            raise StoreError(
                f"{there.url / name} is there already, and is of no store: choose another URL, or"
                " replace it with overwrite=True (--overwrite)"
            )


def _no_lock(number: int) -> "nullcontext[None]":
    return nullcontext()


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
    (path / _STATES).write_bytes(bytes(len(manifest.columns) * manifest.num_shards))
    temporary = path / (KEY + TEMPORARY)
    temporary.write_bytes(remote.data)
    sync_path(temporary)
    # Its name says that everything else is there.
    os.rename(temporary, path / KEY)
    return path
