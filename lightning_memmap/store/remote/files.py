"""The files of a remote directory, read and written through fsspec, and their errors."""

import errno
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Timer
from time import monotonic, sleep
from typing import Any, TypeVar
from urllib.parse import unquote

from fsspec.asyn import sync
from fsspec.core import url_to_fs
from fsspec.exceptions import FSTimeoutError
from fsspec.implementations.local import LocalFileSystem

from lightning_memmap.errors import MemmapError, StoreError, StoreNotFoundError, describe_error
from lightning_memmap.store.manifest import MANIFEST
from lightning_memmap.store.paths import StoreUrl

T = TypeVar("T")

#: If this environment variable is set, no URL is read: stores are opened from the cache.
OFFLINE = "LIGHTNING_MEMMAP_OFFLINE"

#: Attempts of a read. The library of the protocol may repeat each of them.
_NUM_TRIES = 5
_FIRST_PAUSE_S = 0.1
#: HTTP statuses of errors that may be over at the next attempt.
_TRANSIENT = (408, 425, 429)
#: Errors that another attempt would repeat: missing rights, and bugs of a library. fsspec raises
#: NotImplementedError for an operation that a protocol lacks, such as a write to github://.
_FINAL = (
    *(PermissionError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError),
    *(ImportError, NotImplementedError),
)
#: Over http(s): seconds to connect, without a byte, and for all bytes of one read.
_CONNECT_S = 10.0
_SILENCE_S = 20.0
_READ_S = 300.0
#: Seconds without an answer until a warning, and until the next warning.
_SILENT_S = 5.0
_WARNING_INTERVAL_S = 30.0
_log = logging.getLogger(__name__)


class UnreachableError(StoreError):
    """A URL doesn't answer, or no URL may be read."""


class RemoteFiles:
    """The files of one remote directory. Several threads may use it at once."""

    def __init__(self, url: StoreUrl) -> None:
        self.url = url
        #: When the last warning was logged.
        self._warned_s = -math.inf
        # fsspec doesn't decode ``%20`` in ``file://`` URLs.
        address = unquote(url) if url.lower().startswith("file:") else url
        try:
            self._system, path = url_to_fs(address, use_listings_cache=False)
        except ImportError as error:
            raise StoreError(
                f"{url} cannot be opened: {error}: install"
                " 'lightning_memmap[remote]' for s3://, gcsfs for gs://, or huggingface_hub for hf://"
            ) from error
        except ValueError as error:
            raise ValueError(f"{url}: {error}") from error
        except Exception as error:  # Each library has its own errors.
            raise StoreError(f"{url} cannot be opened: {describe_error(error)}") from error
        self._is_local = isinstance(self._system, LocalFileSystem)
        if self._is_local:  # On other file systems, this might create a bucket.
            self._system = LocalFileSystem(auto_mkdir=True)
        self._path = path.rstrip("/")
        self._is_web = "http" in self._system.protocol

    def read(self, name: str, start: int, end: int, *, patience_s: float = math.inf) -> bytes:
        """Read part of a file; fewer bytes if the file ends, or if the server sends fewer."""
        read = self._read_web if self._is_web else self._system.cat_file
        work: Callable[[], bytes] = partial(read, self._full_path(name), start=start, end=end)
        data = self._try(work, name, patience_s)
        if len(data) > end - start:
            raise StoreError(
                f"{self.url / name}: requested {end - start} bytes, and got more. The server sends"
                " complete files, and a store needs a server that sends ranges of them (for http://"
                " one that answers range requests, unlike `python -m http.server`)"
            )
        return data

    def read_if_exists(self, name: str, max_bytes: int) -> bytes | None:
        """Read a small file, at most ``max_bytes + 1`` bytes; None if it doesn't exist."""
        with suppress(StoreNotFoundError):
            return self.read(name, 0, max_bytes + 1)
        return None

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if the file doesn't exist or has no size."""
        with suppress(StoreNotFoundError):
            size: int | None = self._try(partial(self._system.info, self._full_path(name)), name)[
                "size"
            ]
            return size
        return None

    def find_stores(self) -> list[str]:
        """Find the store here, as an empty path, or the stores one or two levels down."""
        if self.read_if_exists(MANIFEST, 0) is not None:
            return [""]
        if self._is_web:
            raise StoreNotFoundError(
                f"no store at {self.url}, and no directory that can be listed. Use the URL of one"
                f" store, such as {self.url / 'train'}"
            )
        if not (stores := self.find_inner_stores()):
            raise StoreNotFoundError(f"no store at {self.url}, nor in the directories there")
        return stores

    def find_inner_stores(self) -> list[str]:
        """Find the stores one or two levels down in a directory that can be listed."""
        try:
            files = self._try(partial(self._system.find, self._path, maxdepth=3), "")
        except StoreNotFoundError:
            return []
        names = [str(file).rstrip("/").removeprefix(f"{self._path}/") for file in files]
        stores = [name.removesuffix(f"/{MANIFEST}") for name in names if f"/{MANIFEST}" in name]
        return sorted(name for name in stores if name[0] != "." and "/." not in name)

    def write(self, name: str, source: Path | bytes) -> None:
        """Upload a file, or write a small one. Object stores show it once it is complete."""
        system = self._system
        at = self._full_path(name)
        if self._is_web:
            raise StoreError(f"{self.url / name} cannot be written: http(s):// can only be read")
        if isinstance(source, Path):
            self._try(partial(system.put_file, str(source), at), name)
        else:
            self._try(partial(system.pipe_file, at, source), name)

    def replace(self, name: str, data: bytes, folder: str) -> None:
        """Write a small file in one step. ``folder`` may hold it until it is complete."""
        if self._is_local:
            self.write(f"{folder}/{name}", data)
            os.replace(self._full_path(f"{folder}/{name}"), self._full_path(name))
        else:
            self.write(name, data)

    def remove(self, name: str) -> None:
        """Remove a file, or a directory and all that is in it, if there is one."""
        with suppress(StoreNotFoundError):
            self._try(partial(self._system.rm, self._full_path(name), recursive=True), name)

    @contextmanager
    def _warn_if_slow(self, where: object) -> Iterator[None]:
        """Warn after a while without an answer, because a library may keep trying."""
        if self._is_local:
            yield
            return
        timer = Timer(_SILENT_S, self._warn, [where])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _warn(self, where: object) -> None:
        # Several threads may wait for the same server.
        if monotonic() - self._warned_s > _WARNING_INTERVAL_S:
            self._warned_s = monotonic()
            _log.warning("%s: no answer for %g s: still waiting", where, _SILENT_S)

    def _full_path(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _read_web(self, path: str, start: int, end: int) -> bytes:
        try:
            loop = self._system.loop
            data: bytes = sync(loop, _read_part, self._system, path, start, end)
        except FSTimeoutError as error:
            raise TimeoutError(
                f"no bytes for {_SILENCE_S:g} s, or too few in {_READ_S:g} s"
            ) from error
        return data

    def _try(self, work: Callable[[], T], name: str, patience_s: float = math.inf) -> T:
        where = self.url / name if name else self.url
        pause_s = _FIRST_PAUSE_S
        if is_offline():
            raise UnreachableError(f"{where} cannot be reached: {OFFLINE} is set")
        deadline = monotonic() + patience_s
        for num_left in reversed(range(_NUM_TRIES)):
            try:
                with self._warn_if_slow(where):
                    return work()
            except MemmapError:
                raise
            except FileNotFoundError as error:
                raise StoreNotFoundError(
                    f"{where} does not exist: {describe_error(error)}"
                ) from error
            except Exception as error:  # Each library has its own errors.
                if _is_final(error):
                    raise StoreError(
                        f"{where} was rejected: {describe_error(error)}: check that the URL is"
                        " right, that there is room, that there are credentials with access to this"
                        " (for s3:// in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or in"
                        " ~/.aws), and that the server and the library of its protocol can do it"
                    ) from error
                if not num_left or monotonic() > deadline:
                    raise UnreachableError(
                        f"{where} cannot be reached: {describe_error(error)}: check that this"
                        " machine has a network, and that the address is right (for s3:// of"
                        " another provider, set AWS_ENDPOINT_URL); with"
                        f" {OFFLINE}=1, only the cache is used"
                    ) from error
                _log.warning("%s: %s: trying again", where, describe_error(error))
            sleep(pause_s)
            pause_s *= 2
        raise AssertionError


async def _read_part(system: Any, path: str, start: int, end: int) -> bytes:
    """Read part of a file over http(s), and one byte more if the server sends more.

    ``cat_file`` would read and decompress everything that a server sends, without limit.
    """
    from aiohttp import ClientTimeout  # Imported late: no other protocol needs it.

    session = await system.set_session()
    limits = ClientTimeout(total=_READ_S, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
    options = {**system.kwargs, "timeout": limits, "auto_decompress": False}
    options["headers"] = {
        **options.get("headers", {}),
        "Range": f"bytes={start}-{end - 1}",
        "Accept-Encoding": "identity",
    }
    async with session.get(system.encode_url(path), **options) as answer:
        if answer.status == 404:
            raise FileNotFoundError(path)
        if 400 <= answer.status < 500 and answer.status not in _TRANSIENT:
            raise PermissionError(f"{answer.status}, {answer.reason}")
        answer.raise_for_status()
        if (encoding := answer.headers.get("Content-Encoding", "identity")) != "identity":
            raise StoreError(
                f"{path}: the server compresses its answers ({encoding[:20]!r}), against the"
                " request. Switch that off for this directory"
            )
        data = bytearray()
        while len(data) <= end - start:
            if not (part := await answer.content.read(end - start + 1 - len(data))):
                break
            data += part
        return bytes(data)


def is_offline() -> bool:
    """Return whether the user has disabled reading from URLs."""
    return os.environ.get(OFFLINE, "").lower() not in ("", "0", "false", "no", "off")


def _is_final(error: Exception) -> bool:
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return is_full or isinstance(error, _FINAL) or "Credentials" in type(error).__name__
