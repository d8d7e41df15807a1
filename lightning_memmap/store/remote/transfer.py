"""Push a store to a URL, or pull one from a URL. Both resume after an interruption.

A copy is a new generation, whose name is computed from the store and from the store that it
replaces. So copies of different stores never write the same files, and none removes the files of
another one.
"""

from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeGuard

from msgspec.structs import replace

from lightning_memmap.errors import StoreError
from lightning_memmap.store.building import allocate_files
from lightning_memmap.store.directory import (
    DRAFT,
    StoreDirectory,
    check_store_path,
    is_store,
    remove_tree,
)
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

#: The file in a generation at a URL that names the generation it replaces, until that is removed.
_REPLACED = f"replaced{TEMPORARY}"
_MAX_NAME_BYTES = 64


def push_store(
    path: str | Path, url: str, *, overwrite: bool = False, progress: bool = True
) -> None:
    """Copy a store to a URL, once all of its bytes are compared with their checksums.

    The manifest is written last, in one step: a reader finds the old store, the new one, or none
    before the first is complete. An interrupted push resumes with the missing files.

    Args:
        path: Directory of the store.
        url: The URL, such as ``s3://bucket/stores/train``.
        overwrite: Replace a store at the URL, and remove its files afterwards. A process that is
            fetching them gets an error, and must open the new store.
        progress: Show a progress bar.

    Raises:
        ValueError: ``path`` is a URL, or ``url`` is not.
        StoreNotFoundError: The store or the bucket doesn't exist.
        StoreError: The store is damaged or was replaced, another store is or was just pushed to the
            URL, or the URL cannot be reached.
    """
    directory = store_directory(path)
    store = open_directory(directory)
    files = store.files
    manifest = store.manifest
    remote = RemoteFiles(_check_url(url))
    before = remote.read_if_exists(MANIFEST, MAX_MANIFEST_BYTES)
    old = _decode_manifest(before, url)
    if _are_same(old, manifest):
        # A push that was killed at its end may not have removed the generation it replaced.
        _remove_replaced(remote, old.generation)
        return
    if before is not None and FORMAT.encode() not in before:
        raise StoreError(
            f"{remote.url / MANIFEST} is not the manifest of a store, and is not replaced: choose"
            " another URL"
        )
    if before is not None and not overwrite:
        raise StoreError(
            f"there is another store at {url}: replace it with overwrite=True (--overwrite), or"
            " choose another URL"
        )
    if before is None and (inner := remote.find_inner_stores()):
        raise StoreError(
            f"{url} is a directory of stores, such as {inner[0]!r}: choose the URL of one store,"
            f" such as {remote.url / inner[0]}"
        )
    show = partial(show_progress, hidden=not progress)
    store.check_bytes(show)
    new = replace(manifest, generation=copy_name(manifest, before))
    sizes = manifest.file_bytes
    with show("pushing", sum(sizes.values()), 1) as advance:
        for name, num_bytes in sizes.items():
            at = f"{new.generation}/{name}"
            if remote.size(at) != num_bytes:
                if not is_there(files / name):
                    raise StoreError(f"the store at {directory} was replaced: push it again")
                remote.write(at, files / name)
            advance(num_bytes)
    if remote.read_if_exists(MANIFEST, MAX_MANIFEST_BYTES) != before:
        raise StoreError(f"another process has pushed another store to {url} at the same time")
    if old is not None:
        remote.write(f"{new.generation}/{_REPLACED}", old.generation.encode())
    remote.replace(MANIFEST, new.encode(), new.generation)
    if old is not None:
        _remove_replaced(remote, new.generation)


def pull_store(
    url: str, path: str | Path, *, overwrite: bool = False, progress: bool = True
) -> Store:
    """Copy a store from a URL into a directory, and compare every byte with its checksums.

    The store appears once it is complete. An interrupted pull resumes with the missing shards.

    Args:
        url: The URL of the store.
        path: The directory of the copy.
        overwrite: Replace a store in the directory. It stays until the new one is complete.
        progress: Show a progress bar.

    Returns:
        The open store.

    Raises:
        ValueError: ``path`` is a URL, or ``url`` is not.
        StoreNotFoundError: The URL doesn't have a store.
        StoreError: It cannot be reached, is damaged, or was just replaced; or the directory has
            other files.
        OSError: The disk is full, or the files cannot be written.
    """
    target = StoreDirectory(store_directory(path))
    files = RemoteFiles(_check_url(url))
    manifest = read_manifest(files)
    check_store_path(target.path, "path")
    with target.locked():
        before = None
        if is_store(target.path):
            before = read_plain(target.path / MANIFEST, MAX_MANIFEST_BYTES)
        if _are_same(_decode_manifest(before, str(target.path)), manifest):
            return open_directory(target.path)
        if before is not None and not overwrite:
            raise StoreError(
                f"{target.path} has another store: replace it with overwrite=True (--overwrite), or"
                " choose another directory"
            )
        generation = _begin(target, manifest, copy_name(manifest, before))
        shards = RemoteShards(files, manifest, generation)
        field_shards = shards.field_shards(range(len(manifest.columns)), range(manifest.num_shards))
        shards.fetch(shards.missing(field_shards), "pulling", hidden=not progress)
        target.commit(replace(manifest, generation=generation.name))
    return open_directory(target.path)


def _check_url(url: str) -> StoreUrl:
    location = path_or_url(url)
    if not isinstance(location, StoreUrl):
        raise ValueError(f"url={url!r}: must be a URL like s3://bucket/stores/train")
    return location


def _decode_manifest(data: bytes | None, where: str) -> Manifest | None:
    """Decode a manifest; None if it is missing, damaged or of another version."""
    with suppress(StoreError):
        return None if data is None else Manifest.decode(data, where)
    return None


def _are_same(one: Manifest | None, other: Manifest) -> TypeGuard[Manifest]:
    """Return whether two stores are the same except for the names of their generations."""
    return one is not None and replace(one, generation=other.generation) == other


def _remove_replaced(remote: RemoteFiles, generation: str) -> None:
    """Remove the generation that another has replaced, if there is one."""
    note = f"{generation}/{_REPLACED}"
    name = (remote.read_if_exists(note, _MAX_NAME_BYTES) or b"").decode(errors="replace")
    if GENERATION.fullmatch(name):
        remote.remove(name)
        remote.remove(note)


def _begin(target: StoreDirectory, manifest: Manifest, name: str) -> Path:
    """Return the generation of an interrupted pull of the same store, or create one."""
    generation = target.path / name
    draft = manifest.encode()
    for unfinished in target.unfinished(DRAFT):
        if unfinished == generation and read_plain(unfinished / DRAFT, len(draft) + 1) == draft:
            return generation
        remove_tree(unfinished)
    target.begin(name)
    allocate_files(generation, manifest.columns, target.path)
    make_records(generation, manifest)
    manifest.write(generation, DRAFT)  # Written last: all other files exist.
    return generation
