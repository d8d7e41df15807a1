"""Samples in tar files, as WebDataset writes them."""

import io
import json
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from glob import glob
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from typing_extensions import override

from lightning_memmap.errors import DatasetError, describe_error
from lightning_memmap.images import checked_decoding, decode_image
from lightning_memmap.store.places import local_path

#: The key of a sample and the ending of a member: everything up to, and after, the first dot of
#: the name without its folders.
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)
#: Members of WebDataset itself.
_META = re.compile(r"__[^/]*__(/|$)")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
#: The largest member that is read.
_MAX_MEMBER_BYTES = 2**29
#: The most tar files that a pattern in braces stands for.
_MAX_TARS = 2**20
#: What marks the end of a tar file, and what is any other error in a header.
_HEADER_ERROR = tarfile.HeaderError
_ENDS = (tarfile.EOFHeaderError, tarfile.EmptyHeaderError)  # type: ignore[attr-defined]
_IMAGES = ("jpg", "jpeg", "png", "webp", "ppm", "pgm")
_PICKLES = ("pyd", "pickle", "pkl", "pth", "pt")


class TarDataset(IterableDataset[dict[str, Any]]):
    """An iterable dataset of the samples in tar files that WebDataset has written.

    The members of one sample follow one another: ``photos/0001.jpg`` and ``photos/0001.cls`` make
    the sample ``{"__key__": "photos/0001", "jpg": ..., "cls": ...}``. The key ends at the first dot
    of the name without its folders; endings are in lower case. What a member becomes depends on the
    last part of its ending:

    - ``cls``, ``cls2``, ``class``, ``index``, ``inx``, ``id``, ``count``: an int
    - ``txt``, ``text``, ``transcript``: a str, from UTF-8
    - ``json``, ``jsn``: what the JSON says
    - ``npy``: a numpy array
    - ``jpg``, ``jpeg``, ``png``, ``webp``, ``ppm``, ``pgm``: bytes, or with ``mode`` a uint8 tensor
      of shape (channels, height, width)
    - ``pyd``, ``pkl``, ``pickle``, ``pth``, ``pt``: refused, since unpickling can run code
    - others: bytes

    Nothing is extracted to the disk. Links, folders and members without an ending are left out.

    Args:
        tars: The tar files, which may be compressed: a path, which may have ``{000..003}``,
            ``{train,extra}`` or ``*`` in it, or a list of such. They are read in this order; those
            that ``*`` stands for, sorted by name.
        fields: What a sample consists of, by name of the field: an ending, or several of which
            each sample has one, such as ``{"image": "jpg;png", "label": "cls"}``. ``__key__``
            stands for the key. By default a sample has its key and all its members. Other members
            are not read.
        mode: As of `lightning_memmap.schema.Decode`: images are decoded. By default they stay
            encoded.
        size: As there.

    Attributes:
        tars: The path of each tar file.
        sizes: The bytes of each tar file: if they change, it is another dataset.

    Raises:
        FileNotFoundError: A tar file is not there.
        ValueError: No file fits a pattern, a pattern is wrong, or an argument is out of range.
    """

    def __init__(
        self,
        tars: str | Path | list[str | Path],
        fields: dict[str, str] | None = None,
        mode: str | None = None,
        size: int | tuple[int, int] | None = None,
    ) -> None:
        given = [tars] if isinstance(tars, (str, Path)) else list(tars)
        self.tars = [str(path) for pattern in given for path in _paths(str(pattern))]
        if not self.tars:
            raise ValueError(f"tars={tars!r}: there are none: give at least one")
        self.sizes = [Path(path).stat().st_size for path in self.tars]
        self.fields = None if fields is None else dict(fields)
        self.mode = mode
        self.size = checked_decoding(mode, size)

    @override
    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over the samples of all tar files.

        Yields:
            The samples, in their order.

        Raises:
            DatasetError: A tar file is damaged, a member cannot be read, is refused, or is there
                twice in a sample, or a sample lacks a field. The message names file and member.
        """
        for tar in self.tars:
            named = ((_NAME.fullmatch(name), name, read) for name, read in _members(tar))
            with_ending = ((match, name, read) for match, name, read in named if match)
            for key, group in groupby(with_ending, lambda member: member[0][1]):
                yield self._sample(tar, key, self._wanted(tar, key, group))

    def _wanted(self, tar: str, key: str, group: Iterable[Any]) -> dict[str, bytes]:
        """The members of a sample that are wanted, by ending."""
        wanted = None if self.fields is None else ";".join(self.fields.values()).split(";")
        members: dict[str, bytes] = {}
        for match, name, read in group:
            ending = match[2].lower()
            if ending in members:
                raise DatasetError(f"{tar}: {name!r}: the sample {key!r} has two such members")
            if wanted is None or ending in wanted:
                members[ending] = read()
        return members

    def _sample(self, tar: str, key: str, members: Mapping[str, bytes]) -> dict[str, Any]:
        if self.fields is None:
            decoded = {ending: self._value(tar, key, ending, members[ending]) for ending in members}
            return {"__key__": key, **decoded}
        sample: dict[str, Any] = {}
        for field, endings in self.fields.items():
            if endings == "__key__":
                sample[field] = key
                continue
            found = [ending for ending in endings.split(";") if ending in members]
            if len(found) != 1:
                raise DatasetError(
                    f"{tar}: the sample {key!r} has {len(found)} members {endings!r} for the field"
                    f" {field!r}, and each sample must have one"
                )
            sample[field] = self._value(tar, key, found[0], members[found[0]])
        return sample

    def _value(self, tar: str, key: str, ending: str, data: bytes) -> Any:
        kind = ending.rpartition(".")[2]
        where = f"{tar}: '{key}.{ending}'"
        if kind in _PICKLES:
            raise DatasetError(
                f"{where}: a .{kind} file is unpickled, which can run any code, and is never read:"
                " write the values as .npy or .json, or name the members to read with fields={...}"
            )
        try:
            if kind in _IMAGES and self.mode is not None:
                pixels = decode_image(data, self.mode, self.size)
                return torch.from_numpy(np.array(pixels, order="C"))
            return _READERS.get(kind, bytes)(data)
        except Exception as error:
            raise DatasetError(f"{where} cannot be read: {describe_error(error)}") from None


_READERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), int),
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    **dict.fromkeys(("json", "jsn"), json.loads),
    "npy": lambda data: np.load(io.BytesIO(data), allow_pickle=False),
}


def _members(tar: str) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """The name of each plain file in a tar file, and a function that reads it."""
    name = "its first member"
    try:
        with tarfile.open(tar, "r|*", tarinfo=_Member) as file:
            for member in file:
                name = member.name
                # Links and devices are none.
                if member.isreg() and not _META.match(name):
                    yield name, partial(_read, tar, file, member)
                # Otherwise the list of members grows with the file.
                file.members = []  # type: ignore[attr-defined]
    except DatasetError:
        raise
    except Exception as error:  # Each compression has its own errors.
        raise DatasetError(f"{tar}, at {name!r}: {describe_error(error)}") from None


class _Member(tarfile.TarInfo):
    """A member of a tar file whose header is whole."""

    @classmethod
    @override
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> "_Member":
        try:
            return super().fromtarfile(tarfile)
        except _ENDS:
            raise
        except _HEADER_ERROR as error:
            raise ValueError(f"a damaged header at byte {tarfile.offset}: {error}") from error


def _read(tar: str, file: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    where = f"{tar}: {member.name!r}"
    if member.size > _MAX_MEMBER_BYTES:
        raise DatasetError(
            f"{where} has {member.size} bytes, and at most {_MAX_MEMBER_BYTES} are read"
        )
    try:
        source = file.extractfile(member)
        data = b"" if source is None else source.read()
    except Exception as error:  # As above.
        raise DatasetError(f"{where} cannot be read: {describe_error(error)}") from None
    if len(data) != member.size:
        raise DatasetError(f"{where} is cut short: the tar file is damaged")
    return data


def _paths(pattern: str) -> list[str]:
    """The tar files that a pattern stands for."""
    if "://" in pattern or pattern.startswith("pipe:"):
        raise ValueError(f"tars={pattern!r}: give files of this machine")
    paths = []
    for path in _expanded(str(local_path(pattern))):
        found = sorted(glob(path)) if re.search(r"[*?[]", path) else [path]
        if not found:
            raise ValueError(f"tars={pattern!r}: no file fits {path!r}")
        paths += found
    return paths


def _expanded(pattern: str) -> list[str]:
    """A pattern without braces for each choice that its braces stand for, as of a shell."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    if "{" in pattern[: match.start()]:
        raise ValueError(f"tars={pattern!r}: braces within braces: give a list of patterns")
    if numbers := _RANGE.fullmatch(match[1]):
        first, last = numbers.groups()
        if int(last) < int(first) or int(last) - int(first) >= _MAX_TARS:
            raise ValueError(f"tars={pattern!r}: {match[0]} is no range such as {{000..003}}")
        choices = [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    else:
        choices = match[1].split(",")
    before, after = pattern[: match.start()], pattern[match.end() :]
    return [path for choice in choices for path in _expanded(f"{before}{choice}{after}")]
