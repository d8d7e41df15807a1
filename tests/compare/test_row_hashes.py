"""Hashes of rows: what they notice, and that a store tells the same as a loader."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_memmap.compare.parity import HashedTransform, hash_batch
from lightning_memmap.compare.prepare import stored_batches
from lightning_memmap.loading.row_random import RowRandom
from lightning_memmap.store import Store
from lightning_memmap.strategies.replicas.batches import ReplicaBatches
from tests.support.rows import CPU, make_loader, make_sampler

BATCH = {
    "image": torch.arange(48, dtype=torch.uint8).reshape(8, 2, 3),
    "label": torch.arange(8),
    "weight": torch.linspace(0, 1, 8, dtype=torch.bfloat16),
    "empty": torch.empty(8, 0),
}


def rows_of_batch(*rows: int) -> dict[str, Tensor]:
    return {name: leaf[list(rows)] for name, leaf in BATCH.items()}


def test_hash_of_parts_adds_up_to_that_of_the_batch_in_any_order() -> None:
    whole = hash_batch(BATCH)
    parts = [hash_batch(rows_of_batch(7, 1, 4)), hash_batch(rows_of_batch(0, 2, 3, 5, 6))]
    assert sum(parts) % 2**64 == whole
    assert hash_batch(rows_of_batch(3, 2, 1, 0, 7, 6, 5, 4)) == whole


@pytest.mark.parametrize("rows", [(0, 1, 2, 3, 4, 5, 6), (0, 1, 2, 3, 4, 5, 6, 6)])
def test_hash_notices_a_missing_and_a_repeated_row(rows: tuple[int, ...]) -> None:
    assert hash_batch(rows_of_batch(*rows)) != hash_batch(BATCH)


def test_hash_notices_fields_that_are_of_other_rows() -> None:
    swapped = {**BATCH, "label": BATCH["label"].flip(0)}
    assert hash_batch(swapped) != hash_batch(BATCH)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_read_one_by_one_have_the_hashes_of_a_loader(
    numbered_store: Callable[..., Store], devices: int, shuffle: bool
) -> None:
    store = numbered_store(70, 6)
    loader = make_loader(store, devices, 12 // devices, shuffle=shuffle, drop_last=True, seed=3)
    found = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        found += [hash_batch(super_batch) for super_batch in loader]
    read = stored_batches(store, make_sampler(70, 6, 3, shuffle), {}, {})
    steps = [range(first, first + 12) for first in range(0, 60, 12)]
    assert [hash_batch(read(epoch, step)) for epoch in range(2) for step in steps] == found
    assert len(set(found)) == (10 if shuffle else 5)


def test_divided_batch_has_the_rows_of_its_batch() -> None:
    divided = ReplicaBatches.split(BATCH, [CPU] * 3)
    assert len(divided.batches) == 3
    assert hash_batch(divided) == hash_batch(BATCH)


def test_hashed_transform_notes_the_rows_before_the_transform_in_all_its_copies() -> None:
    hashes: list[int] = []

    def halve(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"weight": batch["weight"] / 2}

    hashed = HashedTransform(halve, hashes)
    generator = torch.Generator()
    random = RowRandom(range(3))
    changed = hashed(BATCH, generator, random)
    copy.deepcopy(hashed)(rows_of_batch(1, 2), generator, random)
    torch.testing.assert_close(changed["weight"], BATCH["weight"] / 2)
    assert hashes == [hash_batch(BATCH), hash_batch(rows_of_batch(1, 2))]
