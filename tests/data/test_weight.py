"""``weight=``: which fields and functions count the items of a loss, and which are rejected."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memmap import MemmapDataModule
from lightning_memmap.sampling import Mixture, Packed, Subset, Weighted
from lightning_memmap.schema import Windows
from tests.support.models import Regression, make_trainer

ROWS = 30


def rows_of(first: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "x": torch.full((8,), float(row)),
            "y": torch.zeros(1),
            "row": row,
            "count": row % 4,
            "tokens": torch.arange(row % 5),
            "words": "a" * (row % 3),
            "negative": row - 3,
            "missing": None if row % 1000 == 7 else row,
        }
        for row in range(first, first + ROWS)
    ]


def data_of(path: Path, train: Any = None, **options: Any) -> MemmapDataModule:
    options = {"batch_size": 7, "num_shards": 6, **options}
    if train is None or isinstance(train, dict):
        options["nullable"] = ["missing"]
    return MemmapDataModule(train or rows_of(), store_dir=path, **options)


def planned(data: MemmapDataModule) -> tuple[list[list[float]], list[Any]]:
    """The items of each row by step, as the plan knows them, and the batches."""
    data.prepare_data()
    data.setup("fit")
    loader = data.train_dataloader().loader
    steps = [*loader._steps()]
    items = [torch.as_tensor(step.weight.by_row).tolist() for step in steps]
    assert [sum(step_items) for step_items in items] == [step.weight.total for step in steps]
    return items, [step.to("cpu") for step in steps]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": False},
        {"subset": Subset(range(3, 28, 2))},
        {"sampler": Weighted("count", num_samples=50)},
    ],
)
@pytest.mark.parametrize("weight", ["count", "tokens"])
def test_plan_knows_the_items_of_each_row(tmp_path: Path, weight: str, options: Any) -> None:
    items, batches = planned(data_of(tmp_path, weight=weight, **options))
    modulus = {"count": 4, "tokens": 5}[weight]
    assert items == [(batch["row"] % modulus).tolist() for batch in batches]
    assert sum(map(len, items)) > 10


def test_plan_knows_the_items_of_a_mixture(tmp_path: Path) -> None:
    train = {"first": rows_of(), "second": rows_of(1000)}
    sampler = Mixture({"first": 0.5, "second": 0.5})
    items, batches = planned(data_of(tmp_path, train, weight="count", sampler=sampler))
    assert items == [(batch["row"] % 4).tolist() for batch in batches]


def test_window_has_the_items_of_its_series(tmp_path: Path) -> None:
    train = [{"x": torch.arange(9.0 + row), "count": row % 4} for row in range(ROWS)]
    windows = Windows("x", length=5, stride=3)
    items, batches = planned(data_of(tmp_path, train, weight="count", windows=windows))
    assert items == [batch["count"].tolist() for batch in batches]


@pytest.mark.parametrize("weight", ["words", "negative", "missing", "other", "x"])
def test_field_that_counts_nothing_raises(tmp_path: Path, weight: str) -> None:
    data = data_of(tmp_path, weight=weight)
    data.prepare_data()
    data.setup("fit")
    with pytest.raises(ValueError, match=f"weight='{weight}'"):
        data.train_dataloader()


def test_field_of_rows_that_are_cut_raises(tmp_path: Path) -> None:
    data = data_of(tmp_path, weight="count", sampler=Packed("tokens", 8, overflow="split"))
    data.prepare_data()
    data.setup("fit")
    with pytest.raises(ValueError, match="weight='count'"):
        data.train_dataloader()


def test_neither_a_field_nor_a_function_raises(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="weight=3"):
        data_of(tmp_path, weight=3)


@pytest.mark.parametrize(
    "function",
    [
        lambda batch: None,
        lambda batch: 3,
        lambda batch: batch["count"].sum(),
        lambda batch: batch["count"][1:],
        lambda batch: -batch["count"],
        lambda batch: batch["count"] * float("nan"),
        lambda batch: batch["count"] / 0,
    ],
)
def test_function_that_returns_no_number_for_each_row_raises(tmp_path: Path, function: Any) -> None:
    trainer = make_trainer(tmp_path, strategy="memmap_superbatch", limit_val_batches=0)
    train = [{"x": torch.zeros(8), "y": torch.zeros(1), "row": 0, "count": 1}] * ROWS
    with pytest.raises(ValueError, match="weight"):
        trainer.fit(Regression(), data_of(tmp_path / "stores", train, weight=function))


@pytest.mark.parametrize("weight", ["count", lambda batch: batch["count"]])
def test_strategy_of_lightning_raises_where_it_would_ignore_it(tmp_path: Path, weight: Any) -> None:
    train = [{"x": torch.zeros(8), "y": torch.zeros(1), "row": 0, "count": 1}] * ROWS
    data = data_of(tmp_path / "stores", train, weight=weight)
    options: dict[str, Any] = {"strategy": "auto", "limit_val_batches": 0}
    # One process and one micro-batch have the mean over all items.
    make_trainer(tmp_path, **options).fit(Regression(), data)
    with pytest.raises(ValueError, match="weight="):
        make_trainer(tmp_path, accumulate_grad_batches=2, **options).fit(Regression(), data)
