"""The files of a store while it grows: made, written, brought to the disk, put in place."""

import errno
import os
import shutil
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import numpy as np

from lightning_memmap.sampling import shard_starts
from lightning_memmap.schema import Schema
from lightning_memmap.store.manifest import Manifest, field_path
from lightning_memmap.store.probes import hash_row
from lightning_memmap.store.recovery import building_path, put_in_place, sync_directory

#: What a build needs on the disk beside the rows: its plan, its journal, the manifest.
_ROOM_BYTES = 64 * 2**10


def make_files(directory: Path, schema: Schema, num_rows: int) -> None:
    """Make the field files of the store at ``directory`` where it grows, and claim their space,
    so that a full disk is an error now and neither a late one nor a SIGBUS.

    Raises:
        OSError: The disk is too small. Nothing is left then.
    """
    building = building_path(directory)
    building.mkdir()
    try:
        _allocate(building, schema, num_rows, str(directory))
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def _allocate(building: Path, schema: Schema, num_rows: int, where: str) -> None:
    needed = num_rows * schema.row_bytes
    free = shutil.disk_usage(building).free
    if needed + _ROOM_BYTES > free:
        raise _disk_full(needed, free, where)
    for field in schema.fields:
        num_bytes = num_rows * field.row_bytes
        if not num_bytes:
            continue
        with open(field_path(building, field), "xb") as file:
            try:
                file.truncate(num_bytes)
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, num_bytes)
            except OSError as error:
                if error.errno == errno.EFBIG:
                    raise OSError(
                        errno.EFBIG,
                        f"field {field.name!r} needs a file of {num_bytes} bytes, more than this"
                        " process (`ulimit -f`) or the file system allows",
                        where,
                    ) from error
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise _disk_full(needed, free, where) from error


def _disk_full(needed: int, free: int, where: str) -> OSError:
    return OSError(
        errno.ENOSPC,
        f"the store needs {needed} bytes and {_ROOM_BYTES} besides, and {free} are free: free some"
        " space, or choose a directory on a larger disk",
        where,
    )


def write_all(descriptor: int, data: memoryview, place: int) -> None:
    """Write bytes to a place in a file, however many calls it takes."""
    while data:
        written = os.pwrite(descriptor, data, place)
        data, place = data[written:], place + written


def hash_written_row(
    building: Path, row: int, schema: Schema, num_rows: int, num_shards: int
) -> str:
    """The hash of one row as it lies in the files; see `hash_row`."""
    place = int(shard_starts(num_rows, num_shards)[row % num_shards]) + row // num_shards
    leaves = []
    for field in schema.fields:
        if size := field.row_bytes:
            with open(field_path(building, field), "rb") as file:
                data = os.pread(file.fileno(), size, place * size)
            leaves.append(np.frombuffer(data, np.uint8))
    return hash_row(leaves)


def sync_files(building: Path, schema: Schema) -> None:
    """Bring the field files to the disk."""
    for field in schema.fields:
        if field.row_bytes:
            with open(field_path(building, field), "rb") as file:
                os.fsync(file.fileno())


def describe_source(**what: str) -> dict[str, str]:
    """Where a store came from, for people to read: this, the time and the versions."""
    return {
        **what,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **{name: version(name) for name in ("lightning_memmap", "torch", "tensordict")},
    }


def commit(directory: Path, manifest: Manifest) -> None:
    """Write the manifest, which makes the files a store, and put the store in place. All rows
    must be on the disk, and the lock held."""
    building = building_path(directory)
    manifest.write(building)
    sync_directory(building)
    put_in_place(directory)
