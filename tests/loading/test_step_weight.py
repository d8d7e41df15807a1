"""The weight of a step is that of the batch which the Trainer trains on, or an error."""

import itertools
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.loading.step_weight import StepWeight
from lightning_memmap.store import Store
from lightning_memmap.strategies import SuperBatchStrategy
from tests.support.rows import assembled, make_loader

NumberedStore = Callable[..., Store]


def uneven_loader(store: NumberedStore, prefetch: int = 0) -> SuperBatchLoader:
    """Two steps of 16 rows and one of 5, on rank 0 of two processes."""
    return assembled(make_loader(store(37, 4), batch_size=8, size=2), prefetch=prefetch)


def strategy_of(*loaders: SuperBatchLoader, accumulated: int = 1, **trainer: Any) -> Any:
    """A strategy that trains from loaders as the first of two processes."""
    strategy: Any = SuperBatchStrategy()
    strategy.distributed_sampler_kwargs = {"rank": 0, "num_replicas": 2}
    strategy._delivered = [loader.delivered for loader in loaders]
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_idx=0))
    options = {"accumulate_grad_batches": accumulated, "num_training_batches": math.inf, **trainer}
    strategy._lightning_module = SimpleNamespace(trainer=SimpleNamespace(fit_loop=loop, **options))
    return strategy


def scales(strategy: Any, batches: Iterator[Any]) -> list[float]:
    """The factor of the loss of each batch of an epoch."""
    factors = []
    for index, batch in enumerate(batches):
        strategy.module.trainer.fit_loop.epoch_loop.batch_idx = index
        strategy._loss_scale = 1.0
        strategy._update_loss_scale(batch)
        factors.append(strategy._loss_scale)
    return factors


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


@pytest.mark.parametrize(
    ("accumulated", "limit", "expected"),
    [
        # 16, 16 and 5 rows, of which 8, 8 and 3 are here: the mean of a group is over its rows.
        (2, math.inf, [1, 1, 3 * 2 * 2 / 5]),
        (3, math.inf, [8 * 2 * 3 / 37, 8 * 2 * 3 / 37, 3 * 2 * 3 / 37]),
        (2, 1, [2]),
        (4, 2, [2, 2]),
    ],
)
def test_micro_batches_are_weighted_by_the_rows_of_their_group(
    numbered_store: NumberedStore, accumulated: int, limit: float, expected: list[float]
) -> None:
    loader = uneven_loader(numbered_store)
    strategy = strategy_of(loader, accumulated=accumulated, num_training_batches=limit)
    for epoch in range(2):
        loader.set_epoch(epoch)
        batches = itertools.islice(loader, len(expected))
        assert scales(strategy, batches) == pytest.approx(expected)


def test_loader_whose_epoch_is_not_the_trainers_is_weighted_step_by_step(
    numbered_store: NumberedStore,
) -> None:
    loader = uneven_loader(numbered_store)
    batches = itertools.chain(loader, loader)
    factors = scales(strategy_of(loader, accumulated=4), batches)
    # The first group has the three steps of the first epoch, and one that it can't foresee.
    assert factors[3:] == pytest.approx([1, 1, 6 / 5])


def test_loaders_that_nobody_asks_keep_few_weights(numbered_store: NumberedStore) -> None:
    loader = assembled(make_loader(numbered_store(4000, 4), batch_size=4))
    assert len([*loader]) == 1000
    assert len(loader.delivered._pending) < 100
