"""Whole stores, pushed to a URL and pulled from one. Both go on where they were interrupted.

What is copied gets a generation of its own, named after the store and after what it replaces. So
no two copies of different stores write to the same files, and what one removes no other needs.
"""

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeGuard

from msgspec.structs import replace

from lightning_memmap.errors import StoreError
from lightning_memmap.store.building import allocate_files
from lightning_memmap.store.directory import KEY, StoreDirectory, check_free, is_store, remove_tree
from lightning_memmap.store.files import TEMPORARY, is_there, read_plain
from lightning_memmap.store.manifest import (
    FORMAT,
    GENERATION,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
)
from lightning_memmap.store.paths import StoreUrl, path_or_url, store_directory
from lightning_memmap.store.progress import show_progress
from lightning_memmap.store.remote.files import RemoteFiles
from lightning_memmap.store.remote.shards import (
    RemoteShards,
    copy_name,
    make_records,
    read_manifest,
)
from lightning_memmap.store.store import Store, open_directory

#: In a generation at a URL: which one it replaces. It goes with that.
_REPLACED, _MAX_NAME_BYTES = f"replaced{TEMPORARY}", 64


def push_store(
    path: str | Path, url: str, *, overwrite: bool = False, progress: bool = True
) -> None:
    """Copy a store to a URL, once all of its bytes are compared with their checksums.

    The manifest is written last, at once: whoever reads the URL finds the store that was there, or
    the new one, or none before the first is whole. A push that was interrupted goes on with the
    files that are missing.

    Args:
        path: Directory of the store.
        url: Where it goes, such as ``s3://bucket/stores/train``.
        overwrite: Replace a store that is there, and remove its files afterwards. Whoever is
            fetching them then gets an error, and opens the new one.
        progress: Show a progress bar.

    Raises:
        ValueError: ``path`` is a URL, or ``url`` is not.
        StoreNotFoundError: There is no store at ``path``, or no such bucket.
        StoreError: The store is damaged or replaced meanwhile, another store is at the URL or was
            pushed there meanwhile, or it cannot be reached.
    """
    directory = store_directory(path)
    store = open_directory(directory)
    files, manifest = store.files, store.manifest
    there = RemoteFiles(_url(url))
    before = there.read_if_there(MANIFEST, MAX_MANIFEST_BYTES)
    old = _decoded(before, url)
    if _are_same(old, manifest):
        # What a push had replaced that was killed before its end.
        _remove_replaced(there, old.generation)
        return
    if before is not None and FORMAT.encode() not in before:
        raise StoreError(
            f"{there.url / MANIFEST} is not the manifest of a store, and is not replaced: choose"
            " another URL"
        )
    if before is not None and not overwrite:
        raise StoreError(
            f"there is another store at {url}: replace it with overwrite=True (--overwrite), or"
            " choose another URL"
        )
    if before is None and (inner := there.stores_inside()):
        raise StoreError(
            f"{url} is a directory of stores, such as {inner[0]!r}: choose the URL of one store,"
            f" such as {there.url / inner[0]}"
        )
    show = partial(show_progress, hidden=not progress)
    store.check_bytes(show)
    new = replace(manifest, generation=copy_name(manifest, before))
    sizes = manifest.file_bytes
    with show("pushing", sum(sizes.values()), 1) as advance:
        for name, num_bytes in sizes.items():
            at = f"{new.generation}/{name}"
            if there.size(at) != num_bytes:
                if not is_there(files / name):
                    raise StoreError(f"the store at {directory} was replaced: push it again")
                there.write(at, files / name)
            advance(num_bytes)
    if there.read_if_there(MANIFEST, MAX_MANIFEST_BYTES) != before:
        raise StoreError(f"another process has pushed another store to {url} meanwhile")
    if old is not None:
        there.write(f"{new.generation}/{_REPLACED}", old.generation.encode())
    there.replace(MANIFEST, new.encode(), new.generation)
    if old is not None:
        _remove_replaced(there, new.generation)


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
    place = StoreDirectory(store_directory(path))
    files = RemoteFiles(_url(url))
    manifest = read_manifest(files)
    check_free(place.path, "path")
    with place.locked():
        before = None
        if is_store(place.path):
            before = read_plain(place.path / MANIFEST, MAX_MANIFEST_BYTES)
        if _are_same(_decoded(before, str(place.path)), manifest):
            return open_directory(place.path)
        if before is not None and not overwrite:
            raise StoreError(
                f"{place.path} has another store: replace it with overwrite=True (--overwrite), or"
                " choose another directory"
            )
        generation = _begin(place, manifest, copy_name(manifest, before))
        shards = RemoteShards(files, manifest, generation)
        numbers = shards.numbers(range(len(manifest.columns)), range(manifest.num_shards))
        shards.fetch(shards.missing(numbers), "pulling", hidden=not progress)
        place.commit(replace(manifest, generation=generation.name))
    return open_directory(place.path)


def _url(given: str) -> StoreUrl:
    place = path_or_url(given)
    if not isinstance(place, StoreUrl):
        raise ValueError(f"url={given!r}: give one like s3://bucket/stores/train")
    return place


def _decoded(data: bytes | None, where: str) -> Manifest | None:
    """What a manifest says; None where there is none, or it is damaged or of another version."""
    with suppress(StoreError):
        return None if data is None else Manifest.decode(data, where)
    return None


def _are_same(one: Manifest | None, other: Manifest) -> TypeGuard[Manifest]:
    """Whether two stores are the same but for the names of their generations."""
    return one is not None and replace(one, generation=other.generation) == other


def _remove_replaced(there: RemoteFiles, generation: str) -> None:
    """Remove the generation that another has replaced, if there is one."""
    note = f"{generation}/{_REPLACED}"
    name = (there.read_if_there(note, _MAX_NAME_BYTES) or b"").decode(errors="replace")
    if GENERATION.fullmatch(name):
        there.remove(name)
        there.remove(note)


def _begin(place: StoreDirectory, manifest: Manifest, name: str) -> Path:
    """The generation of a pull: that of the same pull, which was interrupted, or a new one."""
    generation, key = place.path / name, manifest.encode()
    for unfinished in place.unfinished(KEY):
        if unfinished == generation and read_plain(unfinished / KEY, len(key) + 1) == key:
            return generation
        remove_tree(unfinished)
    place.begin(name)
    allocate_files(generation, manifest.columns, place.path)
    make_records(generation, manifest)
    manifest.write(generation, KEY)  # It says that everything else is there.
    return generation
