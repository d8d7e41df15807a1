"""Losses of packs are weighted by their targets: the weights that the plan knows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_memmap.loading.step_weight import weights_of_steps
from lightning_memmap.sampling import Packed
from lightning_memmap.sampling.packed import PackedSampler
from tests.loading.test_packed_batch import LENGTH, Documents, batches_of, data_of
from tests.support.models import set_up


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_weighted_gradients_are_the_mean_over_all_tokens(accumulated: int, size: int) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 50, 40)
    losses = rng.normal(size=40)  # the mean loss over the tokens of each position
    # The last group has a single step, and the last two steps are not used.
    bounds = np.array([(4 * step, 4 * step + 4) for step in range(9)] + [(36, 40)])
    limit = 8
    weights = [
        weights_of_steps(tokens, bounds[2:], rank, size, accumulated, 2, limit)
        for rank in range(size)
    ]
    groups: dict[int, list[int]] = {}
    for step in range(2, limit):
        groups.setdefault(step // accumulated, []).append(step)
    for steps in groups.values():
        total, positions = 0.0, []
        for step in steps:
            positions += [*range(*bounds[step])]
            for rank in range(size):
                own = [p for p in range(*bounds[step]) if p % size == rank]
                mean = (losses[own] * tokens[own]).sum() / tokens[own].sum()
                # Lightning divides by the micro-batches of a group, and averages over processes.
                scale = weights[rank][step - 2].scale(size)
                total += mean * scale / accumulated / size
        expected = (losses[positions] * tokens[positions]).sum() / tokens[positions].sum()
        assert total == pytest.approx(expected)


def test_parts_are_the_weights_of_the_data_devices() -> None:
    tokens = np.arange(24)
    bounds = np.array([(0, 12), (12, 20), (20, 24)])
    for rank in range(2):
        weights = weights_of_steps(tokens, bounds, rank, 2, num_devices=2)
        for (start, stop), weight in zip(bounds, weights, strict=True):
            served = [range(start + rank + 2 * device, stop, 4) for device in range(2)]
            assert [*weight.parts] == [sum(positions) for positions in served]
            assert weight.local == sum(weight.parts)


def test_step_without_a_target_counts_for_nothing() -> None:
    (weight,) = weights_of_steps(np.zeros(4), np.array([(0, 4)]), 0, 2)
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
    if weight and options:
        with pytest.raises(ValueError, match="weight='num_targets'"):
            Packed("tokens", LENGTH, weight=weight, **options)
        return
    dataset = Counted(most=20 if not options else 100)
    sampler = Packed("tokens", LENGTH, weight=weight, **options)
    data = data_of(tmp_path, dataset, sampler=sampler, num_shards=4)
    found = []
    for batch in batches_of(data):
        labels = batch["inner"]["labels"] if weight else batch["tokens"]
        found += (batch["packing"].targets(labels) != -100).sum(1).tolist()
    order = data.order
    assert isinstance(order, PackedSampler)
    assert found == order.num_targets(0).tolist()


@pytest.mark.parametrize("value", [-1, float("nan"), "many"])
def test_wrong_number_of_targets_is_an_error(tmp_path: Path, value: Any) -> None:
    class Wrong(Documents):
        def __getitem__(self, row: int) -> dict[str, Any]:
            right: Any = "few" if isinstance(value, str) else type(value)(1)
            return {**super().__getitem__(row), "count": value if row == 5 else right}

    data = data_of(tmp_path, Wrong(), sampler=Packed("tokens", LENGTH, weight="count"))
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
