"""What distinguishes a dataset from others, in named parts, without reading a row."""

import enum
import inspect
import json
import os
import sys
import types
from array import array
from collections import deque
from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_memmap.store.sources.stream import is_stream

#: The most characters of the name of a part, and of the part.
MAX_TEXT_LENGTH = 1024
_PLAIN_TYPES = {int, float, str, bool, type(None)}
#: Classes of these modules are identified by their name: they change with a release, not with a
#: dataset.
_KNOWN_MODULES = {*sys.stdlib_module_names, "torch", "numpy", "lightning"}
_MAX_DEPTH = 8
_MAX_PARTS = 512
_MAX_ITEMS = 2**20
#: Arrays are hashed whole until this many bytes have been hashed, and in pieces from then on.
_MAX_HASHED_BYTES = 2**26
_NUM_PIECES, _PIECE_BYTES = 64, 2**20
#: Private attributes of other types, such as open files, may be made only when first needed.
_SETTLED_TYPES = (
    str, bytes, bytearray, int, float, complex, os.PathLike, memoryview, array, types.FunctionType,
    tuple, list, dict, set, frozenset, deque, np.ndarray, np.generic, Tensor, Dataset,
)  # fmt: skip


def parts_of(dataset: Any) -> dict[str, str]:
    """Take the parts of a dataset.

    Returns:
        A text or digest by what it describes.

    Raises:
        TypeError: The dataset has no length, and is none that is iterated over.
    """
    reader = _Reader()
    if not is_stream(dataset):
        reader.parts["its length"] = str(len(dataset))
    reader.read(dataset, "", 0)
    return reader.parts


class _Reader:
    """Collects the parts of a dataset, and of the datasets in it."""

    def __init__(self) -> None:
        self.parts: dict[str, str] = {}
        self._seen: set[int] = set()
        self._objects: dict[int, Any] = {}
        self._bytes_left = _MAX_HASHED_BYTES
        self._encoder = json.JSONEncoder(default=self._describe)

    def read(self, dataset: Any, prefix: str, depth: int) -> None:
        """Add the parts of a dataset.

        Args:
            dataset: The dataset.
            prefix: What comes before the names of its attributes.
            depth: Datasets that contain it.
        """
        if id(dataset) in self._seen:
            return
        self._seen.add(id(dataset))
        kind = type(dataset)
        # Without its module, whose name depends on whether the file is run or imported.
        self._add(f"class of {prefix[:-1]}" if prefix else "its class", kind.__qualname__)
        for base in kind.__mro__:
            if (source := _source(base)) is not None:
                self._add(f"source of class {base.__qualname__}", _digest(source))
        if isinstance(dataset, (list, tuple, dict, deque, array, Tensor, np.ndarray)):
            self._add("its items", self._encode(dataset))
        elif (file := _file_of(dataset)) is not None:
            self._add("its file", self._encode(file))
        for name, value in islice(_settled_attributes(dataset).items(), _MAX_PARTS):
            self._read_attribute(f"{prefix}{name}", value, depth)

    def _read_attribute(self, name: str, value: Any, depth: int) -> None:
        if depth < _MAX_DEPTH and isinstance(value, Dataset):
            self.read(value, f"{name}.", depth + 1)
            return
        within = value if isinstance(value, (list, tuple)) and len(value) <= 64 else ()
        if within and depth < _MAX_DEPTH and all(isinstance(item, Dataset) for item in within):
            for index, item in enumerate(within):
                self.read(item, f"{name}.{index}.", depth + 1)
            return
        self._add(f"attribute {name}", self._encode(value))
        if isinstance(value, (str, os.PathLike)) and (state := _file_state(value)):
            self._add(f"the file of attribute {name}", state)

    def _add(self, name: str, text: str) -> None:
        name, text = (part[: MAX_TEXT_LENGTH // 2] for part in (name, text))
        if len(self.parts) >= _MAX_PARTS and name not in self.parts:
            name, text = "the rest of it", _digest(self.parts.get("the rest of it", "") + text)
        self.parts[name] = text

    def _encode(self, value: Any) -> str:
        if isinstance(value, (list, tuple)) and len(value) > _MAX_ITEMS:
            step = -(-len(value) // _MAX_ITEMS)
            value = [len(value), list(islice(value, 0, None, step))]
        try:
            text = self._encoder.encode(_with_text_keys(value, 0))
        except (TypeError, ValueError, RecursionError):  # Circular, or nested too deeply.
            text = f"type {type(value).__qualname__}"
        return _digest(text)

    def _describe(self, value: Any) -> Any:
        """A value that JSON cannot hold, as one that it can."""
        if isinstance(value, Tensor):
            what = [str(value.dtype), list(value.shape)]
            if value.device.type == "cpu" and value.layout == torch.strided:
                plain = value.detach().resolve_conj().resolve_neg().contiguous()
                # A single element counts as contiguous, whatever its stride is.
                line = plain.as_strided((plain.numel(),), (1,))
                what.append(self._hash(line.view(torch.uint8).numpy()))
            return what
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject:
                return [list(value.shape), self._describe_items(value.reshape(-1).tolist())]
            flat = np.ascontiguousarray(value).reshape(-1)
            return [value.dtype.str, list(value.shape), self._hash(flat.view(np.uint8))]
        if isinstance(value, (bytes, bytearray, array)):
            return self._hash(np.frombuffer(value, np.uint8))
        if isinstance(value, memoryview):
            return self._hash(np.frombuffer(value.tobytes(), np.uint8))
        if isinstance(value, deque):
            return _with_text_keys(list(value), 0)
        if isinstance(value, (set, frozenset)):
            return sorted(self._encoder.encode(item) for item in value)
        if isinstance(value, os.PathLike):
            return os.fsdecode(value)
        if isinstance(value, (np.generic, range, slice, complex, enum.Enum)):
            return repr(value)
        if (file := _file_of(value)) is not None:
            return file
        if isinstance(value, Dataset):
            within = _Reader()
            within.read(value, "", _MAX_DEPTH)
            return within.parts
        if callable(getattr(value, "close", None)):
            return None  # Whether a file is already open must not matter.
        return self._describe_object(value)

    def _describe_items(self, items: list[Any]) -> Any:
        """Texts, of which there may be many, by a hash of them all."""
        if set(map(type, items)) != {str}:
            return items
        lengths = np.fromiter(map(len, items), np.int64, len(items))
        text = "".join(items).encode("utf-8", "surrogatepass")
        return [self._hash(lengths.view(np.uint8)), self._hash(np.frombuffer(text, np.uint8))]

    def _describe_object(self, value: Any) -> Any:
        """A function by its code and what it refers to, any other object by its attributes."""
        named = value if hasattr(value, "__qualname__") else type(value)
        name = f"type {named.__qualname__}"
        if id(value) in self._objects or isinstance(value, (type, types.ModuleType)):
            return name
        # Kept alive, so that no other object gets the same id.
        self._objects[id(value)] = value
        if isinstance(value, types.CodeType):
            constants = _with_text_keys(list(value.co_consts), 0)
            return [self._hash(np.frombuffer(value.co_code, np.uint8)), value.co_names, constants]
        if isinstance(value, types.MethodType):
            return [name, value.__func__, value.__self__]
        if isinstance(value, types.FunctionType):
            if value.__module__.partition(".")[0] in _KNOWN_MODULES:
                return name
            cells = [_content(cell) for cell in value.__closure__ or ()]
            held = [value.__defaults__, value.__kwdefaults__, cells]
            return [name, value.__code__, _with_text_keys(held, 0)]
        if isinstance(value, partial):
            return _with_text_keys([name, value.func, value.args, value.keywords], 0)
        is_known = type(value).__module__.partition(".")[0] in _KNOWN_MODULES
        if is_known and not isinstance(value, (torch.nn.Module, types.SimpleNamespace)):
            return name
        return [name, _with_text_keys(_settled_attributes(value), 0)]

    def _hash(self, data: NDArray[np.uint8]) -> str:
        digest = xxhash.xxh3_64()
        if len(data) <= self._bytes_left:
            self._bytes_left -= len(data)
            digest.update(data.data)
        else:
            for piece in _pieces(data):
                digest.update(np.ascontiguousarray(piece).data)
        return digest.hexdigest()


def _settled_attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, except private ones that may be made only when needed."""
    names = dict.fromkeys(getattr(value, "__dict__", ()))
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        names.update(dict.fromkeys((slots,) if isinstance(slots, str) else slots))
    found = {name: inspect.getattr_static(value, name, None) for name in names}
    for name, kept in found.items():
        if isinstance(kept, types.MemberDescriptorType):
            found[name] = getattr(value, name, None)
    return {
        name: kept
        for name, kept in found.items()
        if not name.startswith("_") or (isinstance(kept, _SETTLED_TYPES) and not _is_empty(kept))
    }


def _is_empty(value: Any) -> bool:
    """Whether a private container may be a cache that is still to be filled."""
    return isinstance(value, (list, dict, set, deque)) and not value


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # It is still empty.
        return None


def _with_text_keys(value: Any, depth: int) -> Any:
    """A container in which dicts with keys that are not text are pairs, since JSON has none."""
    if depth > _MAX_DEPTH:
        return value
    if isinstance(value, dict):
        pairs = [
            (_with_text_keys(key, depth + 1), _with_text_keys(item, depth + 1))
            for key, item in value.items()
        ]
        return dict(pairs) if all(type(key) is str for key in value) else pairs
    if isinstance(value, (list, tuple)) and not set(map(type, value)) <= _PLAIN_TYPES:
        return [_with_text_keys(item, depth + 1) for item in value]
    return value


def _pieces(data: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
    last = max(0, len(data) - _PIECE_BYTES)
    for start in np.linspace(0, last, _NUM_PIECES).astype(np.int64).tolist():
        yield data[start : start + _PIECE_BYTES]


def _digest(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode("utf-8", "surrogatepass"))


@lru_cache(maxsize=1024)
def _source(kind: type) -> str | None:
    """The source text of a class, kept: to find it parses the whole file."""
    if kind.__module__.partition(".")[0] in _KNOWN_MODULES:
        return None
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError, SyntaxError):  # Defined at a prompt, or in a compiled module.
        return None


def _file_of(value: Any) -> list[Any] | None:
    """An array of h5py by its name in its file, and the state of the file; else None."""
    # False once its file is closed.
    if type(value).__module__.partition(".")[0] != "h5py" or not value:
        return None
    name = getattr(getattr(value, "file", None), "filename", None)
    if not isinstance(name, str):
        return None
    return [value.name, name, _file_state(name)]


def _file_state(path: str | os.PathLike[Any]) -> str | None:
    """Size and time of a file; None where the path leads to none."""
    try:
        state = os.stat(path)
    except (OSError, ValueError):
        return None
    is_directory = os.path.isdir(path)
    return None if is_directory else f"{state.st_size} bytes, {state.st_mtime_ns} ns"
