"""Files of whole stores in which a bit is flipped, or which are cut off or grown."""

import dataclasses
import json
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, Subset

from lightning_memmap.store import (
    append_store,
    build_part,
    build_store,
    finish_store,
    pull_store,
)
from tests.programs.reliability.dataset import VARIABLE
from tests.programs.reliability.forks import call
from tests.programs.reliability.outcome import Fault, Outcome, Subject

_NUM_ROWS = 90
_NUM_SHARDS = 4
_MEMORY_BYTES = 2**30


class Pair(NamedTuple):
    """A sample of a named tuple."""

    image: torch.Tensor
    label: int


@dataclasses.dataclass
class Scan:
    """A sample of a dataclass."""

    values: torch.Tensor
    valid: bool


class _Rows(Dataset[Any]):
    """Rows made by a function of the row's number."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return _NUM_ROWS

    def __getitem__(self, row: int) -> Any:
        return self.make(row)


def _beside_its_number(make: Callable[[int], Any], row: int) -> dict[str, Any]:
    return {"row": row, "value": make(row)}


#: A sample of each row, by the name of the schema.
SCHEMAS: dict[str, Callable[[int], Any]] = {
    "dict": lambda row: {"x": torch.arange(row, row + 4), "label": row},
    "named tuple": lambda row: Pair(torch.full((3, 5, 5), row, dtype=torch.uint8), row % 10),
    "nested": lambda row: (
        {"a/b": torch.tensor(row).bfloat16(), "ü": [row / 7, complex(row, 1)]},
        Scan(torch.full((2, 3), row).half(), row % 2 == 0),
    ),
    "one number": lambda row: row * 3,
    "empty field": lambda row: {"none": torch.empty(0, 2), "one": torch.tensor([row])},
    **{name: partial(_beside_its_number, make) for name, make in VARIABLE.items()},
}


def _build(dataset: Dataset[Any], path: Path) -> None:
    build_store(dataset, path, num_shards=_NUM_SHARDS, progress=False)


def _build_in_parts(dataset: Dataset[Any], path: Path) -> None:
    for part in ((1, 2), (0, 2)):
        build_part(dataset, path, part, num_shards=_NUM_SHARDS, progress=False)
    finish_store(path, progress=False)


def _append(dataset: Dataset[Any], path: Path) -> None:
    _build(Subset(dataset, range(_NUM_ROWS // 2)), path)
    append_store(Subset(dataset, range(_NUM_ROWS // 2, _NUM_ROWS)), path, progress=False)


def _pull(dataset: Dataset[Any], path: Path) -> None:
    far = path.with_name("far")
    _build(dataset, far)
    pull_store(far.as_uri(), path, progress=False)
    shutil.rmtree(far)


def _all_variable(row: int) -> dict[str, Any]:
    return {name: make(row) for name, make in VARIABLE.items()}


#: How each store is made, and of which rows, by its name.
STORES: dict[str, tuple[Callable[[Dataset[Any], Path], None], Callable[[int], Any]]] = {
    **{name: (_build, make) for name, make in SCHEMAS.items()},
    "built in parts": (_build_in_parts, _all_variable),
    "appended": (_append, _all_variable),
    "pulled": (_pull, _all_variable),
}


def prepare(directory: Path) -> None:
    """Make each store."""
    stores(directory).mkdir(parents=True)
    for name, (build, make) in STORES.items():
        build(_Rows(make), stores(directory) / name)


def stores(beginnings: Path) -> Path:
    return beginnings / "stores"


def flip_a_bit(
    subject: Subject, beginnings: Path, scratch: Path, rng: random.Random, _: int
) -> Outcome:
    """Flip one bit of one file. It must be found, unless it changes nothing that is read."""
    outcome = Outcome()
    pristine, path = _copy(stores(beginnings), scratch, rng)
    files = [file for file in _files(path) if file.stat().st_size]
    file = rng.choice(files)
    data = bytearray(file.read_bytes())
    byte, bit = rng.randrange(len(data)), rng.randrange(8)
    data[byte] ^= 1 << bit
    file.write_bytes(data)
    what = f"bit {bit} of byte {byte} of {path.name}/{file.name}"
    if not _is_found(outcome, subject, path, what):
        if _means_nothing(pristine, path, file.relative_to(path)):
            outcome.notes[f"flips without a meaning in {file.name}"] += 1
        else:
            outcome.add(Fault.WRONG_ROWS, f"{what} was flipped: neither refused nor found")
    return outcome


def resize_a_file(
    subject: Subject, beginnings: Path, scratch: Path, rng: random.Random, _: int
) -> Outcome:
    """Cut one file off, or let it grow. It must be found, and crash nobody."""
    outcome = Outcome()
    path = _copy(stores(beginnings), scratch, rng)[1]
    file = rng.choice(_files(path))
    size = file.stat().st_size
    sizes = {0, 1, size // 2, size - 1, size + 1, size + 4096, 2 * size, 2**40} - {size, -1}
    new = rng.choice(sorted(sizes))
    os.truncate(file, new)
    what = f"{path.name}/{file.name} of {size} bytes"
    if not _is_found(outcome, subject, path, what) and size:
        outcome.add(Fault.WRONG_ROWS, f"{what} was made {new} bytes: neither refused nor found")
    return outcome


def _copy(stores: Path, scratch: Path, rng: random.Random) -> tuple[Path, Path]:
    name = rng.choice(sorted(STORES))
    path = scratch / name
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(stores / name, path)
    return stores / name, path


def _is_found(outcome: Outcome, subject: Subject, path: Path, what: str) -> bool:
    ending = call(_open_read_verify, subject, path, memory_bytes=_MEMORY_BYTES)
    returned = outcome.add_ending(ending, f"opening with a changed {what}", allowed=True)
    # What ended in any other way is no damage that went unseen, but counted as what it is.
    return not returned or bool(ending.value)


def _open_read_verify(subject: Subject, path: Path) -> int:
    """Use a store as its owner would."""
    store = subject.open(path)
    for row in range(len(store)):
        store[row]
    return len(subject.verify(path))


def _files(store: Path) -> list[Path]:
    return sorted(path for path in store.rglob("*") if path.is_file() and path.name != ".lock")


def _means_nothing(pristine: Path, path: Path, name: Path) -> bool:
    """Whether a changed file says exactly what it said before."""
    if name.suffix != ".json":
        return False
    try:
        texts = [(directory / name).read_text("utf-8") for directory in (pristine, path)]
        return bool(json.loads(texts[0]) == json.loads(texts[1]))
    except ValueError:
        return False
