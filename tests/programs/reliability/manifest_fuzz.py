"""Manifests as a stranger might write them: random, but the same for the same seed.

Half of them are damaged byte by byte, some with a digest that fits; the others have one or two
values replaced, moved or doubled and are signed again, so that nothing but the checks of the values
stands between them and the files.
"""

import json
import math
import random
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from lightning_memmap.errors import StoreError
from lightning_memmap.schema.fields import field_name
from lightning_memmap.store.checksums import CHUNK_BYTES, MAX_CHECKSUMS
from lightning_memmap.store.manifest import MANIFEST, Manifest
from tests.support.store.layout import files_of
from tests.support.store.signing import encode_signed

_NAMES = (
    "", ".", "..", "/", "../x", "/etc/passwd", "x", "X", "label", "manifest", "value", "~", "\0",
    "\ud800", "ﬁ", "fi", "K", "k" * 300, "__debug__", "__class__", "__init__", "__slots__", "_x",
    "self", "None", "class", "print", "[/]", "\x1b[2J", "a b", "leaf", "dict", "namedtuple",
    "dataclass", "list", "tuple", "int64", "uint8", "float8_e4m3fn", "0123456789abcdef", "image:L",
)  # fmt: skip
_NUMBERS = (
    -1, 0, 1, 2, 3, 99, 100, 101, 2**16, 2**20, 2**31, 2**39, 2**40, 2**48, 2**62, 2**63, 2**64,
    -(2**63), 10**19, True, False, 1.0, 1e300, math.nan, math.inf,
)  # fmt: skip


def mutated_manifests(seed: int, count: int, original: bytes) -> Iterator[bytes]:
    """Mutate a manifest.

    Args:
        seed: Of the mutations: the same seed, the same manifests.
        count: How many.
        original: The bytes of a whole store's manifest.
    """
    random_state = random.Random(seed)
    for _ in range(count):
        yield random_state.choice((_mutate_bytes, _mutate_values))(random_state, original)


def open_mutated(
    directory: Path, data: bytes, original: Manifest, open_store: Callable[[Path], Any]
) -> bool:
    """Open a store with another manifest, and check the result.

    Args:
        directory: A whole store. Its manifest is overwritten.
        data: The other manifest.
        original: The store's own manifest.
        open_store: Opens it.

    Returns:
        Whether the store opened.

    Raises:
        AssertionError: It opened, and does not agree with its files. Any other error is a fault
            too: the package's own for this is caught here.
    """
    (directory / MANIFEST).write_bytes(data)
    try:
        store = open_store(directory)
        _ = store[0], store[store.num_rows - 1], repr(store.manifest)
    except StoreError:
        return False
    for field, column in zip(store.schema.fields, store.mapped_columns, strict=True):
        if field.num_variable:
            continue  # Its rows are checked when they are read.
        assert tuple(column.tensor.shape) == (store.num_rows, *field.shape)
        if column.tensor.nbytes:
            assert (
                files_of(directory) / f"{field.name}.memmap"
            ).stat().st_size == column.tensor.nbytes
    for stated in store.manifest.columns:
        for name, num_bytes in stated.file_bytes.items():
            assert (files_of(directory) / name).stat().st_size == num_bytes
    assert store.num_rows <= max(2**20, original.num_bytes)
    return True


def _mutate_bytes(random_state: random.Random, original: bytes) -> bytes:
    data = bytearray(original)
    for _ in range(random_state.randint(1, 3)):
        start = random_state.randrange(len(data) + 1)
        end = start + random_state.randint(1, 40)
        kind = random_state.choice(("flip", "cut", "cut off", "double", "insert", "swap"))
        if kind == "flip" and start < len(data):
            data[start] ^= 1 << random_state.randrange(8)
        elif kind == "cut":
            del data[start:end]
        elif kind == "cut off":
            del data[start:]
        elif kind == "double":
            data[start:start] = data[start:end]
        elif kind == "insert":
            data[start:start] = random_state.choice(
                (b'"', b"{", b"[" * 99, b"}", b",", b"\\", b"1" * 5000, b"NaN", b"1e999", b"\xff")
            )
        else:
            data[start:end] = reversed(data[start:end])
    if random_state.random() < 0.5:
        return bytes(data)
    try:
        # A digest that fits whatever the bytes say now.
        return encode_signed(json.loads(data))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return bytes(data)


def _mutate_values(random_state: random.Random, original: bytes) -> bytes:
    body = json.loads(original)
    for _ in range(random_state.randint(1, 2)):
        random_state.choice(_EDITS)(random_state, body)
    return encode_signed(body)


def _replace_any(random_state: random.Random, body: dict[str, Any]) -> None:
    container, key = random_state.choice(places(body))
    container[key] = _any_value(random_state)


def _move_any(random_state: random.Random, body: dict[str, Any]) -> None:
    container, key = random_state.choice(places(body))
    other, other_key = random_state.choice(places(body))
    container[key] = deepcopy(other[other_key])


def _drop_any(random_state: random.Random, body: dict[str, Any]) -> None:
    container, key = random_state.choice(places(body))
    del container[key]


def _double_any(random_state: random.Random, body: dict[str, Any]) -> None:
    container, key = random_state.choice(places(body))
    if isinstance(container, list):
        container.insert(key, deepcopy(container[key]))
    else:
        container[random_state.choice(_NAMES)] = deepcopy(container[key])


def _resize(random_state: random.Random, body: dict[str, Any]) -> None:
    """Other sizes, with the number of checksums that they need."""
    body["num_rows"] = random_state.choice(_NUMBERS)
    for container, key in places(body):
        field = container[key]
        if key == "field" and isinstance(field, dict) and random_state.random() < 0.5:
            field["shape"] = random_state.choices(_NUMBERS, k=random_state.choice((0, 1, 2, 3, 99)))
    num_shards = random_state.randint(1, 200)
    body["num_shards"] = num_shards
    _put_checksums(body)


def _put_checksums(body: dict[str, Any]) -> None:
    """Give each field the number of checksums that it needs."""
    fields = [container[key] for container, key in places(body) if key == "field"]
    counts = [_num_chunks(field, body.get("num_rows"), body.get("num_shards")) for field in fields]
    names = [str(field.get("name")) if isinstance(field, dict) else "" for field in fields]
    body["checksums"] = {
        name: b64encode(bytes(8 * count)).decode()
        for name, count in zip(names, counts, strict=True)
    }


def _num_chunks(field: Any, num_rows: Any, num_shards: Any) -> int:
    """The checksums that a field needs, if its sizes are numbers and a manifest can hold them."""
    with suppress(TypeError, KeyError, AttributeError, ValueError, OverflowError):
        row_bytes = math.prod(field["shape"]) * getattr(torch, field["dtype"]).itemsize
        shards = range(min(num_shards, 2**16))
        shard_rows = (len(range(shard, num_rows, num_shards)) for shard in shards)
        count = sum(-(-rows * row_bytes // CHUNK_BYTES) for rows in shard_rows)
        if 0 <= count <= MAX_CHECKSUMS:
            return int(count)
    return 1


def _rename(random_state: random.Random, body: dict[str, Any]) -> None:
    """Other names of the fields, alike in the structure, the fields and the checksums, half of the
    time for fields that need no file."""
    keys = random_state.sample(_NAMES, 2)
    names = [field_name((key,)) for key in keys]
    shape = random_state.choice(([4], [0]))
    field = {"dtype": random_state.choice(("int64", "uint8")), "shape": shape}
    body["structure"] = {
        "kind": random_state.choice(("dict", "namedtuple", "dataclass")),
        "name": random_state.choice(_NAMES),
        "keys": keys,
        "children": [{"kind": "leaf", "field": {"name": name, **field}} for name in names],
    }
    _put_checksums(body)


def _nest(random_state: random.Random, body: dict[str, Any]) -> None:
    """The structure deep inside others."""
    kind = random_state.choice(("dict", "namedtuple", "dataclass"))
    for level in range(random_state.choice((1, 30, 33, 100))):
        key = random_state.choice((*_NAMES, f"k{level}"))
        child = body.get("structure")
        body["structure"] = {"kind": kind, "name": "A", "keys": [key], "children": [child]}


_EDITS: tuple[Callable[[random.Random, dict[str, Any]], None], ...] = (
    _replace_any, _replace_any, _move_any, _drop_any, _double_any, _resize, _rename, _rename, _nest,
)  # fmt: skip


def _any_value(random_state: random.Random, depth: int = 0) -> Any:
    kind = random_state.randrange(6 if depth < 3 else 4)
    if kind == 0:
        return None
    if kind <= 2:
        return random_state.choice(_NAMES)
    if kind == 3:
        return random_state.choice(_NUMBERS)
    values = [_any_value(random_state, depth + 1) for _ in range(random_state.randrange(4))]
    if kind == 4:
        return values
    return {random_state.choice(_NAMES): value for value in values}


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    found = [(value, key) for key in keys]
    for key in keys:
        if isinstance(value[key], (dict, list)):
            found += places(value[key])
    return found
