"""Windows over series, read from disk: those of the mapping, and each step is read once."""

from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lightning_memmap import MemmapDataModule
from lightning_memmap.errors import PlacementError
from lightning_memmap.loading import row_file
from lightning_memmap.loading.stream import (
    Stream,
    StreamMemory,
    locate_block_windows,
    max_block_time_steps,
)
from lightning_memmap.sampling import Pool, Sampler, SequentialSampler, ShuffledSampler
from lightning_memmap.sampling.identity import FrozenArray
from lightning_memmap.sampling.rows import Shards, StoreRows, WindowedRows
from lightning_memmap.sampling.schedule import Blocks
from lightning_memmap.schema import Windows
from lightning_memmap.store import TokenStream, build_store
from tests.support.models import set_up
from tests.support.rows import make_window_loader

# Which steps windows need


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    lengths = draw(st.lists(st.integers(0, 60), min_size=1, max_size=30))
    length, stride = draw(st.integers(1, 12)), draw(st.integers(1, 15))
    assume(max(lengths) >= length)
    num_shards = draw(st.integers(1, 9))
    line = over(Shards(len(lengths), num_shards), lengths, length, stride)
    return Pool.of(line, num_shards, is_striped=draw(st.booleans()))


def over(series: Shards, lengths: list[int], length: int, stride: int) -> WindowedRows:
    return WindowedRows(StoreRows(series), ("x",), FrozenArray(np.array(lengths)), length, stride)


@given(pools(), st.integers(1, 20), st.integers(0, 99), st.integers(1, 3))
@settings(deadline=None, max_examples=25)
def test_stretches_have_the_windows_of_a_run_and_no_window_more_steps_than_the_largest(
    pool: Pool, window: int, seed: int, size: int
) -> None:
    held = [*range(0, pool.num_shards, size)]
    rows = min(window, pool.longest)
    order: Sampler = SequentialSampler(pool, shuffle_block=rows)
    if not pool.is_striped:
        order = ShuffledSampler(pool, seed, rows)
    windows, line = Blocks(order), pool.rows
    assert isinstance(line, WindowedRows)
    most = max_block_time_steps(held, windows)
    series: Any = SimpleNamespace(
        windows=line, shifts=np.zeros(len(line.windows_per_series), np.int64)
    )
    for number in range(len(windows)):
        begins, lengths = locate_block_windows(series, np.array(held), windows, 1, number)
        firsts, counts = begins // line.stride, (lengths[:, 0] - line.length) // line.stride + 1
        found = [*chain(*(range(a, a + n) for a, n in zip(firsts, counts, strict=True)))]
        wanted = pool.file_rows(windows.pool_indices(1, number, np.array(held))).tolist()
        assert (counts > 0).all()
        assert len(set(found)) == len(found)
        places = line.in_series(firsts)[0]
        if pool.is_striped:
            assert set(found) >= set(wanted)
            assert {*line.in_series(np.array(wanted))[0].tolist()} == {*places.tolist()}
        else:
            assert sorted(found) == sorted(wanted)
        # Steps that windows of a run have in common are there once.
        assert lengths.sum() <= most
    everything = int((line.windows_per_series[line.windows_per_series > 0] - 1).sum()) * line.stride
    everything += int((line.windows_per_series > 0).sum()) * line.length
    edges = np.array([0, line.num_rows])
    assert line.num_covered_steps_before(edges, pool.is_striped).tolist() == [0, everything]


# Loaders


# Memory, and bytes


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 2**16, 600_000).astype(np.uint16)


@pytest.mark.parametrize(("length", "stride"), [(64, 64), (65, 64), (64, 8), (64, 1)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_token_is_read_about_once_however_much_windows_overlap(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bytes_read: list[int],
    tokens: np.ndarray,
    length: int,
    stride: int,
    shuffle: bool,
) -> None:
    # As in a store whose shards lie further apart.
    monkeypatch.setattr(row_file, "_GAP_BYTES", 0)
    data = MemmapDataModule(
        TokenStream(tokens, length, stride, row_tokens=20_000),
        store_dir=tmp_path,
        batch_size=512,
        shuffle=shuffle,
        residency="stream",
        shuffle_block=max(1, 6000 // stride),
        windows=Windows("tokens", length, stride),
    )
    set_up(data, "fit")
    count = 0
    for batch in data.train_dataloader():
        count += len(batch["tokens"])
        assert batch["tokens"].shape[1:] == (length,)
    assert count == (len(tokens) - length) // stride + 1
    used = 2 * ((count - 1) * min(length, stride) + length)
    assert used <= sum(bytes_read) < 1.1 * used


def test_memory_holds_each_step_once(tmp_path: Path, tokens: np.ndarray) -> None:
    store = build_store(
        TokenStream(tokens, 64, 1, row_tokens=20_000), tmp_path / "s", num_shards=4, progress=False
    )
    options: dict[str, Any] = {"residency": "stream", "window": 10_000}
    loader = make_window_loader(store, Windows("tokens", 64, 1), **options)
    (source,) = loader._rows.sources
    assert isinstance(source, Stream)
    steps = StreamMemory(source).items.memory[0]
    # Of 40,000 windows of 64 tokens.
    assert 40_000 * 2 <= steps.nbytes < 44_000 * 2
    for memory in (2 * 44_000 * 2, 2 * 30_000 * 2):
        if memory > 2 * 40_000 * 2:
            make_window_loader(store, Windows("tokens", 64, 1), **options, memory=memory)
            continue
        with pytest.raises(PlacementError, match=r"Use shuffle_block=7\d\d\d or less"):
            make_window_loader(store, Windows("tokens", 64, 1), **options, memory=memory)


def test_window_that_is_not_given_has_512_mib_of_steps(tmp_path: Path, tokens: np.ndarray) -> None:
    for length, stride in ((64, 64), (64, 1)):
        data = MemmapDataModule(
            TokenStream(tokens, length, stride, row_tokens=20_000),
            store_dir=tmp_path / str(stride),
            residency="stream",
            windows=Windows("tokens", length, stride),
        )
        set_up(data, "fit")
        assert data.placement is not None
        split = data.placement.splits["train"]
        assert (
            0.98 * 2**29
            < split.order.shuffle_block * split.pool.num_shards * stride * 2
            < 1.02 * 2**29
        )
