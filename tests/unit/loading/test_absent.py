"""Batches of a process that needs only some fields."""

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_memmap.errors import StoreError
from lightning_memmap.loading.absent import absent_rows
from lightning_memmap.placement import DataTopology, Residency, SplitSize
from lightning_memmap.store import Store, build_store
from tests.rows import CPU, NumberedRows, assembled, loader_over, split_with

MMAP, DEVICE, STREAM = Residency.MMAP, Residency.DEVICE, Residency.STREAM
NUM_ROWS, SHARDS = 43, 4
WINDOW = 5
FIELDS: list[Any] = [frozenset({"image"}), frozenset({"row"}), frozenset()]


def batches(
    store: Store, fields: frozenset[str] | None, residency: Any, size: int, prefetch: int = 0
) -> list[dict[str, Tensor]]:
    """All batches of the first of some processes, in two epochs."""
    topology = DataTopology((CPU,), 0, size, train_fields=fields)
    found: list[dict[str, Tensor]] = []
    num_shards = -(-SHARDS // size) * size
    where = tuple(
        residency[shard % len(residency)] if shard % size == 0 else None
        for shard in range(num_shards)
    )
    split = split_with(store, topology, where, window=WINDOW)
    loader = loader_over(store, split, 6, shuffle=True, shuffle_window=WINDOW)
    for epoch in range(2):
        loader.set_epoch(epoch)
        # The loader uses its buffers again.
        found += [
            {name: leaf.clone() for name, leaf in batch.items()}
            for batch in assembled(loader, prefetch=prefetch)
        ]
    split.release()
    return found


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "residency", [(MMAP,), (DEVICE,), (STREAM,), (MMAP, MMAP, DEVICE, DEVICE), (STREAM, DEVICE)]
)
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.filterwarnings("ignore:residency='stream'. .* bytes of the store")
def test_rows_of_needed_fields_are_those_of_a_whole_batch(
    fields: frozenset[str],
    size: int,
    residency: tuple[Residency, ...],
    prefetch: int,
    numbered_store: Any,
) -> None:
    store = numbered_store(NUM_ROWS, SHARDS)
    whole = batches(store, None, residency, size)
    found = batches(store, fields, residency, size, prefetch)
    for some, every in zip(found, whole, strict=True):
        assert list(some) == list(every)
        for name, leaf in every.items():
            assert some[name].is_meta == (name not in fields)
            assert (some[name].shape, some[name].dtype) == (leaf.shape, leaf.dtype)
            if name in fields:
                assert torch.equal(some[name], leaf)


def test_files_of_fields_that_are_not_needed_are_not_opened(tmp_path: Path) -> None:
    store = build_store(NumberedRows(NUM_ROWS), tmp_path / "s", num_shards=SHARDS, progress=False)
    os.unlink(store.files / "image.memmap")
    found = batches(store, frozenset({"row"}), (STREAM,), 1)
    assert sum(len(batch["row"]) for batch in found) == 2 * NUM_ROWS
    with pytest.raises(StoreError, match="image"):
        batches(store, None, (STREAM,), 1)


def test_plan_counts_the_bytes_of_needed_fields_of_the_training_rows(numbered_store: Any) -> None:
    store = numbered_store(NUM_ROWS, SHARDS)
    topology = DataTopology((CPU,), train_fields=frozenset({"row"}))
    whole = SplitSize.of("train", store.manifest, DataTopology((CPU,)))
    train = SplitSize.of("train", store.manifest, topology)
    assert sum(train.shard_bytes) == 8 * NUM_ROWS
    assert SplitSize.of("val", store.manifest, topology) == whole
    # The order of rows depends on it.
    assert train.window == whole.window


def test_fields_with_several_data_devices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"train_fields=\['x'\] with 2 data devices"):
        DataTopology((CPU, CPU), train_fields=frozenset({"x"}))


def test_absent_rows_have_a_shape_and_a_dtype_through_conversions() -> None:
    rows = absent_rows(5, (2, 3), torch.uint8)
    for found, shape, dtype in (
        (rows.to("cpu"), (5, 2, 3), torch.uint8),
        (rows.to(torch.device("cuda", 0), non_blocking=True), (5, 2, 3), torch.uint8),
        (rows.to("cpu", torch.float64), (5, 2, 3), torch.float64),
        (rows.to(torch.ones(1, dtype=torch.int16)), (5, 2, 3), torch.int16),
        (rows.float() / 255, (5, 2, 3), torch.float32),
        (rows[1:3].flatten(1), (2, 6), torch.uint8),
        (torch.cat([rows, rows]), (10, 2, 3), torch.uint8),
        (copy.deepcopy(rows), (5, 2, 3), torch.uint8),
    ):
        assert found.is_meta
        assert (found.shape, found.dtype) == (shape, dtype)


ROWS, WHERE = absent_rows(3, (3,), torch.float32), absent_rows(3, (1,), torch.int64)


@pytest.mark.parametrize(
    "use",
    [
        lambda: torch.ones(3, 3) @ ROWS,
        lambda: torch.ones(3, 4).gather(1, WHERE),
        lambda: torch.ones(3)[WHERE],
        lambda: F.embedding(WHERE, torch.ones(4, 4)),
        lambda: F.cross_entropy(torch.ones(3, 4), WHERE[:, 0]),
        lambda: torch.ones(3, 3).add_(ROWS),
        lambda: torch.ones(3, 3).copy_(ROWS),
        lambda: torch.ones(3, 3).to(ROWS),
        lambda: ROWS * torch.tensor(2.0),
        lambda: nn.Linear(3, 2)(ROWS),
        lambda: torch.cat([ROWS, torch.ones(3, 3)]),
        lambda: torch.add(torch.ones(3, 3), 1, out=ROWS),
    ],
)
def test_absent_rows_with_a_tensor_that_has_values_are_refused(use: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match="this process does not hold the field"):
        use()


@pytest.mark.parametrize("ask", [Tensor.tolist, Tensor.cpu, lambda rows: bool(rows.any())])
def test_values_of_absent_rows_are_refused(ask: Callable[[Tensor], object]) -> None:
    with pytest.raises(RuntimeError, match="meta"):
        ask(ROWS)
