"""The rows of a step travel with its batch, and it is noticed when they are lost on the way."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_memmap.loading import SuperBatch
from lightning_memmap.loading.super_batch import Collator, step_rows_of
from lightning_memmap.strategies._base import RowWeighted
from tests.rows import CPU


def weighed(num_rows: int, step_rows: int, replaced: bool) -> float:
    """The weight of the loss of a batch of one of two processes."""
    parts = [torch.arange(num_rows)]
    collator = Collator(lambda leaves: {"x": leaves[0]})
    batch = SuperBatch([CPU], num_rows, step_rows, 0, collator, columns=parts).to(CPU)
    if replaced:
        batch = {name: tensor + 1 for name, tensor in batch.items()}
    strategy: Any = SimpleNamespace(
        distributed_sampler_kwargs={"rank": 0, "num_replicas": 2}, lightning_module=None
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
