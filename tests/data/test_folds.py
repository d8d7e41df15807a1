"""Folds and parts: rows of one store that make a data set of their own."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memmap import MemmapDataModule
from lightning_memmap.loading.loader import SuperBatchLoader
from lightning_memmap.loading.split import load_split
from lightning_memmap.placement.plan import Residency, SplitShards
from lightning_memmap.sampling import KFold, Parts, Pool, SequentialSampler
from lightning_memmap.store import Store
from tests.support.models import Points, Regression, make_trainer
from tests.support.rows import (
    Chosen,
    StridedRows,
    chosen_of,
    cpus,
    epoch_rows,
    joined,
    loader_over,
    rows_in,
)

ROWS = 101
EPOCH = 1


def make_loader(
    store: Store, subset: Chosen | None, num_devices: int, residency: str
) -> SuperBatchLoader:
    """A loader over some rows of a store, on logical CPU devices."""
    pool = Pool.of(chosen_of(store, subset), 12)
    placement = SplitShards(
        SequentialSampler(pool),
        tuple((pool.sizes * 14).tolist()),
        residencies=(Residency(residency),) * 12,
    )
    topology = cpus(num_devices)
    split = load_split(store, topology, placement)
    loader = loader_over(store, split, 4, topology, shuffle=True, seed=5)
    loader.set_epoch(EPOCH)
    return loader


SUBSETS = [StridedRows(index, 5, excluded) for index in (0, 4) for excluded in (False, True)]


@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize("residency", ["mmap", "device"])
@pytest.mark.parametrize(
    "subset", [*SUBSETS, StridedRows(1, 2), StridedRows(2, 4, excluded=True)], ids=str
)
def test_rows_of_a_subset_come_in_the_order_of_a_store_of_them_alone(
    numbered_store: Callable[..., Store], subset: StridedRows, residency: str, num_devices: int
) -> None:
    chosen = [row for row in range(ROWS) if (row % subset.count == subset.index) != subset.excluded]
    for num_shards in (12, 7):
        store = numbered_store(ROWS, num_shards)
        # `epoch_rows` sees that the images are those of the rows.
        found = epoch_rows(make_loader(store, subset, num_devices, residency))
        alone = numbered_store(len(chosen), 12)
        expected = epoch_rows(make_loader(alone, None, num_devices, residency))
        assert found == [[chosen[number] for number in step] for step in expected]
        assert sorted(joined(found)) == chosen


# The data module


def make_data(path: Path, **options: Any) -> MemmapDataModule:
    defaults: dict[str, Any] = {"train_dataset": Points(ROWS), "store_dir": path / "stores"}
    return MemmapDataModule(**{**defaults, **options})


def set_up(data: MemmapDataModule) -> MemmapDataModule:
    data.prepare_data()
    data.setup()
    return data


def test_folds_share_one_store_and_hold_each_row_out_once(tmp_path: Path) -> None:
    held_out = []
    for fold in range(5):
        data = set_up(make_data(tmp_path, subset=KFold(5, shuffle=False), member=fold))
        trained, validated = rows_in(data.train_dataloader()), rows_in(data.val_dataloader())
        assert sorted(trained + validated) == list(range(ROWS))
        assert validated == list(range(fold, ROWS, 5))
        assert trained != sorted(trained)
        held_out += validated
    assert sorted(held_out) == list(range(ROWS))
    assert [path.name for path in (tmp_path / "stores").iterdir() if path.is_dir()] == ["train"]


def test_parts_divide_the_training_rows_and_share_the_others(tmp_path: Path) -> None:
    trained = []
    for part in range(3):
        data = set_up(
            make_data(tmp_path, val_dataset=Points(20, 500), subset=Parts(3), member=part)
        )
        assert rows_in(data.val_dataloader()) == list(range(500, 520))
        trained += (mine := rows_in(data.train_dataloader()))
        assert {row % 3 for row in mine} == {part}
    assert sorted(trained) == list(range(ROWS))


def test_member_in_the_directory_gives_each_a_store_of_its_own(tmp_path: Path) -> None:
    for member in range(2):
        dataset = Points(30 + member, 100 * member)
        data = set_up(
            make_data(
                tmp_path, train_dataset=dataset, store_dir=tmp_path / "site{member}", member=member
            )
        )
        assert sorted(rows_in(data.train_dataloader())) == dataset.row.tolist()
    assert (tmp_path / "site1" / "train").is_dir()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"subset": KFold(2), "val_dataset": Points(5)}, ") with a val_dataset"),
        ({"member": -1}, "member=-1: members are counted from 0"),
        ({"member": 1}, "member=1: "),
    ],
)
def test_folds_that_cannot_be_are_refused(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make_data(tmp_path, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"subset": KFold(2)}, "memmap_independent"),
        ({"subset": KFold(2, group="nope")}, "field 'nope': the store at"),
        (
            {"subset": Parts(2), "member": 2},
            "member=2 with subset=Parts(num_parts=2): choose 0 to 1",
        ),
    ],
)
def test_fold_that_is_not_known_is_refused(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        set_up(make_data(tmp_path, **options))


def test_directory_of_an_unknown_member_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\{member\}.*member=\.\.\."):
        set_up(make_data(tmp_path, store_dir=tmp_path / "site{member}"))


def test_members_that_are_no_multiple_of_the_folds_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_MEMMAP_MEMBER", "0")
    trainer = make_trainer(tmp_path, strategy="memmap_independent", devices=3)
    with pytest.raises(ValueError, match=r"KFold\(.*\) with 3 members: "):
        trainer.fit(Regression(), make_data(tmp_path, subset=KFold(2, shuffle=False)))


def test_members_may_be_a_multiple_of_the_folds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_MEMMAP_MEMBER", "3")
    module = Regression()
    trainer = make_trainer(tmp_path, strategy="memmap_independent", devices=4)
    trainer.fit(module, make_data(tmp_path, subset=KFold(2, shuffle=False)))
    assert sorted(joined(module.seen["train"])) == list(range(0, ROWS, 2))
    assert torch.isfinite(trainer.callback_metrics["val_loss"])
