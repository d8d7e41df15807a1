"""Another order from an epoch on: each epoch is that of its own sampler, and resumed as such."""

from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_memmap import MemmapDataModule
from lightning_memmap.sampling import (
    Bucketed,
    Curriculum,
    KFold,
    Mixture,
    Parts,
    Pool,
    RandomSplit,
    SequentialSampler,
    ShuffledSampler,
    Subset,
    Weighted,
)
from lightning_memmap.schema import Windows
from tests.support.datasets import Series, windows_in
from tests.support.models import Points

pytestmark = pytest.mark.slow


ROWS = 90
HALF = np.where(np.arange(ROWS) % 9 < 4, 1.0, 0.0)


def in_order(pool: Pool, seed: int) -> SequentialSampler:
    return SequentialSampler(pool)


def make_data(path: Path, **options: Any) -> MemmapDataModule:
    defaults: dict[str, Any] = {
        "train_dataset": Points(ROWS),
        "store_dir": path / "stores",
        "batch_size": 12,
        "num_shards": 12,
        "seed": 5,
        "sampler": Curriculum({2: None, 0: Weighted(HALF, num_samples=ROWS), 3: in_order}),
    }
    return MemmapDataModule(**{**defaults, **options})


def epochs_of(data: MemmapDataModule, count: int = 5) -> list[list[int]]:
    data.prepare_data()
    data.setup("fit")
    loader: Any = data.train_dataloader()
    found = []
    for epoch in range(count):
        loader.set_epoch(epoch)
        found.append([row for batch in loader for row in batch["row"].tolist()])
    return found


@pytest.mark.parametrize("residency", ["mmap", "host"])
def test_each_epoch_is_that_of_its_sampler(tmp_path: Path, residency: str) -> None:
    found = epochs_of(make_data(tmp_path, residency=residency))
    weighted = epochs_of(make_data(tmp_path, sampler=Weighted(HALF, num_samples=ROWS)))
    shuffled = epochs_of(make_data(tmp_path, sampler=None))
    assert found == [*weighted[:2], shuffled[2], [*range(ROWS)], [*range(ROWS)]]


@pytest.mark.parametrize("window", [4, 5])
@pytest.mark.parametrize("other", [None, Weighted(HALF, num_samples=ROWS)])
def test_buckets_in_blocks_have_each_row_once(tmp_path: Path, window: int, other: Any) -> None:
    bucketed = Bucketed(np.arange(ROWS) * 7 % 40, 8, 5)
    stages = {0: bucketed} if other is None else {0: bucketed, 1: other}
    options = {"num_shards": 4, "shuffle_block": window, "batch_size": 8}
    found = epochs_of(make_data(tmp_path, sampler=Curriculum(stages), **options), 2)
    alone = epochs_of(make_data(tmp_path, sampler=bucketed, **options), 2)
    assert found[0] == alone[0]
    assert sorted(found[0]) == list(range(ROWS))
    if other is not None:
        assert found[1] == epochs_of(make_data(tmp_path, sampler=other, **options), 2)[1]


def test_rows_of_all_orders_are_held_once(tmp_path: Path) -> None:
    data = make_data(tmp_path, residency="host")
    epochs_of(data, 0)
    assert data.placement is not None
    held = data.placement.splits["train"].pool
    places = [held.shard_dataset_rows(shard).tolist() for shard in range(12)]
    assert all(len(rows) == len(set(rows)) for rows in places)
    assert set(chain.from_iterable(places)) == set(range(ROWS))
    # Most rows are where the store has them: an order moves few of them.
    assert held.num_rows < 2 * ROWS


@pytest.mark.parametrize(
    "selected",
    [
        Subset(np.arange(20, ROWS)),
        RandomSplit(0.2),
        KFold(3),
        KFold(3, shuffle=False),
        Parts(3),
    ],
    ids=repr,
)
@pytest.mark.parametrize("residency", ["mmap", "host", "stream"])
@pytest.mark.filterwarnings("ignore:residency='stream'")
def test_rows_are_those_of_a_selection(tmp_path: Path, selected: Any, residency: str) -> None:
    options = {"subset": selected, "residency": residency, "shuffle_block": 4}
    if not isinstance(selected, (Subset, RandomSplit)):
        options["member"] = 1
    shuffled = epochs_of(make_data(tmp_path, sampler=None, **options), 3)
    count = len(shuffled[0])
    weighted = Weighted(HALF + 0.5, num_samples=count)
    drawn = epochs_of(make_data(tmp_path, sampler=weighted, **options), 2)
    sampler = Curriculum({0: weighted, 2: None})
    found = epochs_of(make_data(tmp_path, sampler=sampler, **options), 3)
    assert found == [*drawn, shuffled[2]]
    assert sorted(shuffled[2]) == sorted(set(shuffled[0]))
    assert {*drawn[0]} <= {*shuffled[0]} < {*range(ROWS)}


@pytest.mark.parametrize("window", [None, 1])
def test_shards_may_have_no_rows(tmp_path: Path, window: int | None) -> None:
    sampler = Curriculum({0: Weighted(np.arange(10) + 1), 1: None})
    data = make_data(
        tmp_path, train_dataset=Points(10), sampler=sampler, batch_size=4, shuffle_block=window
    )
    first, second = epochs_of(data, 2)
    assert len(first) == 10
    assert sorted(second) == [*range(10)]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({0: None, 1: None}, r"stages\[0\].sampler=Shuffled.*, .* has .*=WeightedSampler"),
        ({0: Weighted(HALF, num_samples=ROWS)}, r"stages\[1\]=nothing, .* has .*=ShuffledSampler"),
        (
            {0: Weighted(HALF + 1, num_samples=ROWS), 1: None},
            r"stages\[0\].*digest=\w{8}, .* resume with the rows, shares",
        ),
    ],
)
def test_checkpoint_of_another_curriculum_is_refused(
    tmp_path: Path, stages: dict[int, Any], message: str
) -> None:
    data = make_data(tmp_path, sampler=Curriculum(stages))
    epochs_of(data, 0)
    saved: Any = data.train_dataloader()
    next(iter(saved))
    data.sampler = Curriculum({0: Weighted(HALF, num_samples=ROWS), 1: None})
    data.setup("fit")
    loader: Any = data.train_dataloader()
    loader.load_state_dict(saved.state_dict())
    with pytest.raises(ValueError, match=f"inside an epoch with {message}") as raised:
        next(iter(loader))
    assert not set("{}") & {*str(raised.value)}


@pytest.mark.parametrize("residency", ["mmap", "host"])
def test_shares_and_windows_change_too(tmp_path: Path, residency: str) -> None:
    lengths = [20 + row % 3 for row in range(12)]
    shares = [{"a": 1.0, "b": 0.0}, {"a": 0.25, "b": 0.75}]
    data = make_data(
        tmp_path,
        train_dataset={"a": Series(lengths), "b": Series(lengths * 2)},
        windows=Windows(["value", "time"], 8, 4),
        sampler=Curriculum({epoch: Mixture(s, 200) for epoch, s in enumerate(shares)}),
        residency=residency,
    )
    data.prepare_data()
    data.setup("fit")
    loader: Any = data.train_dataloader()
    order = data.order
    assert order is not None
    for epoch, expected in enumerate(shares):
        loader.set_epoch(epoch)
        seen = [window for batch in loader for window in windows_in(batch, 8)]
        rows = order.dataset_rows(epoch, range(200))
        names = order.pool.rows.names(rows)
        assert [(row, step) for (_, row), step in names] == seen
        found = Counter(store for (store, _), _ in names)
        assert found["a"] == pytest.approx(200 * expected["a"], abs=1)


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([Weighted("y")], "samplers by epoch"),
        ({"0": Weighted("y")}, "samplers by epoch"),
        ({1: None}, r"epochs \[1\]"),
        ({0: None, -1: None}, r"epochs \[-1, 0\]"),
        ({0: "shuffled"}, "stages.*shuffled"),
        ({0: ShuffledSampler}, "stages.*ShuffledSampler"),
        ({0: None, 4: Mixture({"a": 1})}, "different training sets"),
    ],
)
def test_wrong_stages_are_refused(stages: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        Curriculum(stages)


def test_orders_of_other_lengths_are_refused(tmp_path: Path) -> None:
    data = make_data(tmp_path, sampler=Curriculum({0: None, 1: Weighted("row", num_samples=7)}))
    data.prepare_data()
    with pytest.raises(ValueError, match=r"\[90, 7\] positions"):
        data.setup("fit")
