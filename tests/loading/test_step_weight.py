"""The weight of a step is that of the batch which the Trainer trains on, or an error."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.loading.step_weight import StepWeight
from lightning_memmap.store import Store
from lightning_memmap.strategies.common.weighted_loss import WeightedLoss
from tests.support.rows import assembled, make_loader

NumberedStore = Callable[..., Store]


def uneven_loader(store: NumberedStore, prefetch: int = 0) -> SuperBatchLoader:
    """Two steps of 16 rows and one of 5, on rank 0 of two processes."""
    return assembled(make_loader(store(37, 4), batch_size=8, size=2), prefetch=prefetch)


def strategy_of(*loaders: SuperBatchLoader) -> Any:
    """What a strategy of two processes has to know of its loaders."""
    return SimpleNamespace(
        distributed_sampler_kwargs={"rank": 0, "num_replicas": 2},
        _delivered=[loader.delivered for loader in loaders],
        _loss_scale=1.0,
    )


def scales(strategy: Any, batches: Iterator[Any]) -> list[float]:
    """The factor of the loss of each batch."""
    found = []
    for batch in batches:
        strategy._loss_scale = 1.0
        WeightedLoss._update_loss_scale(strategy, batch)
        found.append(strategy._loss_scale)
    return found


def read_ahead(batches: Any, num_batches: int) -> Iterator[Any]:
    """Fetch some batches before the first is used, as Lightning does without a length."""
    waiting: list[Any] = []
    for batch in batches:
        waiting.append(batch)
        if len(waiting) > num_batches:
            yield waiting.pop(0)
    yield from waiting


def test_scale_makes_the_average_over_processes_the_mean_over_tokens() -> None:
    losses, tokens = torch.tensor([2.0, 5.0]), [30, 70]
    weights = [StepWeight(count, sum(tokens)) for count in tokens]
    scaled = [loss * weight.scale(2) for loss, weight in zip(losses, weights, strict=True)]
    assert sum(scaled) / 2 == pytest.approx(0.3 * 2 + 0.7 * 5)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("num_ahead", [0, 1, 3])
def test_uneven_step_is_scaled_wherever_its_batch_is_fetched(
    numbered_store: NumberedStore, prefetch: int, num_ahead: int
) -> None:
    loader = uneven_loader(numbered_store, prefetch)
    strategy = strategy_of(loader)
    for epoch in range(2):
        loader.set_epoch(epoch)
        assert scales(strategy, read_ahead(loader, num_ahead)) == pytest.approx([1, 1, 3 * 2 / 5])


def test_batch_whose_tensors_were_all_replaced_keeps_its_scale(
    numbered_store: NumberedStore,
) -> None:
    loader = uneven_loader(numbered_store)
    replaced = ({"x": torch.zeros(len(batch["row"]))} for batch in loader)
    assert scales(strategy_of(loader), replaced)[-1] == pytest.approx(6 / 5)


def test_epoch_ended_early_leaves_nothing_to_the_next(numbered_store: NumberedStore) -> None:
    loader = uneven_loader(numbered_store)
    strategy = strategy_of(loader)
    ahead = read_ahead(loader, 1)
    assert scales(strategy, iter([next(ahead), next(ahead)])) == [1, 1]
    loader.set_epoch(1)
    assert scales(strategy, read_ahead(loader, 1)) == pytest.approx([1, 1, 6 / 5])


def test_reordered_uneven_step_raises(numbered_store: NumberedStore) -> None:
    loader = uneven_loader(numbered_store)
    with pytest.raises(ValueError, match="train_dataloader"):
        scales(strategy_of(loader), iter([*loader][::-1]))


def test_dropped_batch_before_an_uneven_step_raises(numbered_store: NumberedStore) -> None:
    loader = uneven_loader(numbered_store)
    with pytest.raises(ValueError, match="train_dataloader"):
        scales(strategy_of(loader), (batch for n, batch in enumerate(loader) if n != 1))


def test_different_scales_in_one_step_raise(numbered_store: NumberedStore) -> None:
    uneven = uneven_loader(numbered_store)
    even = assembled(make_loader(numbered_store(48, 4), batch_size=8, size=2))
    pairs = ({"a": a, "b": b} for a, b in zip(uneven, even, strict=True))
    with pytest.raises(ValueError, match="drop_last=True"):
        scales(strategy_of(uneven, even), pairs)


def test_loaders_that_nobody_asks_keep_few_weights(numbered_store: NumberedStore) -> None:
    loader = assembled(make_loader(numbered_store(4000, 4), batch_size=4))
    assert len([*loader]) == 1000
    assert len(loader.delivered._pending) < 100
