"""The number of shards of an order: what the rows that are trained on and the devices ask for."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memmap import MemmapDataModule
from lightning_memmap.sampling import Mixture, Subset
from lightning_memmap.schema import Windows
from lightning_memmap.store import TokenStream
from tests.support.models import Points
from tests.support.rows import cpus


def subset_of_a_large_store() -> dict[str, Any]:
    return {"train_dataset": Points(20_160), "subset": Subset(range(0, 20_160, 120))}


def mixture() -> dict[str, Any]:
    sets = {"a": Points(15_000), "b": Points(5_300, offset=15_000)}
    return {"train_dataset": sets, "sampler": Mixture({"a": 0.6, "b": 0.4})}


def tokens() -> dict[str, Any]:
    stream = TokenStream(torch.arange(800_000) % 50_000, length=40)
    return {"train_dataset": stream, "windows": Windows("tokens", 40, 40)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "num_shards"), [(subset_of_a_large_store, 24), (mixture, 192), (tokens, 192)]
)
def test_shards_are_as_many_as_the_rows_that_are_trained_on_ask_for(
    make: Callable[[], dict[str, Any]], num_shards: int, tmp_path: Path
) -> None:
    found = []
    for devices in (8, num_shards // 2):
        data = MemmapDataModule(**make(), store_dir=tmp_path, batch_size=192 // devices)
        data.prepare_data()
        order = data.make_train_order(data.open_train_store(), cpus(devices))
        assert order.num_shards == num_shards
        found.append(order.dataset_rows(1, range(order.num_positions)).tolist())
        assert found[-1] != order.dataset_rows(2, range(order.num_positions)).tolist()
        assert found[-1] != sorted(found[-1])
    assert found[0] == found[1]


def test_rows_in_dataset_order_are_striped_again_without_a_word(tmp_path: Path) -> None:
    data = MemmapDataModule(Points(480), store_dir=tmp_path, shuffle=False)
    data.prepare_data()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        order = data.make_train_order(data.open_train_store(), cpus(5))
    assert order.num_shards == 25
    assert order.dataset_rows(0, range(480)).tolist() == list(range(480))
