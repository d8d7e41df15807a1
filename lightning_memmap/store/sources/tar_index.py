"""The members of a tar file, found by one scan of its headers and cached.

    members  a.jpg a.cls b.jpg     sample  key  members     member   ending  offset  bytes
                                     0     "a"   0, 1          0      "jpg"     512   9000
                                     1     "b"   2             1      "cls"   10240      1
                                                               2      "jpg"   11264   8000

A scan reads a header of 512 bytes for each member and skips its data.
"""

import hashlib
import logging
import os
import re
import stat
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from typing_extensions import override

from lightning_memmap.errors import DatasetError, StoreError, describe_error
from lightning_memmap.store.files import TEMPORARY, read_plain
from lightning_memmap.store.paths import cache_directory

#: The key of a sample and the ending of a member: everything up to, and after, the first dot of
#: the name without its folders.
NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)
#: Members of WebDataset itself.
_META = re.compile(r"__[^/]*__(/|$)")
#: The largest member that is read, and the largest index.
MAX_MEMBER_BYTES = 2**29
_MAX_INDEX_BYTES = 2**31
#: A cached index begins with its digest.
_DIGEST_BYTES = 8
#: Errors in a header; the last two are a block of zeros and the end of the file.
_HEADER_ERROR = tarfile.HeaderError
_END = tarfile.EOFHeaderError  # type: ignore[attr-defined]
_EMPTY = tarfile.EmptyHeaderError  # type: ignore[attr-defined]
_log = logging.getLogger(__name__)


class TarIndex(msgspec.Struct, frozen=True):
    """The samples of a tar file. Arrays are the bytes of int64."""

    path: str
    """The path, with links resolved."""
    state: tuple[int, int]
    """Bytes and modification time of the file when it was scanned."""
    keys: bytes
    """The keys of all samples as UTF-8, concatenated."""
    samples: bytes
    """One past the last byte of the key and one past the last member, of shape (samples, 2)."""
    endings: list[str]
    """Each ending once, in lower case."""
    members: bytes
    """The number of the ending, the offset and the bytes, of shape (members, 3)."""

    @property
    def num_samples(self) -> int:
        """The number of samples in the file."""
        return len(self.samples) // 16

    def sample(self, row: int) -> tuple[str, list[list[int]]]:
        """Return the key of a sample, and the row of each of its members in ``members``."""
        stops = np.frombuffer(self.samples, np.int64).reshape(-1, 2)
        key_start, start = stops[row - 1].tolist() if row else (0, 0)
        key_stop, stop = stops[row].tolist()
        members = np.frombuffer(self.members, np.int64).reshape(-1, 3)
        key = self.keys[key_start:key_stop].decode("utf-8", "surrogateescape")
        return key, members[start:stop].tolist()


def index_tar(tar: str, advance: Callable[[int], None]) -> TarIndex:
    """Find the members of a tar file, from the cache if it has not changed since a scan.

    Args:
        tar: The path of the file.
        advance: Called with the number of bytes scanned since the last call.

    Raises:
        DatasetError: The file is damaged, or a sample has a member twice.
    """
    path = os.path.realpath(tar)
    state = get_file_state(os.stat(path))
    cache = _find_cache_file(path)
    if cache is not None and (index := _load(cache, path, state)) is not None:
        advance(state[0])
        return index
    index = _scan(tar, path, state, advance)
    if cache is not None:
        _save(index, cache)
    return index


def get_file_state(status: os.stat_result) -> tuple[int, int]:
    """Return the bytes and the modification time of a file."""
    return status.st_size, status.st_mtime_ns


def _find_cache_file(path: str) -> Path | None:
    """Return the path of a tar file's cached index; None if other users could change it."""
    directory = cache_directory() / "tars"
    with suppress(OSError):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.lstat(directory)
        is_ours = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o022
        if stat.S_ISDIR(status.st_mode) and is_ours:
            return directory / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.index"
    _log.info(
        "%s: its index isn't cached in %s: only this user may have write access there",
        path,
        directory,
    )
    return None


def _load(cache: Path, path: str, state: tuple[int, int]) -> TarIndex | None:
    try:
        data = read_plain(cache, _MAX_INDEX_BYTES)
        if xxhash.xxh3_64_digest(data[_DIGEST_BYTES:]) != data[:_DIGEST_BYTES]:
            raise ValueError("its digest does not match its content")
        index = msgspec.msgpack.decode(data[_DIGEST_BYTES:], type=TarIndex)
    except FileNotFoundError:
        return None
    except (OSError, StoreError, ValueError) as error:
        _log.warning("%s is scanned again: its index %s is damaged: %s", path, cache, error)
        return None
    return index if (index.path, index.state) == (path, state) else None


def _save(index: TarIndex, cache: Path) -> None:
    """Cache an index for the next process, if there is disk space for it."""
    temporary = cache.with_suffix(f".{os.getpid()}{TEMPORARY}")
    data = msgspec.msgpack.encode(index)
    try:
        temporary.write_bytes(xxhash.xxh3_64_digest(data) + data)
        os.replace(temporary, cache)
    except OSError as error:
        _log.warning("%s: its index isn't cached: %s", index.path, error)
        with suppress(OSError):
            temporary.unlink()


def _scan(tar: str, path: str, state: tuple[int, int], advance: Callable[[int], None]) -> TarIndex:
    keys = bytearray()
    samples: list[tuple[int, int]] = []
    endings = dict[str, int]()
    members: list[tuple[int, int, int]] = []
    done = 0
    for key, group in group_members(tar, iterate_headers(tar, state[0]), lambda _, member: member):
        for ending, member in group.items():
            ending_index = endings.setdefault(ending, len(endings))
            members.append((ending_index, member.offset_data, member.size))
            advance(member.offset_data + member.size - done)
            done = member.offset_data + member.size
        keys += key.encode("utf-8", "surrogateescape")
        samples.append((len(keys), len(members)))
    advance(state[0] - done)
    sample_bytes, member_bytes = (np.array(rows, np.int64).tobytes() for rows in (samples, members))
    return TarIndex(path, state, bytes(keys), sample_bytes, [*endings], member_bytes)


def iterate_headers(tar: str, num_bytes: int) -> Iterator[tuple[str, tarfile.TarInfo]]:
    """Yield the name and the header of each plain file in an uncompressed tar file."""
    for member in iterate_members(tar, "r:"):
        if member.issparse():
            raise DatasetError(
                f"{tar}: {member.name!r} is a sparse file, which isn't contiguous: read it with"
                " TarStream, or write the tar file without --sparse"
            )
        if member.offset_data + member.size > num_bytes:
            check_size(tar, member.name, member.size)
            raise make_truncated_error(tar, member.name)
        yield member.name, member


def group_members(
    tar: str, members: Iterator[tuple[str, Any]], read: Callable[[str, Any], Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the key of each sample, and the values of its members by ending.

    Args:
        tar: The path of the tar file.
        members: Names and members. The members of a sample follow one another.
        read: Returns the value of an ending and a member. Called before the next member is read.
    """
    named = ((NAME.fullmatch(name), name, member) for name, member in members)
    with_ending = ((match, name, member) for match, name, member in named if match)
    for key, group in groupby(with_ending, lambda member: member[0][1]):
        values: dict[str, Any] = {}
        for match, name, member in group:
            ending = match[2].lower()
            if ending in values:
                raise DatasetError(f"{tar}: {name!r}: the sample {key!r} has two such members")
            values[ending] = read(ending, member)
        yield key, values


def iterate_members(
    tar: str, mode: Any, opened: list[tarfile.TarFile] | None = None
) -> Iterator[Any]:
    """Yield the header of each plain file in a tar file.

    Args:
        tar: The path of the file.
        mode: The mode of `tarfile.open`.
        opened: A list to append the open file to, so that members can be read during iteration.
    """
    name = "its first member"
    try:
        with tarfile.open(tar, mode, tarinfo=_Header) as file:
            if opened is not None:
                opened.append(file)
            for member in file:
                name = member.name
                # Skip links and devices.
                if member.isreg() and not _META.match(name):
                    yield member
                # Otherwise the list of members would grow with the file.
                file.members = []  # type: ignore[attr-defined]
    except DatasetError:
        raise
    except _NoEndError:
        raise DatasetError(
            f"{tar}: nothing follows {name!r}, not even the zero bytes that end a tar file: it may"
            " be truncated: write it again, or append 1024 zero bytes if it is complete"
        ) from None
    except Exception as error:  # Each compression has its own errors.
        raise DatasetError(f"{tar}, at {name!r}: {describe_error(error)}") from None


class _NoEndError(Exception):
    """A tar file ends without a block of zeros, so that members may be missing."""


class _Header(tarfile.TarInfo):
    """The header of a member, which raises an error if it is damaged or missing."""

    @classmethod
    @override
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> "_Header":
        try:
            return super().fromtarfile(tarfile)
        except _EMPTY as error:
            if tarfile.offset == 0:  # The file is empty.
                raise
            raise _NoEndError from error
        except _END:
            raise
        except _HEADER_ERROR as error:
            raise ValueError(f"a damaged header at byte {tarfile.offset}: {error}") from error


def check_size(tar: str, name: str, num_bytes: int) -> None:
    """Check that a member is small enough to be read."""
    if num_bytes > MAX_MEMBER_BYTES:
        raise DatasetError(
            f"{tar}: {name!r} has {num_bytes} bytes: at most {MAX_MEMBER_BYTES} are read"
        )


def make_truncated_error(tar: str, name: str) -> DatasetError:
    """Make the error for a member whose last bytes are missing."""
    return DatasetError(f"{tar}: {name!r} is truncated: the tar file is damaged")


class TarIndices:
    """The samples of several tar files, concatenated.

    Args:
        tars: The paths of the files.
        advance: Called with the number of bytes scanned since the last call.
    """

    def __init__(self, tars: Sequence[str], advance: Callable[[int], None]) -> None:
        self._tars = tars
        self._indices = [index_tar(tar, advance) for tar in tars]
        #: One past the last sample of each file.
        self._stops = np.cumsum([index.num_samples for index in self._indices])

    @property
    def num_samples(self) -> int:
        """The number of samples in all files."""
        return int(self._stops[-1])

    def read(self, row: int, is_used: Callable[[str], bool]) -> tuple[str, str, dict[str, bytes]]:
        """Return the tar file and the key of a sample, and its members with the endings in use."""
        tar_index = int(np.searchsorted(self._stops, row, side="right"))
        index = self._indices[tar_index]
        tar = self._tars[tar_index]
        key, members = index.sample(row - int(self._stops[tar_index]) + index.num_samples)
        sample = dict[str, bytes]()
        try:
            with closing(open(tar, "rb", buffering=0)) as file:
                if get_file_state(os.fstat(file.fileno())) != index.state:
                    raise DatasetError(
                        f"{tar} has changed since it was indexed: create the dataset again"
                    )
                for ending_index, offset, num_bytes in members:
                    ending = index.endings[ending_index]
                    name = f"{key}.{ending}"
                    if not is_used(ending):
                        continue
                    check_size(tar, name, num_bytes)
                    data = os.pread(file.fileno(), num_bytes, offset)
                    if len(data) != num_bytes:
                        raise make_truncated_error(tar, name)
                    sample[ending] = data
        except OSError as error:
            raise DatasetError(f"{tar}: {key!r} cannot be read: {describe_error(error)}") from None
        return tar, key, sample
