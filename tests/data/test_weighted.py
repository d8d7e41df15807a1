"""Rows drawn by weight through loaders and the data module: the same under every division."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_memmap import MemmapDataModule
from lightning_memmap.placement.topology import DataTopology
from lightning_memmap.sampling import (
    Curriculum,
    Pool,
    Sampler,
    TableSampler,
    Weighted,
)
from lightning_memmap.store import Store
from tests.support.models import Points, Regression, make_trainer, set_up
from tests.support.rows import (
    CPU,
    joined,
    size_of,
)

ROWS, SAMPLES = 101, 140
#: Some rows never come, one comes often, and the weights go with the shards.
WEIGHTS = np.where(np.arange(ROWS) % 12 == 3, 5.0, np.where(np.arange(ROWS) % 5 == 0, 0.0, 1.0))
WEIGHTS[50] = 17.0


def test_only_rows_that_may_come_are_held(numbered_store: Callable[..., Store]) -> None:
    store = numbered_store(ROWS, 12)
    for weights, most in ((WEIGHTS, np.count_nonzero(WEIGHTS) + 11), (np.eye(1, ROWS, 7)[0], 12)):
        made = partial(Weighted(weights).make, seed=0, fields=store)
        size = size_of(
            store.manifest,
            DataTopology((CPU,)),
            order=lambda shards, _, made=made: made(shards),
        )
        assert size.pool.num_rows <= most
        assert sum(size.shard_bytes) == size.pool.num_rows * store.manifest.row_bytes


# The data module


class Classes(Points):
    """Points with a class in each row: one of two, of which the second is rare."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**super().__getitem__(index), "label": int(index % 9 == 0)}


def make_data(path: Path, **options: Any) -> MemmapDataModule:
    defaults: dict[str, Any] = {"batch_size": 6, "sampler": Weighted("label")}
    return MemmapDataModule(Classes(90), store_dir=path / "stores", **{**defaults, **options})


@pytest.mark.parametrize(("strategy", "devices"), [("auto", 1), ("memmap_superbatch", 3)])
def test_fit_has_classes_equally_often(tmp_path: Path, strategy: str, devices: int) -> None:
    module = Regression()
    data = make_data(tmp_path, batch_size=6 // devices)
    trainer = make_trainer(
        tmp_path, strategy=strategy, devices=devices, max_epochs=4, limit_val_batches=0
    )
    trainer.fit(module, data)
    rows = joined(module.seen["train"])
    assert len(rows) == 4 * 90
    rare = sum(row % 9 == 0 for row in rows)
    assert abs(rare - 2 * 90) < 12
    counts = Counter(rows)
    assert all(4 * 4 <= counts[row] <= 4 * 5 for row in range(0, 90, 9))


def test_sampler_that_is_set_later_needs_a_set_up(tmp_path: Path) -> None:
    data = set_up(make_data(tmp_path), "fit")
    data.sampler = Weighted("label", num_samples=30)
    with pytest.raises(ValueError, match=r"sampler=.*setup\(\)"):
        data.train_dataloader()
    data.setup("fit")
    assert sum(len(batch["row"]) for batch in data.train_dataloader()) == 30


@pytest.mark.parametrize(
    ("sampler", "options", "words"),
    [
        (Weighted("labels"), {}, r"field 'labels': the store at .* has \['row', 'x', 'y', 'label'"),
        (Weighted("x"), {}, r"field 'x': its rows are float32 \(8,\)"),
        (Weighted([1.0]), {}, r"weights of shape \(1,\), and the dataset has 90 rows"),
        (Weighted("label", num_samples=1), {}, "1 rows .* 2 data devices"),
    ],
)
def test_sampler_that_cannot_be_is_refused(
    tmp_path: Path, sampler: Weighted, options: dict[str, Any], words: str
) -> None:
    trainer = make_trainer(tmp_path, strategy="memmap_superbatch", devices=2, limit_val_batches=0)
    with pytest.raises(ValueError, match=words):
        trainer.fit(Regression(), make_data(tmp_path, sampler=sampler, **options))


def test_order_that_cannot_be_streamed_is_refused_when_it_is_set_up(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Reversed(TableSampler):
        def offsets(self, epoch: int, shard: int) -> Any:
            return np.arange(self.pool.sizes[shard])[::-1]

    def reversed_rows(pool: Pool, seed: int) -> Sampler:
        return Reversed(pool)

    for sampler in (reversed_rows, Curriculum({0: None, 1: reversed_rows})):
        data = make_data(tmp_path, sampler=sampler, residency="stream")
        data.prepare_data()
        with pytest.raises(ValueError, match=r"shuffle_block=.*Reversed"):
            data.setup("fit")
