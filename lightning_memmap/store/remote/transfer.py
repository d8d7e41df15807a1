"""Whole stores, pushed to a URL and pulled from one. Both go on where they were interrupted."""

import os
from collections.abc import Iterable
from pathlib import Path

from lightning_memmap.errors import StoreError, StoreNotFoundError
from lightning_memmap.store.files import TEMPORARY, open_plain, sync_path
from lightning_memmap.store.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest, check_files
from lightning_memmap.store.places import StoreUrl, make_parent, place_of, store_directory
from lightning_memmap.store.plan import allocate_files
from lightning_memmap.store.progress import show_progress
from lightning_memmap.store.reader import Store, open_directory
from lightning_memmap.store.recovery import (
    check_ours,
    finish_interrupted,
    is_store,
    locked,
    make_room,
    no_store_error,
    put_in_place,
    remove_tree,
)
from lightning_memmap.store.remote.files import RemoteFiles
from lightning_memmap.store.remote.shards import (
    RemoteManifest,
    RemoteShards,
    make_records,
)

#: At a URL: the manifest of what is being pushed. In a directory: of what is being pulled.
_UNFINISHED = MANIFEST + TEMPORARY


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
    directory = finish_interrupted(store_directory(path))
    manifest = Manifest.read(directory)
    check_files(directory, manifest)
    data = (directory / MANIFEST).read_bytes()
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
    sizes = {name: size for column in manifest.columns for name, size in column.file_bytes.items()}
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
    directory = store_directory(path)
    files = RemoteFiles(_url(url))
    remote = RemoteManifest.read(files)
    make_parent(directory)
    with locked(directory):
        if os.path.lexists(directory):
            if not is_store(directory):
                raise no_store_error(directory, "path")
            if _read_plain(directory / MANIFEST) == remote.data:
                return open_directory(directory)
            if not overwrite:
                raise StoreError(
                    f"{directory} has another store: replace it with overwrite=True (--overwrite),"
                    " or choose another directory"
                )
        make_room(directory)
        pulling = directory.parent / f".{directory.name}.pulling"
        if not _is_begun(pulling, remote):
            _begin(pulling, remote, directory)
        if not is_store(pulling):
            shards = RemoteShards(remote, files, pulling)
            manifest = remote.manifest
            numbers = shards.missing(range(len(manifest.columns)), range(manifest.num_shards))
            hidden, num_bytes = not progress, int(shards.num_bytes(numbers).sum())
            with show_progress("pulling", num_bytes, 1, hidden=hidden) as advance:
                shards.fetch(numbers, advance)
            os.rename(pulling / _UNFINISHED, pulling / MANIFEST)
            sync_path(pulling)
        put_in_place(directory, pulling)
    return open_directory(directory)


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


def _read_plain(path: Path) -> bytes:
    """A manifest beside a store, which another user may have put there."""
    with open(open_plain(path), "rb") as file:
        return file.read(MAX_MANIFEST_BYTES)


def _url(given: str) -> StoreUrl:
    place = place_of(given)
    if not isinstance(place, StoreUrl):
        raise ValueError(f"url={given!r}: give one like s3://bucket/stores/train")
    return place


def _read(files: RemoteFiles, name: str) -> bytes | None:
    """A manifest; None where there is none."""
    return files.read_if_there(name, MAX_MANIFEST_BYTES)


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


def _is_begun(pulling: Path, remote: RemoteManifest) -> bool:
    """Whether a directory has what an interrupted pull of the same store has left."""
    if not os.path.lexists(pulling):
        return False
    check_ours(pulling)
    for name in (MANIFEST, _UNFINISHED):
        if os.path.lexists(pulling / name):
            return _read_plain(pulling / name) == remote.data
    return False


def _begin(pulling: Path, remote: RemoteManifest, directory: Path) -> None:
    """Make the files of a pull, at their sizes."""
    if os.path.lexists(pulling):
        remove_tree(pulling)
    manifest = remote.manifest
    allocate_files(pulling, manifest.columns, directory)
    make_records(pulling, manifest)
    temporary = pulling / f"{_UNFINISHED}{TEMPORARY}"
    temporary.write_bytes(remote.data)
    sync_path(temporary)
    # Its name says that everything else is there.
    os.rename(temporary, pulling / _UNFINISHED)
