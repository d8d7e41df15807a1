"""Datasets of the samples in tar files that WebDataset has written."""

import io
import json
import operator
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset
from typing_extensions import override

from lightning_memmap.errors import DatasetError, describe_error
from lightning_memmap.images import decode_image, parse_decoding
from lightning_memmap.store.paths import local_path
from lightning_memmap.store.progress import show_progress
from lightning_memmap.store.sources.tar_index import (
    TarIndices,
    check_size,
    group_members,
    iterate_members,
    make_truncated_error,
)

_RANGE = re.compile(r"(\d+)\.\.(\d+)")
#: The most tar files that a pattern in braces may name.
_MAX_TARS = 2**20
#: A scan of more bytes than this shows its progress.
_SHOWN_BYTES = 2**31
#: The first bytes of compressed files: gzip, bzip2, xz, zstd.
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")
_IMAGES = ("jpg", "jpeg", "png", "webp", "ppm", "pgm")
_PICKLES = ("pyd", "pickle", "pkl", "pth", "pt")


class _TarSamples:
    """Samples in tar files; see `TarDataset`. Subclasses find the members of each sample."""

    def __init__(
        self,
        tars: str | Path | list[str | Path],
        fields: dict[str, str] | None = None,
        mode: str | None = None,
        size: int | tuple[int, int] | None = None,
    ) -> None:
        patterns = [tars] if isinstance(tars, (str, Path)) else list(tars)
        self.tars = [str(path) for pattern in patterns for path in _find_paths(str(pattern))]
        if not self.tars:
            raise ValueError(f"tars={tars!r} is empty: pass at least one")
        self.sizes = [Path(path).stat().st_size for path in self.tars]
        self.fields = None if fields is None else dict(fields)
        self.mode = mode
        self.size = parse_decoding(mode, size)

    def _is_used(self, ending: str) -> bool:
        """Return whether members with an ending are part of a sample."""
        return self.fields is None or any(
            ending in endings.split(";") for endings in self.fields.values()
        )

    def _make_sample(self, tar: str, key: str, members: Mapping[str, bytes]) -> dict[str, Any]:
        if self.fields is None:
            decoded = {
                ending: self._decode(tar, key, ending, members[ending]) for ending in members
            }
            return {"__key__": key, **decoded}
        sample: dict[str, Any] = {}
        for field, endings in self.fields.items():
            if endings == "__key__":
                sample[field] = key
                continue
            present = [ending for ending in endings.split(";") if ending in members]
            if len(present) != 1:
                raise DatasetError(
                    f"{tar}: the sample {key!r} has {len(present)} members {endings!r} for the"
                    f" field {field!r}, and each sample must have one"
                )
            sample[field] = self._decode(tar, key, present[0], members[present[0]])
        return sample

    def _decode(self, tar: str, key: str, ending: str, data: bytes) -> Any:
        extension = ending.rpartition(".")[2]
        where = f"{tar}: '{key}.{ending}'"
        if extension in _PICKLES:
            raise DatasetError(
                f"{where}: a .{extension} file is unpickled, which can run any code, and is never"
                " read: write the values as .npy or .json, or name the members to read with"
                " fields={...}"
            )
        try:
            if extension in _IMAGES and self.mode is not None:
                pixels = decode_image(data, self.mode, self.size)
                return torch.from_numpy(np.array(pixels, order="C"))
            return _READERS.get(extension, bytes)(data)
        except Exception as error:
            raise DatasetError(f"{where} cannot be read: {describe_error(error)}") from None


class TarDataset(_TarSamples, Dataset[dict[str, Any]]):
    """A map-style dataset of the samples in tar files that WebDataset has written.

    The members of one sample follow one another: ``photos/0001.jpg`` and ``photos/0001.cls`` make
    the sample ``{"__key__": "photos/0001", "jpg": ..., "cls": ...}``. The key ends at the first dot
    of the name without its folders; endings are in lower case. The last part of the ending decides
    the type of a member:

    - ``cls``, ``cls2``, ``class``, ``index``, ``inx``, ``id``, ``count``: an int
    - ``txt``, ``text``, ``transcript``: a str, from UTF-8
    - ``json``, ``jsn``: the value that the JSON encodes
    - ``npy``: a numpy array
    - ``jpg``, ``jpeg``, ``png``, ``webp``, ``ppm``, ``pgm``: bytes, or with ``mode`` a uint8 tensor
      of shape (channels, height, width)
    - ``pyd``, ``pkl``, ``pickle``, ``pth``, ``pt``: an error, because unpickling can run code
    - others: bytes

    The first use scans the headers of each tar file, and caches the offsets of its members: in
    ``tars`` in the directory that the environment variable ``LIGHTNING_MEMMAP_CACHE`` names, by
    default ``~/.cache/lightning_memmap``. A file whose size or time changes is scanned again.
    Nothing is extracted to the disk. Links, folders and members without an ending are skipped.

    Args:
        tars: The uncompressed tar files: a path or a list of paths, which may contain
            ``{000..003}``, ``{train,extra}`` or ``*``. They are read in this order, and the files
            that match a ``*`` are sorted by name.
        fields: The members of a sample, by field: an ending, or several endings of which each
            sample has one, such as ``{"image": "jpg;png", "label": "cls"}``. ``__key__`` is the
            key. Other members are not read. By default, a sample has its key and all its members.
        mode: Decode images in this mode; see `lightning_memmap.schema.Decode`. By default they stay
            encoded.
        size: Size of decoded images; see `lightning_memmap.schema.Decode`.

    Attributes:
        tars: The path of each tar file.
        sizes: The bytes of each tar file. If they change, it is another dataset.

    Raises:
        FileNotFoundError: A tar file does not exist.
        ValueError: No file matches a pattern, a pattern is invalid, a file is compressed, or an
            argument is out of range.
    """

    def __init__(
        self,
        tars: str | Path | list[str | Path],
        fields: dict[str, str] | None = None,
        mode: str | None = None,
        size: int | tuple[int, int] | None = None,
    ) -> None:
        super().__init__(tars, fields, mode, size)
        for tar in self.tars:
            with open(tar, "rb") as file:
                if file.read(6).startswith(_COMPRESSED):
                    raise ValueError(
                        f"tars: {tar!r} is compressed, so its members can't be found by their"
                        " offsets: decompress it, or use lightning_memmap.store.TarStream"
                    )
        # The identity of the dataset skips private attributes of this type.
        self._indices: TarIndices | None = None

    def _get_indices(self) -> TarIndices:
        if self._indices is None:
            num_bytes = sum(self.sizes)
            hidden = num_bytes < _SHOWN_BYTES
            with show_progress("indexing", num_bytes, 1, hidden=hidden) as advance:
                self._indices = TarIndices(self.tars, advance)
        return self._indices

    def __len__(self) -> int:
        """Count the samples. The first call may scan the tar files.

        Raises:
            DatasetError: A tar file is damaged, or has a member twice in a sample. The message
                names file and member.
        """
        return self._get_indices().num_samples

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Read a sample.

        Raises:
            IndexError: The row is out of range.
            DatasetError: As for the length; or a member cannot be read or decoded, a sample lacks
                a field, or the tar file has changed.
        """
        index = operator.index(row)
        count = len(self)
        if not -count <= index < count:
            raise IndexError(f"row {row}: the tar files have {count} samples")
        return self._make_sample(*self._get_indices().read(index % count, self._is_used))


class TarStream(_TarSamples, IterableDataset[dict[str, Any]]):
    """An iterable dataset of the samples in tar files, read from the first member to the last.

    Use it for tar files that are compressed or hold sparse files. `TarDataset` describes its
    arguments and samples.
    """

    @override
    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over the samples of all tar files.

        Yields:
            The samples, in their order.

        Raises:
            DatasetError: A tar file is damaged, a member cannot be read or decoded, or is in a
                sample twice, or a sample lacks a field. The message names file and member.
        """
        for tar in self.tars:
            opened: list[tarfile.TarFile] = []
            members = ((member.name, member) for member in iterate_members(tar, "r|*", opened))

            def read(
                ending: str, member: tarfile.TarInfo, tar: str = tar, opened: Any = opened
            ) -> bytes | None:
                return _read_member(tar, opened[0], member) if self._is_used(ending) else None

            for key, group in group_members(tar, members, read):
                by_ending = {ending: data for ending, data in group.items() if data is not None}
                yield self._make_sample(tar, key, by_ending)


_READERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), int),
    **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
    **dict.fromkeys(("json", "jsn"), json.loads),
    "npy": lambda data: np.load(io.BytesIO(data), allow_pickle=False),
}


def _read_member(tar: str, file: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    check_size(tar, member.name, member.size)
    try:
        source = file.extractfile(member)
        data = b"" if source is None else source.read()
    except Exception as error:  # Each compression has its own errors.
        where = f"{tar}: {member.name!r}"
        raise DatasetError(f"{where} cannot be read: {describe_error(error)}") from None
    if len(data) != member.size:
        raise make_truncated_error(tar, member.name)
    return data


def _find_paths(pattern: str) -> list[str]:
    """List the tar files that a pattern names."""
    if "://" in pattern or pattern.startswith("pipe:"):
        raise ValueError(f"tars={pattern!r}: pass files on this machine")
    paths = []
    for path in _expand_braces(str(local_path(pattern))):
        matches = sorted(glob(path)) if re.search(r"[*?[]", path) else [path]
        if not matches:
            raise ValueError(f"tars={pattern!r}: no file matches {path!r}")
        paths += matches
    return paths


def _expand_braces(pattern: str) -> list[str]:
    """Return a pattern with its braces replaced by each of their choices, as in a shell."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    if "{" in pattern[: match.start()]:
        raise ValueError(f"tars={pattern!r}: braces within braces: pass a list of patterns")
    if numbers := _RANGE.fullmatch(match[1]):
        first, last = numbers.groups()
        if int(last) < int(first) or int(last) - int(first) >= _MAX_TARS:
            raise ValueError(f"tars={pattern!r}: {match[0]} isn't a range such as {{000..003}}")
        choices = [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    else:
        choices = match[1].split(",")
    before = pattern[: match.start()]
    after = pattern[match.end() :]
    return [path for choice in choices for path in _expand_braces(f"{before}{choice}{after}")]
