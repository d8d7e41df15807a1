"""Files that belong to this user, and to nobody else: a build goes on from no others."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from lightning_memmap.errors import StoreError

#: No link is followed, no pipe waited for, and no program that is started has the file.
SAFE_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def check_own(name: str, state: os.stat_result) -> None:
    """Check that something is a plain file of this user, without another name.

    Args:
        name: Its name, for the message.
        state: What the system says of it.

    Raises:
        StoreError: It is not.
    """
    if not stat.S_ISREG(state.st_mode) or state.st_nlink != 1 or state.st_uid != os.geteuid():
        raise StoreError(f"{name} is not a plain file that belongs to this user")


@contextmanager
def own_directory(building: Path) -> Iterator[int]:
    """Open a directory of this user, and give its descriptor.

    Args:
        building: The directory. A link is not followed.

    Raises:
        StoreError: It belongs to another user.
        OSError: It cannot be opened.
    """
    directory = os.open(building, os.O_RDONLY | os.O_DIRECTORY | SAFE_FLAGS)
    try:
        if os.fstat(directory).st_uid != os.geteuid():
            raise StoreError("it belongs to another user")
        yield directory
    finally:
        os.close(directory)


def open_own(name: str, directory: int, flags: int) -> int:
    """Open a plain file of this user.

    Args:
        name: Its name.
        directory: The descriptor of its directory.
        flags: Flags of ``os.open`` beside `SAFE_FLAGS`.

    Returns:
        The descriptor, which the caller closes.

    Raises:
        StoreError: It is no plain file, or belongs to another user.
        OSError: It cannot be opened.
    """
    descriptor = os.open(name, flags | SAFE_FLAGS, 0o666, dir_fd=directory)
    try:
        check_own(name, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_own(name: str, directory: int, max_bytes: int) -> bytes:
    """Read a plain file of this user; see `open_own`.

    Args:
        name: Its name.
        directory: The descriptor of its directory.
        max_bytes: The most bytes that it may have.
    """
    descriptor = open_own(name, directory, os.O_RDONLY)
    with open(descriptor, "rb") as file:
        return read_at_most(file, name, max_bytes)


def read_at_most(file: IO[bytes], name: str, max_bytes: int) -> bytes:
    """Read a file to its end.

    Args:
        file: The file.
        name: Its name, for the message.
        max_bytes: The most bytes that it may have.

    Raises:
        StoreError: It is larger.
    """
    data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise StoreError(f"{name} is larger than {max_bytes} bytes")
    return data
