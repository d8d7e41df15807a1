"""The members of a tar file, found by one scan of its headers that a cache keeps.

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
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
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
#: Errors in a header; the last two are a block of zeros and the end of the file.
_HEADER_ERROR = tarfile.HeaderError
_END = tarfile.EOFHeaderError  # type: ignore[attr-defined]
_EMPTY = tarfile.EmptyHeaderError  # type: ignore[attr-defined]
_log = logging.getLogger(__name__)


class Member(NamedTuple):
    """A member of a tar file."""

    ending: str
    """In lower case."""
    offset: int
    num_bytes: int


class TarIndex(msgspec.Struct, frozen=True):
    """The samples of a tar file. Arrays are the bytes of int64."""

    path: str
    """With its links resolved."""
    state: tuple[int, int]
    """Bytes and time of the file when it was scanned."""
    keys: bytes
    """The keys of all samples as UTF-8, concatenated."""
    key_ends: bytes
    member_ends: bytes
    """One past the last member of each sample."""
    names: list[str]
    """Each ending once."""
    endings: bytes
    """The number of each member's ending."""
    offsets: bytes
    sizes: bytes

    @property
    def num_samples(self) -> int:
        """How many samples the file has."""
        return len(self.key_ends) // 8

    def sample(self, row: int) -> tuple[str, list[Member]]:
        """Find a sample: its key and its members."""
        first, last = _bounds(self.key_ends, row)
        key = self.keys[first:last].decode("utf-8", "surrogateescape")
        members = slice(*_bounds(self.member_ends, row))
        columns = (_numbers(data)[members] for data in (self.endings, self.offsets, self.sizes))
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return key, [Member(self.names[ending], *where) for ending, *where in rows]

    def check(self) -> None:
        """Check that all numbers lie within the file: another program may have written them."""
        key_ends = _numbers(self.key_ends)
        member_ends = _numbers(self.member_ends)
        endings, offsets, sizes = map(_numbers, (self.endings, self.offsets, self.sizes))
        is_valid = (
            len(key_ends) == len(member_ends)
            and len(endings) == len(offsets) == len(sizes)
            and _ascend(key_ends, len(self.keys))
            and _ascend(member_ends, len(endings))
            and bool(((endings >= 0) & (endings < len(self.names))).all())
            and bool(((offsets >= 0) & (sizes >= 0) & (sizes <= self.state[0])).all())
            and bool((offsets <= self.state[0] - sizes).all())
        )
        if not is_valid:
            raise ValueError("its numbers do not fit the tar file")


def _numbers(data: bytes) -> NDArray[np.int64]:
    return np.frombuffer(data, np.int64)


def _bounds(ends: bytes, row: int) -> tuple[int, int]:
    numbers = _numbers(ends)
    return int(numbers[row - 1]) if row else 0, int(numbers[row])


def _ascend(ends: NDArray[np.int64], last: int) -> bool:
    return bool((np.diff(ends, prepend=0) >= 0).all()) and (ends[-1] if len(ends) else 0) == last


def index_tar(tar: str, advance: Callable[[int], None]) -> TarIndex:
    """Find the members of a tar file, from the cache if it has not changed since a scan.

    Args:
        tar: The path of the file.
        advance: Receives the bytes that are done.

    Raises:
        DatasetError: The file is damaged, or a sample has a member twice.
    """
    path = os.path.realpath(tar)
    state = get_file_state(os.stat(path))
    kept = _place_of(path)
    if kept is not None and (index := _load(kept, path, state)) is not None:
        advance(state[0])
        return index
    index = _scan(tar, path, state, advance)
    if kept is not None:
        _keep(index, kept)
    return index


def get_file_state(status: os.stat_result) -> tuple[int, int]:
    """Return bytes and time of a file."""
    return status.st_size, status.st_mtime_ns


def _place_of(path: str) -> Path | None:
    """Return the path of a tar file's index; None if others could change it."""
    directory = cache_directory() / "tars"
    with suppress(OSError):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.lstat(directory)
        is_mine = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o022
        if stat.S_ISDIR(status.st_mode) and is_mine:
            return directory / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.index"
    _log.info("%s: no index is kept in %s, to which this user alone must write", path, directory)
    return None


def _load(kept: Path, path: str, state: tuple[int, int]) -> TarIndex | None:
    try:
        data = read_plain(kept, _MAX_INDEX_BYTES)
        index = msgspec.msgpack.decode(data, type=TarIndex)
        if (index.path, index.state) != (path, state):
            return None
        index.check()
    except (OSError, StoreError, ValueError) as error:  # It is not there, or was damaged.
        if not isinstance(error, FileNotFoundError):
            _log.warning("%s is scanned again: its index %s is damaged: %s", path, kept, error)
        return None
    return index


def _keep(index: TarIndex, kept: Path) -> None:
    """Keep an index for the next process, where there is room for it."""
    temporary = kept.with_suffix(f".{os.getpid()}{TEMPORARY}")
    try:
        temporary.write_bytes(msgspec.msgpack.encode(index))
        os.replace(temporary, kept)
    except OSError as error:
        _log.warning("%s: its index isn't kept: %s", index.path, error)
        with suppress(OSError):
            temporary.unlink()


def _scan(tar: str, path: str, state: tuple[int, int], advance: Callable[[int], None]) -> TarIndex:
    keys = bytearray()
    key_ends: list[int] = []
    member_ends: list[int] = []
    names = dict[str, int]()
    columns = list[int](), list[int](), list[int]()
    done = 0
    for key, group in grouped(tar, headers(tar, state[0]), lambda _, member: member):
        for ending, member in group.items():
            numbers = names.setdefault(ending, len(names)), member.offset_data, member.size
            for column, number in zip(columns, numbers, strict=True):
                column.append(number)
            advance(member.offset_data + member.size - done)
            done = member.offset_data + member.size
        keys += key.encode("utf-8", "surrogateescape")
        key_ends.append(len(keys))
        member_ends.append(len(columns[0]))
    advance(state[0] - done)
    arrays = (np.array(column, np.int64).tobytes() for column in (key_ends, member_ends, *columns))
    ends, members, endings, offsets, sizes = arrays
    return TarIndex(path, state, bytes(keys), ends, members, [*names], endings, offsets, sizes)


def headers(tar: str, num_bytes: int) -> Iterator[tuple[str, tarfile.TarInfo]]:
    """Yield name and header of each plain file in a tar file that isn't compressed."""
    for member in iterate_members(tar, "r:"):
        if member.issparse():
            raise DatasetError(
                f"{tar}: {member.name!r} is a sparse file, whose bytes lie apart: read it with"
                " TarStream, or write the tar file without --sparse"
            )
        if member.offset_data + member.size > num_bytes:
            check_size(tar, member.name, member.size)
            raise make_truncated_error(tar, member.name)
        yield member.name, member


def grouped(
    tar: str, members: Iterator[tuple[str, Any]], take: Callable[[str, Any], Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the key of each sample, and by ending what was taken of its members.

    Args:
        tar: The path of the tar file.
        members: Names and members. The members of a sample are neighbours.
        take: Receives an ending and a member before the next member is read.
    """
    named = ((NAME.fullmatch(name), name, member) for name, member in members)
    with_ending = ((match, name, member) for match, name, member in named if match)
    for key, group in groupby(with_ending, lambda member: member[0][1]):
        taken: dict[str, Any] = {}
        for match, name, member in group:
            ending = match[2].lower()
            if ending in taken:
                raise DatasetError(f"{tar}: {name!r}: the sample {key!r} has two such members")
            taken[ending] = take(ending, member)
        yield key, taken


def iterate_members(
    tar: str, mode: Any, opened: list[tarfile.TarFile] | None = None
) -> Iterator[Any]:
    """Yield the header of each plain file in a tar file.

    Args:
        tar: Its path.
        mode: As `tarfile.open` takes it.
        opened: Receives the open file, to read members while they are iterated over.
    """
    name = "its first member"
    try:
        with tarfile.open(tar, mode, tarinfo=_Header) as file:
            if opened is not None:
                opened.append(file)
            for member in file:
                name = member.name
                # Links and devices are none.
                if member.isreg() and not _META.match(name):
                    yield member
                # Otherwise the list of members grows with the file.
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
    """A tar file ends after a member, without a block of zeros: others may have followed."""


class _Header(tarfile.TarInfo):
    """The header of a member, which is whole."""

    @classmethod
    @override
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> "_Header":
        try:
            return super().fromtarfile(tarfile)
        except _EMPTY as error:
            if tarfile.offset == 0:  # So is the file.
                raise
            raise _NoEndError from error
        except _END:
            raise
        except _HEADER_ERROR as error:
            raise ValueError(f"a damaged header at byte {tarfile.offset}: {error}") from error


def check_size(tar: str, name: str, num_bytes: int) -> None:
    """Check that a member is not too large to be read."""
    if num_bytes > MAX_MEMBER_BYTES:
        raise DatasetError(
            f"{tar}: {name!r} has {num_bytes} bytes, and at most {MAX_MEMBER_BYTES} are read"
        )


def make_truncated_error(tar: str, name: str) -> DatasetError:
    """Make the error for a member whose last bytes are missing."""
    return DatasetError(f"{tar}: {name!r} is cut short: the tar file is damaged")


@dataclass(frozen=True, eq=False)
class TarIndices:
    """The samples of several tar files, one file after the other."""

    tars: tuple[str, ...]
    indices: tuple[TarIndex, ...]
    ends: NDArray[np.int64]
    """One past the last sample of each file."""

    @classmethod
    def of(cls, tars: tuple[str, ...], advance: Callable[[int], None]) -> "TarIndices":
        """Index tar files."""
        indices = tuple(index_tar(tar, advance) for tar in tars)
        return cls(tars, indices, np.cumsum([index.num_samples for index in indices]))

    @property
    def num_samples(self) -> int:
        """The samples of all files."""
        return int(self.ends[-1])

    def sample(self, row: int) -> tuple[str, str, dict[str, Callable[[], bytes]]]:
        """Find a sample: its tar file, its key, and by ending what reads its members."""
        number = int(np.searchsorted(self.ends, row, side="right"))
        index = self.indices[number]
        tar = self.tars[number]
        key, members = index.sample(row - int(self.ends[number]) + index.num_samples)
        read = partial(_read, tar, index.state, key)
        return tar, key, {member.ending: partial(read, member) for member in members}


def _read(tar: str, state: tuple[int, int], key: str, member: Member) -> bytes:
    name = f"{key}.{member.ending}"
    try:
        with closing(open(tar, "rb", buffering=0)) as file:
            if get_file_state(os.fstat(file.fileno())) != state:
                raise DatasetError(
                    f"{tar} has changed since it was indexed: make the dataset again"
                )
            check_size(tar, name, member.num_bytes)
            data = os.pread(file.fileno(), member.num_bytes, member.offset)
    except OSError as error:
        raise DatasetError(f"{tar}: {name!r} cannot be read: {describe_error(error)}") from None
    if len(data) != member.num_bytes:
        raise make_truncated_error(tar, name)
    return data
