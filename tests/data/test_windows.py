"""Windows over series through loaders and the data module: the same under every division."""

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_memmap import MemmapDataModule
from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.loading.memory import Memory
from lightning_memmap.placement.shard_sizes import compute_shard_bytes
from lightning_memmap.sampling import (
    KFold,
    Pool,
    RandomSplit,
    SequentialSampler,
    ShuffledSampler,
    Subset,
    Weighted,
)
from lightning_memmap.sampling.identity import FrozenArray
from lightning_memmap.sampling.pool import held_windows_by_series
from lightning_memmap.sampling.rows import Rows, Shards, StoreRows, WindowedRows
from lightning_memmap.schema import Decode, Windows
from lightning_memmap.store import Store, TokenStream, build_store
from tests.support.datasets import Series, all_windows, windows_in
from tests.support.models import set_up
from tests.support.rows import StridedRows, make_window_loader

LENGTHS = [5 + row * 7 % 30 for row in range(40)]
LENGTH, STRIDE = 8, 3
WINDOWS = Windows(["value", "time"], LENGTH, STRIDE)
EXPECTED = all_windows(LENGTHS, LENGTH, STRIDE)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return build_store(
        Series(LENGTHS), tmp_path_factory.mktemp("series") / "store", num_shards=12, progress=False
    )


def view_steps(loader: SuperBatchLoader, epoch: int = 0) -> list[list[tuple[int, int]]]:
    loader.set_epoch(epoch)
    return [windows_in(batch.to("cpu"), LENGTH) for batch in loader]


def joined(steps: list[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(steps))


# Shards of windows


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    num_shards=st.integers(1, 9),
    length=st.integers(1, 12),
    stride=st.integers(1, 15),
    subset=st.booleans(),
)
def test_each_window_is_in_one_shard_and_found_again(
    lengths: list[int], num_shards: int, length: int, stride: int, subset: bool
) -> None:
    rows: Rows = StoreRows(Shards(len(lengths), num_shards))
    whole, chosen = None, range(len(lengths))
    if subset:
        all_steps = FrozenArray(np.array(lengths)[rows.subset_index_at(np.arange(len(lengths)))])
        if all_windows(lengths, length, stride):
            whole = WindowedRows(rows, ("x",), all_steps, length, stride)
        rows, chosen = StridedRows(0, 2).among(rows), range(0, len(lengths), 2)
    expected = [found for found in all_windows(lengths, length, stride) if found[0] in chosen]
    steps = FrozenArray(
        np.array(lengths)[rows.dataset_rows(rows.subset_index_at(np.arange(rows.num_rows)))]
    )
    if not expected:
        with pytest.raises(ValueError, match="the longest of the"):
            WindowedRows(rows, ("x",), steps, length, stride, whole)
        return
    line = WindowedRows(rows, ("x",), steps, length, stride, whole)
    numbers = np.arange(len(expected))
    in_dataset = line.dataset_rows(numbers)
    # A part of a dataset has the numbers of the whole.
    every = all_windows(lengths, length, stride)
    assert [every[number] for number in in_dataset.tolist()] == expected
    assert [tuple(name) for name in line.names(in_dataset)] == expected
    assert line.store_rows(in_dataset).tolist() == [row for row, _ in expected]
    assert line.subset_index_at(line.file_rows(numbers)).tolist() == numbers.tolist()
    for pool in (Pool.of(line, num_shards), Pool.of(line, num_shards, is_striped=True)):
        assert pool.is_striped is (SequentialSampler(pool).pool is pool)
        found = [pool.subset_index(pool.indices(shard)) for shard in range(num_shards)]
        assert [len(each) for each in found] == pool.sizes.tolist()
        assert sorted(np.concatenate(found).tolist()) == numbers.tolist()
        for shard, each in enumerate(found):
            places = pool.file_rows(pool.indices(shard))
            assert line.subset_index_at(places).tolist() == each.tolist()
            at, windows = line.in_series(places)
            firsts, counts = held_windows_by_series(pool, [shard])
            assert (windows >= firsts[at]).all()
            assert (windows < (firsts + counts)[at]).all()
            assert (counts > 0).sum() == len(set(at.tolist()))
    pool, positions = Pool.of(line, num_shards), range(len(expected))
    sequential = SequentialSampler(pool).dataset_rows(0, positions)
    assert sequential.tolist() == in_dataset.tolist()
    shuffled = ShuffledSampler(pool, 3).dataset_rows(1, positions)
    assert sorted(shuffled.tolist()) == in_dataset.tolist()


# Loaders


@pytest.mark.parametrize("residency", ["mmap", "host"])
def test_store_that_devices_do_not_divide_is_striped_anew(store: Store, residency: str) -> None:
    loader = make_window_loader(store, WINDOWS, 5, 4, residency=residency)
    assert sorted(joined(view_steps(loader))) == EXPECTED


def test_memory_holds_each_step_once(store: Store) -> None:
    held = 0
    for rank in range(4):
        loader = make_window_loader(
            store, WINDOWS, rank=rank, size=4, residency="host", batch_size=3
        )
        (source,) = loader._rows.sources
        assert isinstance(source, Memory)
        assert source.columns is not None
        columns = [column for column, _ in source.columns._columns]
        (steps,) = (c for c in columns if isinstance(c, Tensor) and c.shape[1:] == (LENGTH,))
        held += steps.untyped_storage().nbytes() // 4
    # Shards c with c % 4 == rank are pieces of the line: where one ends inside a series, the next
    # one begins with as many steps as windows overlap.
    used = sum(length - (length - LENGTH) % STRIDE for length in LENGTHS if length >= LENGTH)
    assert used <= held <= used + 12 * (LENGTH - STRIDE)


def test_plan_counts_the_bytes_that_are_held(store: Store) -> None:
    loader = make_window_loader(store, Windows("value", LENGTH, STRIDE), residency="host")
    pool = loader.order.pool
    _, counts = held_windows_by_series(pool, range(12))
    steps = int(((counts[counts > 0] - 1) * STRIDE + LENGTH).sum())
    # Of the other fields, a piece of a series counts as their mean.
    others = [each for each in store.manifest.columns if each.field.name != "value"]
    rest = sum(-(-each.num_bytes // store.num_rows) for each in others)
    pieces = int((counts > 0).sum())
    least = steps * 4 + pieces * rest
    assert (
        0
        <= compute_shard_bytes(store.manifest, pool, 1).sum() - least
        <= 12 * ((LENGTH - STRIDE) * 4 + rest)
    )


@pytest.mark.parametrize("residency", ["mmap", "host"])
def test_rows_of_one_shape_are_cut_too(tmp_path: Path, residency: str) -> None:
    lengths = [20] * 9
    store = build_store(Series(lengths), tmp_path / "store", num_shards=6, progress=False)
    assert store.schema.fields[0].shape == (20,)
    for stride in (1, 5, 9):
        windows = Windows(["value", "time"], LENGTH, stride)
        loader = make_window_loader(store, windows, 2, 6, residency=residency)
        assert sorted(joined(view_steps(loader))) == all_windows(lengths, LENGTH, stride)


# Token streams


@pytest.mark.parametrize(
    ("content", "dtype"), [(b"", "uint8"), (b"12345", "uint32"), (b"1234", "uint99")]
)
def test_file_of_no_tokens_is_named(tmp_path: Path, content: bytes, dtype: str) -> None:
    (tmp_path / "tokens.bin").write_bytes(content)
    words = rf"tokens\.bin has {len(content)} bytes, .* dtype='{dtype}'"
    with pytest.raises(ValueError, match=words):
        TokenStream(tmp_path / "tokens.bin", 2, dtype=dtype)


@given(
    num_tokens=st.integers(1, 300),
    length=st.integers(1, 20),
    stride=st.integers(1, 25),
    row_tokens=st.integers(1, 90),
)
def test_each_window_of_a_stream_is_in_one_row(
    num_tokens: int, length: int, stride: int, row_tokens: int
) -> None:
    tokens = np.arange(num_tokens, dtype=np.uint16)
    if num_tokens < length:
        with pytest.raises(ValueError, match="shorter windows"):
            TokenStream(tokens, length, stride)
        return
    stream = TokenStream(tokens, length, stride, row_tokens=row_tokens)
    rows = [stream[row]["tokens"] for row in range(len(stream))]
    firsts = [int(row[step]) for row in rows for step in range(0, len(row) - length + 1, stride)]
    assert firsts == [*range(0, num_tokens - length + 1, stride)]
    for row in rows:
        assert row.dtype == np.uint16
        assert row.tolist() == [*range(row[0], row[-1] + 1)]
    with pytest.raises(IndexError):
        stream[len(stream)]


def test_stream_of_a_file_is_what_the_file_has(tmp_path: Path) -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    tokens.tofile(tmp_path / "tokens.bin")
    train = TokenStream(tmp_path / "tokens.bin", 10, dtype="uint16", stop=0.9, row_tokens=100)
    val = TokenStream(str(tmp_path / "tokens.bin"), 10, dtype="uint16", start=0.9)
    assert np.concatenate([train[row]["tokens"] for row in range(len(train))]).tolist() == [
        *range(900)
    ]
    assert val[0]["tokens"].tolist() == [*range(900, 1000)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tokens": np.zeros((2, 2)), "length": 1}, "one dimension"),
        ({"tokens": np.zeros(9), "length": 1, "start": 1.0}, "start=1.0"),
        ({"tokens": np.zeros(9), "length": 10}, "shorter windows"),
    ],
)
def test_wrong_stream_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TokenStream(**arguments)


# The data module


def make_data(path: Path, dataset: Any = None, **options: Any) -> MemmapDataModule:
    return MemmapDataModule(
        Series(LENGTHS) if dataset is None else dataset,
        Series(LENGTHS[:9]),
        store_dir=path / "stores",
        **{
            "batch_size": 6,
            "num_shards": 12,
            "seed": 5,
            "windows": WINDOWS,
            **options,
        },
    )


def test_subset_and_weights_by_a_field_go_together(tmp_path: Path) -> None:
    data = set_up(
        make_data(tmp_path, subset=Subset(range(20)), sampler=Weighted("row", num_samples=400)),
        "fit",
    )
    rows = Counter(row for batch in data.train_dataloader() for row, _ in windows_in(batch, LENGTH))
    long = [row for row in range(20) if LENGTHS[row] >= LENGTH]
    assert sorted(rows) == long
    # All series come equally often, however many windows they have.
    assert max(rows.values()) - min(rows.values()) <= 400 // len(long)


@pytest.mark.parametrize("sampler", [None, Weighted("row")])
@pytest.mark.parametrize("part", [None, Subset(range(7, 40, 2)), KFold(4), RandomSplit(0.3)])
def test_row_numbers_of_windows_in_a_part_are_those_of_the_dataset(
    tmp_path: Path, part: Any, sampler: Any
) -> None:
    data = MemmapDataModule(
        Series(LENGTHS),
        store_dir=tmp_path / "stores",
        batch_size=6,
        subset=part,
        member=1 if isinstance(part, KFold) else None,
        sampler=sampler,
        windows=WINDOWS,
        with_row_numbers=True,
    )
    set_up(data, "fit")
    val: Any = data.val_dataloader()
    found = list[int]()
    for batch in chain(data.train_dataloader(), val):
        numbers = batch["row_number"].tolist()
        assert windows_in(batch, LENGTH) == [EXPECTED[number] for number in numbers]
        found += numbers
    if sampler is None and not isinstance(part, Subset):
        assert sorted(found) == [*range(len(EXPECTED))]


@pytest.mark.parametrize(
    ("windows", "words"),
    [
        (Windows(["value", "values"], 8, 3), "windows: .*'values'"),
        (Windows("name", 8, 3), "windows: .*'name'.*text"),
        (Windows("row", 8, 3), "windows: .*'row'"),
        (Windows("value", 100, 1), "length=100"),
        ({"fields": ["value"]}, "windows: .*length"),
        ({"fields": "value", "length": 2, "stride": 1, "dims": 2}, "'dims'"),
    ],
)
def test_wrong_windows_are_rejected(tmp_path: Path, windows: Any, words: str, store: Store) -> None:
    (tmp_path / "train").symlink_to(store.path)
    with pytest.raises((ValueError, TypeError), match=words):
        MemmapDataModule(store_dir=tmp_path, windows=windows).setup("fit")


@pytest.mark.parametrize(
    "options",
    [{"layout": {"value": "pad"}}, {"decode": {"name": Decode()}}],
    ids=["layout", "decode"],
)
def test_option_that_windows_exclude_is_named(
    tmp_path: Path, options: dict[str, Any], store: Store
) -> None:
    (tmp_path / "train").symlink_to(store.path)
    data = MemmapDataModule(store_dir=tmp_path, windows=WINDOWS, **options)
    with pytest.raises(ValueError, match=next(iter(options))):
        set_up(data, "fit").train_dataloader()


def test_fields_that_differ_in_their_steps_are_refused(tmp_path: Path) -> None:
    rows = [{"a": np.zeros(9 + row), "b": np.zeros(9 + row % 3)} for row in range(5)]
    data = MemmapDataModule(rows, store_dir=tmp_path, windows=Windows(["a", "b"], 4, 1))
    data.prepare_data()
    with pytest.raises(ValueError, match="up to row 3, field 'b'"):
        data.setup("fit")


def test_windows_take_part_in_a_stream_of_tokens(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 2**16, 5000).astype(np.uint16)
    data = MemmapDataModule(
        TokenStream(tokens, 33, 16, row_tokens=700),
        store_dir=tmp_path,
        batch_size=10,
        windows=Windows("tokens", 33, 16),
    )
    set_up(data, "fit")
    found = sorted(tuple(w) for b in data.train_dataloader() for w in b["tokens"].tolist())
    unfolded = torch.from_numpy(tokens.astype(np.int64)).unfold(0, 33, 16)
    assert found == sorted(map(tuple, unfolded.tolist()))
    data.windows = Windows("tokens", 33, 8)
    with pytest.warns(UserWarning, match=r"length=33, stride=8"):
        data.setup("fit")
    # One sample is a stream as well: then windows may have any length.
    data = MemmapDataModule(
        [{"tokens": tokens}],
        store_dir=tmp_path / "one",
        batch_size=10,
        windows=Windows("tokens", 100, 7),
    )
    set_up(data, "fit")
    found = sorted(tuple(w) for b in data.train_dataloader() for w in b["tokens"].tolist())
    unfolded = torch.from_numpy(tokens.astype(np.int64)).unfold(0, 100, 7)
    assert found == sorted(map(tuple, unfolded.tolist()))
