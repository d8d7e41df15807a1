"""Rows that differ in length, read window by window: those of the mapping, in bounded memory."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_memmap.loading import FormedCollate, SuperBatchLoader, window_items, window_reads
from lightning_memmap.loading.store_offsets import StoreOffsets
from lightning_memmap.loading.streamed import StreamedRows
from lightning_memmap.loading.window_items import largest_window
from lightning_memmap.sampling import RowSubset, StridedRows
from lightning_memmap.sampling.block_shuffled import BlockShuffledSampler
from lightning_memmap.schema import read_forms
from lightning_memmap.store import Store, build_store
from lightning_memmap.store.columns import ItemRows
from lightning_memmap.store.row_file import RowFile
from tests.rows import CPU, loader_over, make_split

VARIABLE = {"grid": "pad", "boxes": "pad", "wide": "list", "empty": "pad"}


def sample(row: int) -> dict[str, Any]:
    """All that differs in length, with empty rows among it, and a number."""
    sizes = np.random.default_rng(row)
    length = int(sizes.integers(0, 40))
    return {
        "row": row,
        "sound": torch.arange(length, dtype=torch.int16) + row,
        "text": f"row {row} " + "é" * (row % 11),
        "grid": torch.full((row % 3, 1 + row % 5, 3), row, dtype=torch.float64),
        "boxes": [{"box": torch.full((4,), row + n), "label": n} for n in range(row % 4)],
        "wide": torch.full((row % 4, 1001), row % 251, dtype=torch.uint8),
        "empty": torch.zeros(0, dtype=torch.uint8),
    }


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Store]:
    directory = tmp_path_factory.mktemp("items")
    return {
        (rows, shards): build_store(
            [sample(row) for row in range(rows)],
            directory / f"{rows}-{shards}",
            num_shards=shards,
            variable=VARIABLE,
            progress=False,
        )
        for rows, shards in ((5, 7), (97, 24), (181, 7), (400, 24))
    }


def plain(value: Any) -> Any:
    """What can be compared of a batch."""
    if isinstance(value, Tensor):
        if value.is_nested:
            return [plain(each) for each in value.unbind()]
        return value.dtype, value.shape, value.tolist()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def batches(loader: SuperBatchLoader) -> Iterator[Any]:
    for super_batch in loader:
        yield plain(super_batch.to(CPU))


def make(
    store: Store,
    residency: str,
    batch_size: int = 6,
    window: int = 5,
    num_devices: int = 1,
    forms: dict[str, Any] | None = None,
    subset: RowSubset | None = None,
    rank: int = 0,
    size: int = 1,
    **options: Any,
) -> SuperBatchLoader:
    split = make_split(
        store,
        num_devices,
        residency=residency,
        rank=rank,
        size=size,
        window=window,
        subset=subset,
        forms=forms,
    )
    collate = FormedCollate(store.schema, read_forms({**VARIABLE, **(forms or {})}))
    options = {"shuffle": True, **options}
    return loader_over(store, split, batch_size, shuffle_window=window, collate=collate, **options)


@st.composite
def setups(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "batch_size": draw(st.integers(1, 9)),
        "window": draw(st.sampled_from([1, 2, 5, 1000])),
        "num_devices": draw(st.sampled_from([1, 2, 3, 4])),
        "subset": draw(st.sampled_from([None, StridedRows(0, 4, excluded=True)])),
        "shuffle": draw(st.booleans()),
        "transform": draw(st.sampled_from([None, lambda batch: batch])),
        "forms": draw(st.sampled_from([None, {"sound": "jagged"}, {"sound": "list"}])),
    }


@given(setup=setups(), shape=st.sampled_from([(5, 7), (97, 24), (181, 7)]), size=st.integers(1, 2))
@settings(deadline=None, max_examples=25)
def test_rows_are_those_of_the_mapping(
    stores: dict[tuple[int, int], Store],
    setup: dict[str, Any],
    shape: tuple[int, int],
    size: int,
) -> None:
    store = stores[shape]
    assume(shape[0] > setup["num_devices"] * size * 2)
    for rank in range(size):
        streamed, mapped = (
            make(store, residency, rank=rank, size=size, **setup) for residency in ("stream", "mmap")
        )
        for epoch in range(2):
            streamed.set_epoch(epoch)
            mapped.set_epoch(epoch)
            assert list(batches(streamed)) == list(batches(mapped))
