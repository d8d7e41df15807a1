"""Fields whose rows differ in length: stored, found by themselves, resumed, verified, refused."""

import shutil
from pathlib import Path, PurePosixPath
from time import sleep
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_memmap.errors import DatasetError, SchemaError, StoreError
from lightning_memmap.loading.variable_batch import LayoutCollate
from lightning_memmap.schema import Pad
from lightning_memmap.store import Store, build_store, open_store, verify_store, writing
from lightning_memmap.store import columns as columns_module
from lightning_memmap.store.files import copy_segments
from lightning_memmap.store.samples import choose_probe_rows
from tests.support.datasets import Counting, Ragged, Replaced, Wrapped
from tests.support.store.layout import names_in
from tests.support.store.signing import sign_manifest

NUM_ROWS = 300


def build(path: Path, dataset: Any, **options: Any) -> Store:
    return build_store(dataset, path, **{"num_shards": 7, "progress": False, **options})


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("built") / "s", Ragged(NUM_ROWS)).path


@pytest.fixture
def ragged(built: Path, tmp_path: Path) -> Path:
    """A store that a test may damage."""
    return Path(shutil.copytree(built, tmp_path / "s"))


def assert_holds(store: Store, dataset: Any) -> None:
    assert len(store) == len(dataset)
    for row in range(len(dataset)):
        sample, found = dataset[row], store[row]
        assert sample.keys() == found.keys()
        for name, value in sample.items():
            if isinstance(value, str):
                assert found[name] == value
            else:
                leaf = found[name]
                # A list of numbers whose count is fixed comes back as a list.
                leaf = leaf if isinstance(leaf, torch.Tensor) else torch.stack(leaf)
                assert torch.equal(leaf, torch.as_tensor(value).to(leaf.dtype)), (row, name)


pieces = st.lists(
    st.tuples(st.integers(0, 5000), st.sampled_from([0, 1, 3, 31, 32, 200, 4100, 40_000])),
    max_size=30,
)


#: Pieces of about the same length.
alike = st.lists(st.tuples(st.integers(0, 4900), st.integers(60, 100)), min_size=1, max_size=80)


@given(pieces | alike, st.integers(0, 2**31))
def test_segments_are_copied_as_slices_are(found: list[tuple[int, int]], seed: int) -> None:
    # The last of them is at the end of the memory.
    size = max((start + length for start, length in found), default=0)
    source = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    starts = np.array([start for start, _ in found], np.int64)
    lengths = np.array([length for _, length in found], np.int64)
    places = np.cumsum(lengths) - lengths
    target = np.zeros(int(lengths.sum()), np.uint8)
    copy_segments(source, starts, target, places, lengths)
    parts = [source[start : start + length] for start, length in found]
    expected = np.concatenate([np.zeros(0, np.uint8), *parts])
    assert np.array_equal(target, expected)


@pytest.mark.parametrize(
    ("start", "place", "length"), [(-1, 0, 4), (0, -1, 4), (7, 0, 4), (0, 7, 4), (0, 0, -1)]
)
def test_segment_outside_memory_is_refused(start: int, place: int, length: int) -> None:
    memory = [np.zeros(10, np.uint8) for _ in range(2)]
    numbers = [np.array([number], np.int64) for number in (start, place, length)]
    with pytest.raises(IndexError, match="outside the memory"):
        copy_segments(memory[0], numbers[0], memory[1], numbers[1], numbers[2])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_variable_fields_are_found_built_verified_and_read(
    tmp_path: Path, num_workers: int
) -> None:
    store = build(tmp_path / "s", Ragged(NUM_ROWS), num_workers=num_workers)
    assert [(field.name, field.shape) for field in store.schema.fields] == [
        ("row", ()),
        ("sound", (None,)),
        ("image", (None, None, 2)),
        ("ids", (None,)),
        ("text", (None,)),
    ]
    assert_holds(store, Ragged(NUM_ROWS))
    names = {f"{name}.{kind}" for name in ("sound", "image", "ids", "text") for kind in KINDS}
    assert set(names_in(store.path)) == {"manifest.json", "row.memmap"} | names
    samples = [Ragged(NUM_ROWS)[row] for row in range(NUM_ROWS)]
    num_items = sum(len(sample["sound"]) for sample in samples)
    assert (store.files / "sound.values").stat().st_size == 4 * num_items
    assert verify_store(store.path) == []
    again = build(tmp_path / "s", Wrapped(Ragged(NUM_ROWS)), num_workers=num_workers)
    assert again.manifest.content == store.manifest.content


KINDS = ("index", "values")


rows = st.lists(st.integers(0, 9), min_size=1, max_size=40)


@given(rows, rows, st.integers(1, 9))
def test_rows_of_any_lengths_come_back(
    tmp_path_factory: pytest.TempPathFactory, first: list[int], second: list[int], shards: int
) -> None:
    pairs = list(zip(first, second, strict=False))
    dataset = [torch.arange(a * b * 3, dtype=torch.int16).view(a, b, 3) for a, b in pairs]
    path = tmp_path_factory.mktemp("lengths") / "s"
    variable = {"value": 2}
    store = build(path, dataset, num_shards=shards, variable=variable)
    assert all(torch.equal(store[row], value) for row, value in enumerate(dataset))
    assert verify_store(path) == []
    sizes = [
        sum(dataset[row].nbytes for row in range(shard, len(dataset), shards))
        for shard in range(shards)
    ]
    assert sum(column.shard_bytes for column in store.manifest.columns).tolist() == sizes


PARTS = [{"box": [1, 2], "m": torch.zeros(2, 2)}] * 2


@pytest.mark.parametrize(
    ("late", "argument"),
    [
        ({"a": torch.zeros(5, 4)}, {"variable": ["a"]}),
        ({"a": torch.zeros(3, 7)}, {"variable": {"a": 2}}),
        ({"a": None}, {"nullable": ["a"]}),
        ({"ids": [1]}, {"variable": ["ids"]}),
        ({"parts": PARTS[:1]}, {"variable": ["parts"]}),
        ({"parts": []}, {"variable": ["parts"]}),
        ({"parts": None}, {"nullable": ["parts"]}),
        ({"a": torch.zeros(3, 4, 1)}, None),
    ],
)
def test_later_row_that_differs_names_the_argument_that_stores_it(
    tmp_path: Path, late: Any, argument: dict[str, Any] | None
) -> None:
    first: Any = {"a": torch.zeros(3, 4), "ids": [1, 2], "parts": PARTS}
    assert 150 not in choose_probe_rows(NUM_ROWS)
    dataset = Replaced([first] * NUM_ROWS, {150: {**first, **late}})
    with pytest.raises(SchemaError, match=f"row 150, field '{next(iter(late))}") as caught:
        build(tmp_path / "s", dataset)
    if argument is None:
        assert "one dtype and number of dimensions" in str(caught.value)
        assert "variable=" not in str(caught.value)
        return
    ((name, value),) = argument.items()
    assert f"{name}={value}" in str(caught.value)
    store = build(tmp_path / "s", dataset, **argument)
    for name, value in late.items():
        found = store[150][name]
        assert (found is None) == (value is None)
        if value is not None:
            assert np.shape(found)[:2] == np.shape(value)[:2]
            assert len(store[0][name]) == len(first[name])
    assert verify_store(store.path) == []


@pytest.mark.parametrize(
    ("rows", "variable", "words"),
    [
        (["a", b"a", "b"], None, r"row 1, .*\(bytes\), expected .* \(text\)"),
        ([{"row": 0, "ids": [1, 2], "names": ["a"]}], ["id"],
         r"no field 'id', among \['row', 'ids.0', 'ids.1', 'names.0'\]"),
        ([{"x": 1.0}, {"x": {1, 2}}], None, r"row 1, field 'x': found set, which (?!.*All rows)"),
        ([{"ids": [1, 2.5]}], ["ids"], "rows of 'ids' are lists of float64 and int64"),
        ([{"ids": []}, {"ids": []}], None, r"'ids' is an empty list in each of the 2 rows"),
        ([{"x": torch.zeros(0, 2**16)}, {"x": torch.zeros(0, 2**17)}], None,
         r"'x': a row of shape \(0, 131072\) has no values"),
    ],
)  # fmt: skip
def test_rows_that_make_no_store_are_refused(
    tmp_path: Path, rows: Any, variable: Any, words: str
) -> None:
    with pytest.raises(SchemaError, match=words):
        build_store(rows, tmp_path / "s", num_shards=1, progress=False, variable=variable)


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        (["b"], "variable: .*'b'"),
        ({"a": 3}, "variable: .*'a'.* 3 dimensions"),
    ],
)
def test_variable_that_cannot_be_is_refused(tmp_path: Path, variable: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError, SchemaError), match=words):
        build(tmp_path / "s", [{"a": torch.zeros(3, 4)}] * 9, variable=variable)


class Lists:
    """Lists: an empty one in row 0, another one in the last row, and the same in all others."""

    def __init__(self, first: Any, later: Any, delay_s: float = 0.0) -> None:
        self.first, self.later, self.delay_s = first, later, delay_s

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, row: int) -> Any:
        if row == 0:
            sleep(self.delay_s)
            return {"row": row, "ids": []}
        return {"row": row, "ids": self.later if row == NUM_ROWS - 1 else self.first}


@pytest.mark.parametrize(
    ("options", "num_workers"),
    [
        ({}, 0),
        ({"variable": ["ids"]}, 2),
    ],
)
def test_empty_list_in_the_first_row_is_what_other_rows_show(
    tmp_path: Path, options: dict[str, Any], num_workers: int
) -> None:
    for first, later in (([1, 2], [3]), ([], [3, 4, 5])):
        path = tmp_path / str(len(first))
        store = build(path, Lists(first, later), num_workers=num_workers, **options)
        assert_holds(store, Lists(first, later))
        field = store.schema.fields[1]
        assert (field.name, field.shape) == ("ids", (None,))
        assert field.dtype == torch.int64


@pytest.mark.parametrize("num_workers", [0, 2])
def test_lists_of_other_numbers_are_named(tmp_path: Path, num_workers: int) -> None:
    words = r"rows of 'ids' are lists of float64 and int64"
    for first, later in (([1], [1.5, 2.5]), ([], [1, 2.5]), ([1, 2], [1.5])):
        # Where the first row is slow, each other one is compared with that one alone.
        for delay_s in (0.0, 0.15):
            dataset = Lists(first, later, delay_s)
            with pytest.raises(SchemaError, match=words):
                build(tmp_path / "s", dataset, num_workers=num_workers)


@pytest.mark.parametrize("value", ["a", b"a"])
def test_length_of_text_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(SchemaError, match=r"variable: field 'name'"):
        build(tmp_path / "s", [{"name": value}] * 9, variable=["name"])
    store = build(tmp_path / "s", [{"name": value}] * 9)
    with pytest.raises(ValueError, match=r"layout: field 'name'"):
        LayoutCollate(store.schema, {"name": Pad()})


@pytest.mark.parametrize(
    "values",
    [
        ["a", "", "żółw \U0001f422", "\udcff"],
        [b"a", b"", b"\xff\x00", b"longer"],
        [np.str_("a"), np.str_("bc"), np.str_(""), np.str_("d")],
        [PurePosixPath("a/b.png"), PurePosixPath("."), PurePosixPath("/"), PurePosixPath("c")],
    ],
)
def test_text_and_bytes_come_back(tmp_path: Path, values: list[Any]) -> None:
    store = build(tmp_path / "s", values)
    is_bytes = isinstance(values[0], bytes)
    assert [store[row] for row in range(4)] == (values if is_bytes else [*map(str, values)])
    assert {type(store[row]) for row in range(4)} == {bytes if is_bytes else str}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_build_that_failed_is_resumed(
    tmp_path: Path, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_MAX_BLOCK_ROWS", 100)
    monkeypatch.setattr(writing, "_MAX_BLOCKS", 1)
    dataset = Ragged(300)
    broken = Replaced(dataset, {290: ValueError("broken")})
    with pytest.raises(DatasetError, match="row 290"):
        build(tmp_path / "s", broken, num_workers=num_workers, fingerprint="one")
    counting = Counting(dataset)
    store = build(tmp_path / "s", counting, fingerprint="one")
    assert len(counting.rows) < 300
    assert_holds(store, dataset)
    assert verify_store(store.path) == []


@pytest.mark.parametrize("value", [-1, 2**63 - 1])
def test_hostile_index_is_refused_before_a_row_is_copied(ragged: Path, value: int) -> None:
    store = open_store(ragged)
    for place in (0, 40, NUM_ROWS - 1):
        index = np.memmap(store.files / "sound.index", np.int64, "r+")
        before, index[place] = int(index[place]), value
        row = int(store.manifest.shards.rows(np.array([place]))[0])
        with pytest.raises(StoreError, match=r"'sound': the index of its rows is damaged"):
            open_store(ragged)[row]
        index[place] = before
        del index


@pytest.mark.parametrize(
    "sizes", [(2**32, 2**32), (-1, -1), (2**62, 0), (3, 1), (2**40, 0), (0, 2**39), (2**17, 0)]
)
def test_hostile_sizes_are_refused(ragged: Path, sizes: tuple[int, int]) -> None:
    store = open_store(ragged)
    index = np.memmap(store.files / "image.index", np.int64, "r+").reshape(-1, 3)
    lengths = np.diff(index[:, 0], prepend=0)
    place = int(np.flatnonzero(lengths == 0)[0])
    index[place, 1:] = sizes
    del index
    row = int(store.manifest.shards.rows(np.array([place]))[0])
    with pytest.raises(StoreError, match=r"'image': the index of its rows is damaged"):
        open_store(store.path)[row]


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"sound": [0] * 6},
        {"sound": [-1] + [1] * 6},
        {"sound": [2**62] * 7},
        {"row": [1] * 7},
    ],
)
def test_manifest_whose_variable_columns_are_a_lie_is_refused(ragged: Path, columns: Any) -> None:
    with_others = lambda body: {**body["columns"], **columns} if columns else {}  # noqa: E731
    sign_manifest(ragged, lambda body: body.update(columns=with_others(body)))
    with pytest.raises(StoreError, match="cannot be trusted"):
        open_store(ragged)


def test_texts_that_are_none_are_refused(tmp_path: Path) -> None:
    for name, row in (("a", "a" * 9), ("b", ["a"] * 9)):
        rows = [{"x": row}] * 8 + [{"x": row[:1]}]
        store = build(tmp_path / name, rows, variable=None if name == "a" else ["x"])
        values = store.files / "x.values"
        values.write_bytes(b"\xff" * values.stat().st_size)
        with pytest.raises(StoreError, match=r"'x': a row is not .*damaged"):
            open_store(store.path)[3]


def test_rows_without_any_items_are_stored(tmp_path: Path) -> None:
    store = build(tmp_path / "s", [torch.zeros(0, 3)] * 20, variable=["value"])
    assert "value.values" not in names_in(store.path)
    assert [tuple(store[row].shape) for row in range(20)] == [(0, 3)] * 20
    assert verify_store(store.path) == []


def test_index_of_many_rows_is_written_block_by_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns_module, "LOCATED_ROWS", 7)
    store = build(tmp_path / "s", Ragged(NUM_ROWS))
    assert_holds(store, Ragged(NUM_ROWS))
