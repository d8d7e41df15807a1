"""A dataset that gives one buffer again and again is stored with the rows that it gave."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from tensordict import TensorDict
from torch.utils.data import IterableDataset, Subset

from lightning_memmap import ColumnDataset, MemmapDataModule, append_store, build_store
from lightning_memmap.schema.shared_memory import SharedMemoryCheck
from lightning_memmap.store import Store, build_part, finish_store
from lightning_memmap.store.sources.source import make_source

Reuse = Callable[[int], Any]


def a_tensor() -> Reuse:
    buffer = torch.zeros(5, dtype=torch.int64)
    return lambda row: buffer.fill_(row)


def an_array() -> Reuse:
    buffer = np.zeros(5, np.int64)

    def read(row: int) -> Any:
        buffer[:] = row
        return buffer

    return read


def views() -> Reuse:
    """Another view of the same memory each time."""
    buffer, array = torch.zeros(9, dtype=torch.int64), np.zeros(9, np.int64)

    def read(row: int) -> Any:
        buffer.fill_(row)
        array[:] = row
        return {"tensor": buffer[row % 4 :][:5], "array": array[row % 4 :][:5], "from": row % 4}

    return read


def rows_of_pictures() -> Reuse:
    """Parts of a picture that are not contiguous."""
    picture = torch.zeros(9, 9, dtype=torch.int64)
    return lambda row: picture.fill_(row)[row % 4 :, row % 3 :][:5, :5]


def raw_memory() -> Reuse:
    memory = bytearray(40)

    def read(row: int) -> Any:
        memory[:] = bytes([row % 256]) * 40
        return np.frombuffer(memory, np.uint8)

    return read


def a_ring() -> Reuse:
    """Several buffers in turns."""
    buffers = [torch.zeros(5, dtype=torch.int64) for _ in range(7)]
    return lambda row: {"x": buffers[row % 7].fill_(row), "row": row}


def a_label() -> Reuse:
    """Of all that a sample has, one number is used again, and is the same in most rows."""
    label = torch.zeros((), dtype=torch.int64)
    return lambda row: (torch.full((5,), row), label.fill_(row % 50 == 7))


def a_dict() -> Reuse:
    sample: dict[str, Any] = {}

    def read(row: int) -> Any:
        sample["x"], sample["name"] = torch.full((5,), row), f"row {row}"
        return sample

    return read


def a_list() -> Reuse:
    numbers = [0] * 20

    def read(row: int) -> Any:
        numbers[:] = [row] * 20
        return {"numbers": numbers, "row": row}

    return read


def records() -> Reuse:
    boxes: list[Any] = []

    def read(row: int) -> Any:
        boxes.clear()
        boxes.extend({"box": np.full(4, row + k), "name": str(row)} for k in range(1 + row % 3))
        return {"boxes": boxes}

    return read


@dataclass
class Changed:
    x: Any
    row: int


def a_dataclass() -> Reuse:
    sample = Changed(torch.zeros(5, dtype=torch.int64), 0)

    def read(row: int) -> Any:
        sample.x.fill_(row)
        sample.row = row
        return sample

    return read


class Pair(NamedTuple):
    x: Any
    row: int


def a_named_tuple() -> Reuse:
    buffer = np.zeros(5)

    def read(row: int) -> Any:
        buffer[:] = row
        return Pair(buffer, row)

    return read


def a_tensordict() -> Reuse:
    sample = TensorDict({"x": torch.zeros(5), "y": {"z": torch.zeros(2)}}, [])

    def read(row: int) -> Any:
        sample["x"].fill_(row)
        sample["y", "z"].fill_(-row)
        return sample

    return read


def an_image() -> Reuse:
    image = Image.new("RGB", (4, 3))

    def read(row: int) -> Any:
        image.paste((row % 256, row // 256, 7), (0, 0, 4, 3))
        return image, row

    return read


def some_bytes() -> Reuse:
    data = bytearray()

    def read(row: int) -> Any:
        data[:] = b"x" * (row % 9)
        return {"data": data, "row": row}

    return read


REUSES = [
    a_tensor, an_array, views, rows_of_pictures, raw_memory, a_ring, a_label, a_dict, a_list,
    records, a_dataclass, a_named_tuple, a_tensordict, an_image, some_bytes,
]  # fmt: skip


class Reusing:
    """A dataset of so many rows."""

    def __init__(self, make: Callable[[], Reuse], num_rows: int, first: int = 0) -> None:
        self.make, self.num_rows, self.first = make, num_rows, first
        self._read: Reuse | None = None

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, row: int) -> Any:
        if not 0 <= row < self.num_rows:
            raise IndexError(row)
        self._read = self._read or self.make()
        return self._read(self.first + row)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_read": None}


class ManyAtOnce(Reusing):
    """Whose many rows at once are one buffer."""

    def __getitems__(self, rows: list[int]) -> list[Any]:
        return [self[row] for row in rows]


class Streamed(IterableDataset[Any]):
    def __init__(self, dataset: Reusing) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return (self.dataset[row] for row in range(len(self.dataset)))


def check(store: Store, make: Callable[[], Reuse], num_rows: int) -> None:
    """Compare all rows of a store with rows that have memory of their own."""
    assert len(store) == num_rows
    alone = make_source([make()(row) for row in range(num_rows)], store.schema).read(
        range(num_rows)
    )
    for found, values in zip(store.read(np.arange(num_rows)), alone, strict=True):
        pairs = zip(found.rows(), values.rows(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("make", REUSES)
@pytest.mark.parametrize("kind", [Reusing, ManyAtOnce])
def test_map_style_rows_are_those_that_were_given(
    tmp_path: Path, make: Callable[[], Reuse], kind: type[Reusing]
) -> None:
    check(build_store(kind(make, 300), tmp_path / "store", progress=False), make, 300)


@pytest.mark.parametrize("make", [a_tensor, an_array, a_dict, a_ring])
def test_rows_of_many_blocks_are_those_that_were_given(
    tmp_path: Path, make: Callable[[], Reuse]
) -> None:
    check(build_store(Reusing(make, 2500), tmp_path / "store", progress=False), make, 2500)


@pytest.mark.parametrize("make", REUSES)
def test_rows_of_a_stream_are_those_that_were_given(
    tmp_path: Path, make: Callable[[], Reuse]
) -> None:
    stream = Streamed(Reusing(make, 300))
    check(build_store(stream, tmp_path / "store", progress=False), make, 300)
    # Compared with the store, they are its rows.
    assert len(build_store(stream, tmp_path / "store", progress=False)) == 300


def test_rows_of_a_generator_are_those_that_were_given(tmp_path: Path) -> None:
    rows = (sample for sample in Streamed(Reusing(a_dict, 1500)))
    check(build_store(rows, tmp_path / "store", progress=False), a_dict, 1500)


@pytest.mark.parametrize("make", [a_tensor, views, a_dict])
def test_appended_rows_are_those_that_were_given(tmp_path: Path, make: Callable[[], Reuse]) -> None:
    build_store(Reusing(make, 40), tmp_path / "store", progress=False)
    append_store(Reusing(make, 50, first=40), tmp_path / "store", progress=False)
    check(build_store(Reusing(make, 90), tmp_path / "store", progress=False), make, 90)


@pytest.mark.parametrize("make", [a_label, an_image])
def test_parts_have_the_rows_that_were_given(tmp_path: Path, make: Callable[[], Reuse]) -> None:
    for index in range(3):
        build_part(Reusing(make, 100), tmp_path / "store", (index, 3), progress=False)
    check(finish_store(tmp_path / "store", progress=False), make, 100)


def test_changed_fingerprint_is_compared_with_the_rows_that_were_given(tmp_path: Path) -> None:
    build_store(Reusing(an_array, 70), tmp_path / "store", fingerprint="1", progress=False)
    with pytest.raises(Exception, match="fingerprint"):
        build_store(Reusing(an_array, 70), tmp_path / "store", fingerprint="2", progress=False)
    dataset = Reusing(an_array, 70)
    dataset.note = "another identity"  # type: ignore[attr-defined]
    check(build_store(dataset, tmp_path / "store", progress=False), an_array, 70)


def test_subset_of_a_reused_buffer_has_its_rows(tmp_path: Path) -> None:
    rows = [9, 3, 60, 4]
    store = build_store(Subset(Reusing(a_tensor, 70), rows), tmp_path / "store", progress=False)
    assert [int(store[index][0]) for index in range(4)] == rows


class Computed:
    """An array of another library that computes its rows into a buffer of all such arrays."""

    shape, dtype = (400, 3), np.dtype(np.int64)
    buffer = np.zeros((400, 3), np.int64)

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __getitem__(self, rows: Any) -> Any:
        numbers = np.arange(400)[rows] * self.factor
        if not isinstance(rows, slice):
            return np.full(3, numbers)
        found = self.buffer[: len(numbers)]
        found[:] = numbers[:, None]
        return found


def test_arrays_that_are_computed_into_one_buffer_are_stored_with_their_rows(
    tmp_path: Path,
) -> None:
    dataset = ColumnDataset({"x": Computed(1), "y": Computed(-1)})
    store = build_store(dataset, tmp_path / "store", progress=False)
    found = [(int(store[row]["x"][0]), int(store[row]["y"][0])) for row in range(400)]
    assert found == [(row, -row) for row in range(400)]


@pytest.mark.parametrize(("build", "workers"), [("first", 0), ("first", 2), ("while_training", 2)])
def test_training_has_the_rows_that_were_given(tmp_path: Path, build: str, workers: int) -> None:
    dataset: Any = Reusing(a_ring, 200)
    data = MemmapDataModule(
        dataset, store_dir=tmp_path, batch_size=8, build=build, num_workers=workers
    )
    data.prepare_data()
    data.setup("fit")
    batches: list[Any] = list(data.train_dataloader())
    data.teardown("fit")
    pairs = [(batch["x"][:, 0].tolist(), batch["row"].tolist()) for batch in batches]
    assert all(numbers == rows for numbers, rows in pairs)
    check(data.open_train_store(), a_ring, 200)


@pytest.mark.parametrize("kind", [torch.from_numpy, np.asarray])
def test_two_values_that_overlap_are_recognised_among_others(kind: Any) -> None:
    memory = np.zeros(12)
    for starts, is_shared in (([0, 4, 8], False), ([0, 8, 2], True)):
        check = SharedMemoryCheck(is_exact=True)
        check.compare([kind(memory[start : start + 4]) for start in starts])
        assert check.is_shared is is_shared
