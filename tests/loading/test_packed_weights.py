"""Losses of packs are weighted by their targets: the weights that the plan knows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_memmap.loading.step_weight import item_weights
from lightning_memmap.sampling import Packed
from lightning_memmap.sampling.packed_sampler import PackedSampler
from tests.loading.test_packed_batch import LENGTH, Documents, batches_of, data_of
from tests.support.models import set_up


@pytest.mark.parametrize("size", [1, 2, 4])
def test_items_of_steps_are_those_of_the_rows_of_each_process(size: int) -> None:
    rng = np.random.default_rng(0)
    sizes, stops = [8, 7, 5], [8, 15, 20]
    items = rng.integers(0, 50, 20)
    owners = np.arange(6, 26) % size
    for rank in range(size):
        is_local = owners == rank
        local_sizes = [int(part.sum()) for part in np.split(is_local, stops[:-1])]
        weights = item_weights(items[is_local], local_sizes, items, sizes)
        bounds = zip([0, *stops], stops, weights, strict=False)
        for start, stop, weight in bounds:
            here = np.arange(start, stop)
            by_row = items[here[owners[here] == rank]]
            assert weight.total == items[here].sum()
            assert weight.local == by_row.sum()
            assert np.asarray(weight.by_row).tolist() == by_row.tolist()


def test_step_without_an_item_counts_for_nothing() -> None:
    (weight,) = item_weights(np.zeros(2), [2], np.zeros(4), [4])
    assert weight.scale(2) == 0


class Counted(Documents):
    """Documents that tell how many of their labels are targets."""

    def __getitem__(self, row: int) -> dict[str, Any]:
        sample = super().__getitem__(row)
        targets = int((sample["inner"]["labels"][1:] != -100).sum())
        return {**sample, "num_targets": targets}


@pytest.mark.parametrize("weight", [None, "num_targets"])
@pytest.mark.parametrize("options", [{}, {"overflow": "split"}, {"split": True}])
def test_plan_counts_the_targets_of_the_batches(
    tmp_path: Path, weight: str | None, options: Any
) -> None:
    dataset = Counted(most=20 if not options else 100)
    sampler = Packed("tokens", LENGTH, **options)
    data = data_of(tmp_path, dataset, sampler=sampler, num_shards=4, weight=weight)
    if weight and options:
        with pytest.raises(ValueError, match="weight='num_targets'"):
            batches_of(data)
        return
    found = []
    for batch in batches_of(data):
        labels = batch["inner"]["labels"] if weight else batch["tokens"]
        found += (batch["packing"].targets(labels) != -100).sum(1).tolist()
    order = data.order
    assert isinstance(order, PackedSampler)
    loader = data.train_dataloader().loader
    assert found == loader._count_items(0, range(order.num_positions)).tolist()


@pytest.mark.parametrize("value", [-1, float("nan"), "many"])
def test_wrong_number_of_targets_is_an_error(tmp_path: Path, value: Any) -> None:
    class Wrong(Documents):
        def __getitem__(self, row: int) -> dict[str, Any]:
            right: Any = "few" if isinstance(value, str) else type(value)(1)
            return {**super().__getitem__(row), "count": value if row == 5 else right}

    data = data_of(tmp_path, Wrong(), sampler=Packed("tokens", LENGTH), weight="count")
    with pytest.raises(ValueError, match="weight='count'"):
        batches_of(data)


def test_loader_weighs_uneven_steps_by_targets(tmp_path: Path) -> None:
    data = data_of(tmp_path, batch_size=4)
    set_up(data, "fit")
    whole = data.train_dataloader().loader
    loaders = [whole.of_process(rank, 3) for rank in range(3)]
    order = data.order
    assert isinstance(order, PackedSampler)
    steps = [[*loader._steps()] for loader in loaders]
    for index, parts in enumerate(zip(*steps, strict=True)):
        totals = {part.weight.total for part in parts}
        assert len(totals) == 1
        assert sum(part.weight.local for part in parts) == totals.pop()
        for part in parts:
            targets = part.batches[0]["packing"].target_mask.sum()
            assert part.weight.local == targets, index
    assert torch.tensor([part.weight.local for part in steps[0]]).unique().numel() > 1
