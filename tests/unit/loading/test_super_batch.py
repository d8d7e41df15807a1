"""The rows of a step travel with its batch, and it is noticed when they are lost on the way."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_memmap.loading.super_batch import Collator, SuperBatch, step_rows_of
from lightning_memmap.store import Store
from lightning_memmap.strategies._base import RowWeighted
from tests.rows import CPU, assembled, make_loader, take_steps


def weighed(num_rows: int, step_rows: int, replaced: bool) -> float:
    """The weight of the loss of a batch of one of two processes."""
    collator = Collator(lambda leaves: {"x": leaves[0]})
    step = SuperBatch([CPU], num_rows, step_rows, 0, collator, [{"x": torch.arange(num_rows)}])
    batch = step.to(CPU)
    step.note_delivery()
    if replaced:
        batch = {name: tensor + 1 for name, tensor in batch.items()}
    return weight_of(batch)


def weight_of(batch: Any) -> float:
    """The weight that a process of two gives the loss of a batch."""
    strategy: Any = SimpleNamespace(
        distributed_sampler_kwargs={"rank": 0, "num_replicas": 2},
        lightning_module=None,
        _may_repeat_rows=False,
    )
    RowWeighted._weigh(strategy, batch)
    weight: float = strategy._row_weight
    return weight


def test_batch_of_fewer_rows_than_others_weighs_less() -> None:
    assert weighed(2, 6, replaced=False) == pytest.approx(2 / 3)


def test_batch_whose_tensors_were_all_replaced_is_warned_of_once() -> None:
    with pytest.warns(UserWarning, match=r"6 rows, 2 of them .*transform= .*drop_last=True"):
        assert weighed(2, 6, replaced=True) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Where all processes have as many rows, nothing is lost.
        assert weighed(3, 6, replaced=True) == 1
        assert not step_rows_of({"x": torch.zeros(2)})


@pytest.mark.parametrize("prefetch", [0, 2])
def test_step_made_ahead_is_not_taken_for_that_of_another_loader(
    numbered_store: Callable[..., Store], prefetch: int
) -> None:
    # Two steps of 16 rows and one of 5, all of them made before the first is delivered.
    loader = assembled(make_loader(numbered_store(37, 4), batch_size=8, size=2), prefetch=prefetch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, *_ = take_steps(loader, 1)
        assert weight_of({"x": torch.zeros(2)}) == weight_of(first) == 1
