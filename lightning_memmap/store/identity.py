"""The identity of a dataset: what distinguishes it from others without reading a row."""

import enum
import inspect
import os
import sys
import types
from array import array
from collections import deque
from contextlib import suppress
from functools import lru_cache, partial
from itertools import islice
from typing import Annotated, Any

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from lightning_memmap.integers import ceil_div
from lightning_memmap.store.files import leaf_bytes
from lightning_memmap.store.sources.image_folder import ImageFolder
from lightning_memmap.store.sources.iterable import is_iterable_only

#: The most characters of the name of a part, and of the part.
MAX_TEXT_LENGTH = 1024
#: Classes of these modules are identified by their name: they change with a release, not with a
#: dataset.
_KNOWN_MODULES = {*sys.stdlib_module_names, "torch", "numpy", "lightning"}
#: Packages whose source text says nothing of a dataset: a release may change a docstring. What
#: their objects hold does, such as the size to which a transform scales.
_RELEASED = {
    *("lightning_memmap", "torchvision", "torchaudio", "torchdata", "tensordict", "datasets"),
    *("pandas", "polars", "pyarrow", "duckdb", "h5py", "zarr", "PIL", "cv2", "scipy", "sklearn"),
    *("transformers", "tokenizers", "huggingface_hub", "albumentations", "webdataset", "timm"),
}
_PLAIN_TYPES = {int, float, str, bool, types.NoneType}
_MAX_PARTS = 512
_MAX_ITEMS = 2**20
_REST = "the rest of it"
#: Arrays are hashed whole until this many bytes have been hashed, and in pieces from then on.
_MAX_HASHED_BYTES = 2**26
_NUM_PIECES = 64
_PIECE_BYTES = 2**20
#: Private attributes of other types, such as open files, may be made only when first needed.
_SETTLED_TYPES = (
    str, bytes, bytearray, int, float, complex, os.PathLike, memoryview, array, types.FunctionType,
    tuple, list, dict, set, frozenset, deque, np.ndarray, np.generic, Tensor, Dataset,
)  # fmt: skip

_Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_LENGTH)]


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The identity of a dataset, in named parts, so that a difference can be named."""

    # A mismatch costs one comparison of rows, so that this need not be finer: it covers samples of
    # arrays beyond 64 MiB, and nothing of open files, compiled objects, and files in a directory.

    parts: dict[_Text, _Text]
    #: The user's own fingerprint.
    by_user: _Text | None = msgspec.field(default=None, name="given")

    @classmethod
    def of(cls, dataset: Any, by_user: str | None = None) -> "Identity":
        """Compute the identity of a dataset."""
        reader = _Reader()
        if not is_iterable_only(dataset):
            reader.parts["the length"] = str(len(dataset))
        reader.read(dataset)
        return cls(reader.parts, by_user)

    def difference(self, other: "Identity") -> str | None:
        """Name up to three parts that differ from a later identity; None if there are none."""
        if other.by_user is not None:
            if self.by_user == other.by_user:
                return None
            if self.by_user is None:
                return f"it was stored without a fingerprint, and now has {other.by_user!r}"
            return f"its fingerprint was {self.by_user!r} and is {other.by_user!r}"
        changed = [
            name
            for name in dict.fromkeys((*self.parts, *other.parts))
            if self.parts.get(name) != other.parts.get(name)
            # A private attribute may come and go.
            and not (
                name.startswith("attribute _") and (name in self.parts) != (name in other.parts)
            )
        ]
        if not changed:
            return None
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        return f"{', '.join(changed[:3])}{more} changed"


def check_fingerprint(value: str | None, name: str = "fingerprint") -> None:
    """Check the fingerprint argument of a user."""
    if value is None:
        return
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r}: must be a string that changes whenever the rows do")
    if not 0 < len(value) <= MAX_TEXT_LENGTH:
        raise ValueError(
            f"{name} has {len(value)} characters: must have 1 to {MAX_TEXT_LENGTH}, such as a"
            " version or a hash"
        )


class _Reader:
    """Collects the parts of a dataset, and of the datasets in it."""

    def __init__(self) -> None:
        self.parts: dict[str, str] = {}
        self._datasets: dict[int, Any] = {}
        #: Objects that are being described, kept alive so that their ids stay unique.
        self._objects: dict[int, Any] = {}
        self._bytes_left = _MAX_HASHED_BYTES

    def read(self, dataset: Any, path: str = "") -> None:
        """Add the parts of a dataset. ``path`` names the attributes that lead to it."""
        self._datasets[id(dataset)] = dataset
        for name, value in islice(_parts_of(dataset).items(), _MAX_PARTS):
            within = {"": value}
            if isinstance(value, (list, tuple)) and 0 < len(value) <= 64:
                within = {f".{index}": item for index, item in enumerate(value)}
            if not all(isinstance(item, Dataset) for item in within.values()):
                self._add(f"{name} of {path}" if path else name, self._encode(value))
                continue
            attribute = name.removeprefix("attribute ")
            for suffix, item in within.items():
                if id(item) not in self._datasets:
                    self.read(item, f"{path}.{attribute}{suffix}".lstrip("."))

    def _add(self, name: str, text: str) -> None:
        name = name[: MAX_TEXT_LENGTH // 2]
        if len(self.parts) >= _MAX_PARTS:
            name = _REST
            text = _digest((self.parts.get(_REST, "") + text).encode())
        self.parts[name] = text

    def _encode(self, value: Any) -> str:
        if isinstance(value, (list, tuple)) and len(value) > _MAX_ITEMS:
            value = [len(value), value[:: ceil_div(len(value), _MAX_ITEMS)]]
        encode = partial(msgspec.msgpack.encode, enc_hook=self._describe, order="deterministic")
        self._objects = {**self._datasets}
        with suppress(TypeError, ValueError, OverflowError, RecursionError):
            return _digest(encode(_dicts_to_pairs(value)))
        return f"type {type(value).__qualname__}"  # Circular, or nested too deeply.

    def _describe(self, value: Any) -> Any:
        """Convert a value that MessagePack cannot encode to one that it can."""
        if isinstance(value, Tensor):
            shown = [str(value.dtype), list(value.shape)]
            if value.device.type == "cpu" and value.layout == torch.strided:
                shown.append(self._hash(leaf_bytes(value.detach().resolve_conj().resolve_neg())))
            return shown
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject:
                return [list(value.shape), _dicts_to_pairs(value.reshape(-1).tolist())]
            return [value.dtype.str, list(value.shape), self._hash(leaf_bytes(value))]
        if isinstance(value, (array, deque)):
            return _dicts_to_pairs(list(value))
        if isinstance(value, os.PathLike):
            return os.fsdecode(value)
        if isinstance(value, (np.generic, range, slice, complex, enum.Enum)):
            return repr(value)
        if (file := _describe_h5py_array(value)) is not None:
            return file
        if callable(getattr(value, "close", None)) and not isinstance(value, Dataset):
            return None  # Whether a file is already open must not matter.
        if isinstance(value, partial):
            return _dicts_to_pairs([value.func, value.args, value.keywords])
        value_type = value if hasattr(value, "__qualname__") else type(value)
        is_plain = _is_known(value_type) and not isinstance(value, Dataset)
        if isinstance(value, type) or is_plain or id(value) in self._objects:
            return value_type.__qualname__
        self._objects[id(value)] = value
        if isinstance(value, types.FunctionType):
            held = [cell.cell_contents for cell in value.__closure__ or ()]
            code = value.__code__
            return _dicts_to_pairs(
                [value_type.__qualname__, code.co_code, code.co_consts, value.__defaults__, held]
            )
        return _dicts_to_pairs([value_type.__qualname__, _parts_of(value)])

    def _hash(self, data: NDArray[np.uint8]) -> str:
        if len(data) <= self._bytes_left:
            self._bytes_left -= len(data)
            return _digest(data.data)
        digest = xxhash.xxh3_64()
        last = max(0, len(data) - _PIECE_BYTES)
        for start in np.linspace(0, last, _NUM_PIECES).astype(np.int64).tolist():
            digest.update(data[start : start + _PIECE_BYTES].data)
        return digest.hexdigest()


def _parts_of(value: Any) -> dict[str, Any]:
    """Describe an object: its class, its attributes, and the state of the files that they name."""
    value_type = type(value)
    # Without its module, whose name depends on whether the file is run or imported.
    parts: dict[str, Any] = {"the class": value_type.__qualname__}
    for base in value_type.__mro__:
        if (source := _source_text(base)) is not None:
            parts[f"the source of class {base.__qualname__}"] = source
    if isinstance(value, (list, tuple, dict, deque, array, Tensor, np.ndarray)):
        parts["the items"] = value
    elif (file := _describe_h5py_array(value)) is not None:
        parts["the file"] = file
    if isinstance(value, ImageFolder):
        parts["the files"] = value.file_states()
    names = dict.fromkeys(getattr(value, "__dict__", ()))
    for base in value_type.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names.update(dict.fromkeys((slots,) if isinstance(slots, str) else slots))
    for name in names:
        kept = inspect.getattr_static(value, name, None)
        if isinstance(kept, types.MemberDescriptorType):
            kept = getattr(value, name, None)
        is_cache = isinstance(kept, (list, dict, set, deque)) and (not kept or name == "_cache")
        if name.startswith("_") and (is_cache or not isinstance(kept, _SETTLED_TYPES)):
            continue  # A file, or a cache, that is still to be opened or filled.
        parts[f"attribute {name}"] = kept
        if isinstance(kept, (str, os.PathLike)) and (state := _file_state(kept)):
            parts[f"the file of attribute {name}"] = state
    return parts


def _dicts_to_pairs(value: Any) -> Any:
    """Replace the dicts of a value by lists of pairs."""
    if isinstance(value, dict):
        return [[key, _dicts_to_pairs(item)] for key, item in value.items()]
    if isinstance(value, (list, tuple)) and not set(map(type, value)) <= _PLAIN_TYPES:
        return [_dicts_to_pairs(item) for item in value]
    return value


def _digest(data: Any) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def _is_known(value_type: Any) -> bool:
    return _package(value_type) in _KNOWN_MODULES


def _package(value_type: Any) -> str:
    return (getattr(value_type, "__module__", None) or "").partition(".")[0]


@lru_cache(maxsize=1024)
def _source_text(value_type: type) -> str | None:
    """Return the source text of a class. It is cached, because finding it parses the file."""
    if _is_known(value_type) or _package(value_type) in _RELEASED:
        return None
    try:
        return inspect.getsource(value_type)
    except (OSError, TypeError, SyntaxError):  # Defined at a prompt, or in a compiled module.
        return None


def _describe_h5py_array(value: Any) -> list[Any] | None:
    """Describe an array of h5py: its name, its file, and the state of the file; else None."""
    # False once its file is closed.
    if type(value).__module__.partition(".")[0] != "h5py" or not value:
        return None
    name = getattr(getattr(value, "file", None), "filename", None)
    return [value.name, name, _file_state(name)] if isinstance(name, str) else None


def _file_state(path: str | os.PathLike[Any]) -> str | None:
    """Size and time of a file; None where the path leads to none."""
    try:
        state = os.stat(path)
    except (OSError, ValueError):
        return None
    is_directory = os.path.isdir(path)
    return None if is_directory else f"{state.st_size} bytes, {state.st_mtime_ns} ns"
