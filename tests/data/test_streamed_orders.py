"""Mixtures, weights, buckets and curricula that are read window by window."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_memmap import MemmapDataModule
from lightning_memmap.data import set_up as set_up_module
from lightning_memmap.errors import PlacementError, StoreError
from lightning_memmap.loading import row_file
from lightning_memmap.loading.stream import LOOKUP_BYTES
from lightning_memmap.sampling import Mixture
from lightning_memmap.schema import Windows
from lightning_memmap.store import TokenStream
from tests.data.test_mixture import epoch_of, make_data, set_up
from tests.support.rows import read_in_blocks


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stores")


@pytest.mark.parametrize("block_bytes", [1, 512, 4096])
def test_rows_of_several_files_are_read_wherever_their_blocks_begin(
    stores: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    expected = epoch_of(set_up(make_data(stores, shuffle_block=5)))
    read_in_blocks(monkeypatch, block_bytes, 2 * 4096)
    data = set_up(make_data(stores, shuffle_block=5, residency="stream"))
    assert epoch_of(data) == expected


@pytest.mark.parametrize("gap_bytes", [8, 2**17])
def test_one_read_has_rows_of_several_files_and_what_lies_between(
    stores: Path, monkeypatch: pytest.MonkeyPatch, gap_bytes: int
) -> None:
    expected = epoch_of(set_up(make_data(stores, shuffle_block=5)))
    monkeypatch.setattr(row_file, "_GAP_BYTES", gap_bytes)
    data = set_up(make_data(stores, shuffle_block=5, residency="stream"))
    assert epoch_of(data) == expected


def test_file_of_a_set_that_is_cut_short_is_named(tmp_path: Path) -> None:
    data = set_up(make_data(tmp_path, shuffle_block=5, residency="stream"))
    (path,) = (tmp_path / "stores" / "train" / "b").glob("g-*/pad.*")
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(StoreError, match=re.escape(str(path))):
        epoch_of(data)


# Tokens


def token_data(path: Path, sizes: dict[str, int], **options: Any) -> MemmapDataModule:
    """Tokens of several corpora, of which the first of each window says which it is."""
    corpora = {
        name: TokenStream(
            # A token is its place, in base 2**16, so that a window is known by its first ones.
            np.arange(size * 64, dtype=np.uint32) // 64 + code * 2**24,
            65,
            64,
            row_tokens=64 * 50,
        )
        for code, (name, size) in enumerate(sizes.items())
    }
    defaults: dict[str, Any] = {
        "train_dataset": corpora,
        "batch_size": 48,
        "num_shards": 12,
        "windows": Windows("tokens", 65, 64),
        "residency": "stream",
    }
    return set_up(MemmapDataModule(store_dir=path, **{**defaults, **options}))


def tokens_of(data: MemmapDataModule, epoch: int = 0) -> list[np.ndarray]:
    loader: Any = data.train_dataloader()
    loader.set_epoch(epoch)
    return [batch["tokens"].numpy() for batch in loader]


@pytest.mark.parametrize("shares", [{"a": 0.7, "b": 0.3}, {"a": 0.1, "b": 0.9}])
@pytest.mark.parametrize("num_samples", [9600, 960])
def test_bytes_of_a_token_mixture_are_read_about_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bytes_read: list[int],
    shares: dict[str, float],
    num_samples: int,
) -> None:
    # As in stores whose shards lie further apart.
    monkeypatch.setattr(row_file, "_GAP_BYTES", 0)
    sizes = {"a": 9000, "b": 600}
    sampler = Mixture(shares, num_samples)
    data = token_data(tmp_path, sizes, sampler=sampler, shuffle_block=40)
    del bytes_read[:]
    steps = tokens_of(data)
    windows = np.concatenate(steps)
    assert (windows == windows[:, :1] + (np.arange(65) == 64)).all()
    codes = windows[:, 0] >> 24
    for code, (name, size) in enumerate(sizes.items()):
        expected = num_samples * shares[name]
        assert (codes == code).sum() == expected
        counts = np.bincount(windows[codes == code, 0] & (2**24 - 1), minlength=size - 1)
        assert counts.max() <= -(-expected // (size - 2))
    used = windows.size * 4
    # The last token of a window is the first of the next one, and read with it. A window that comes
    # twice in what is read at once is read once.
    assert sum(bytes_read) < 1.15 * used
    mapped = token_data(tmp_path, sizes, sampler=sampler, shuffle_block=40, residency="mmap")
    for step, other in zip(steps, tokens_of(mapped), strict=True):
        assert np.array_equal(step, other)


def test_window_that_does_not_fit_is_refused_with_one_that_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of 12 shards, two windows of 40 rows of 65 tokens, and of what it takes to look them up.
    budget = 2 * 12 * 40 * (65 * 4 + LOOKUP_BYTES)
    monkeypatch.setattr(set_up_module, "compute_budgets", lambda *_: {torch.device("cpu"): budget})
    options: dict[str, Any] = {"sampler": Mixture({"a": 1, "b": 1})}
    with pytest.raises(PlacementError, match="shuffle_block=40 or less"):
        token_data(tmp_path, {"a": 900, "b": 60}, **options, shuffle_block=50)
    token_data(tmp_path, {"a": 900, "b": 60}, **options, shuffle_block=40)
