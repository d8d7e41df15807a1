"""The files of a remote directory, through fsspec, and what can go wrong with them."""

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import Any, TypeVar

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_memmap.errors import StoreError, StoreNotFoundError
from lightning_memmap.store.places import StoreUrl
from lightning_memmap.store.workers import describe_error

T = TypeVar("T")

#: Times that a read is tried, beside what the library of the protocol tries itself.
_NUM_TRIES = 5
_FIRST_PAUSE_S = 0.1
_log = logging.getLogger(__name__)


class RemoteFiles:
    """The files of one remote directory. Several threads may use it at once.

    Args:
        url: The directory.

    Raises:
        StoreError: The library for its protocol is missing.
        ValueError: There is no such protocol.
    """

    def __init__(self, url: StoreUrl) -> None:
        self.url = url
        try:
            self._system, path = url_to_fs(str(url), use_listings_cache=False)
        except ImportError as error:
            raise StoreError(
                f"{url} cannot be opened: {error}: pip install 'lightning_memmap[remote]' has the"
                " library for s3://; that for gs:// is gcsfs, and for hf:// huggingface_hub"
            ) from error
        except ValueError as error:
            raise ValueError(f"{url}: {error}") from error
        self._path = path.rstrip("/")

    def read(self, name: str, start: int, end: int, *, num_tries: int = _NUM_TRIES) -> bytes:
        """Read part of a file.

        Args:
            name: Name of the file.
            start: The first byte.
            end: One past the last byte.
            num_tries: How often to try, where a connection breaks or gives too few bytes.

        Returns:
            The bytes; fewer than asked for only where the file ends.

        Raises:
            StoreNotFoundError: There is no such file, directory or bucket.
            StoreError: The directory cannot be reached, or access is refused.
        """

        def read() -> bytes:
            found: bytes = self._system.cat_file(self._at(name), start=start, end=end)
            return found

        return self._tried(read, name, num_tries)

    def size(self, name: str) -> int | None:
        """The size of a file in bytes; None where there is no such file.

        Args:
            name: Name of the file.

        Raises:
            StoreError: The directory cannot be reached, or access is refused.
        """
        with suppress(StoreNotFoundError):
            return int(self._tried(lambda: self._system.info(self._at(name)), name)["size"])
        return None

    def folders(self) -> list[str]:
        """The names of the directories in this one, without hidden ones.

        Raises:
            StoreNotFoundError: There is no such directory or bucket.
            StoreError: The directory cannot be reached, or access is refused.
        """
        found: list[dict[str, Any]] = self._tried(
            lambda: self._system.ls(self._path, detail=True), ""
        )
        names = [entry["name"].rstrip("/").rpartition("/")[2] for entry in found]
        kinds = [entry["type"] for entry in found]
        pairs = sorted(zip(names, kinds, strict=True))
        return [name for name, kind in pairs if kind == "directory" and name[:1] != "."]

    def put(self, path: Path, name: str) -> None:
        """Copy a file there. Object stores show it once it is whole.

        Args:
            path: The file on this machine.
            name: Its name there.

        Raises:
            StoreNotFoundError: There is no such bucket.
            StoreError: The directory cannot be reached, or access is refused.
        """
        self._make_directory()
        self._tried(lambda: self._system.put_file(str(path), self._at(name)), name)

    def write(self, name: str, data: bytes) -> None:
        """Write a small file; see `put`.

        Args:
            name: Its name.
            data: Its content.
        """
        self._make_directory()
        self._tried(lambda: self._system.pipe_file(self._at(name), data), name)

    def remove(self, name: str) -> None:
        """Remove a file, if there is one.

        Args:
            name: Its name.

        Raises:
            StoreError: The directory cannot be reached, or access is refused.
        """
        if self.size(name) is not None:
            self._tried(lambda: self._system.rm_file(self._at(name)), name)

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _make_directory(self) -> None:
        # Elsewhere there are no directories, and for some protocols this would make a bucket.
        if isinstance(self._system, LocalFileSystem):
            self._system.makedirs(self._path, exist_ok=True)

    def _tried(self, work: Callable[[], T], name: str, num_tries: int = _NUM_TRIES) -> T:
        where, pause_s = self.url / name if name else self.url, _FIRST_PAUSE_S
        for left in reversed(range(num_tries)):
            try:
                return work()
            except FileNotFoundError as error:
                raise StoreNotFoundError(f"there is no {where}: {describe_error(error)}") from error
            except Exception as error:  # Each library has its own.
                if _is_refusal(error):
                    raise StoreError(
                        f"{where}: access was refused: {describe_error(error)}: see that there are"
                        " credentials (for s3:// in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or"
                        " in ~/.aws), and that they have the right to this"
                    ) from error
                if not left:
                    raise StoreError(
                        f"{where} cannot be reached: {describe_error(error)}: see that this machine"
                        " has a network, and that the address is right (for s3:// of another"
                        " provider it is in AWS_ENDPOINT_URL)"
                    ) from error
                _log.warning("%s: %s: trying again", where, describe_error(error))
            sleep(pause_s)
            pause_s *= 2
        raise AssertionError


def _is_refusal(error: Exception) -> bool:
    """Whether a library says that credentials are missing, or do not suffice."""
    return isinstance(error, PermissionError) or "Credentials" in type(error).__name__
