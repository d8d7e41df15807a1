"""Ranks that differ are told so before the first step, all of them, and none waits for ever."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_memmap import MemmapDataModule
from tests.support.models import Points, Regression, make_trainer
from tests.support.processes import launch


class Damaged(Points):
    """Points that lie elsewhere."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self.x = self.x + 1


def refused(out: Path, devices: int) -> dict[str, Any]:
    """What each rank is told, by case. The rank is known only once the processes run."""

    def data(**options: Any) -> MemmapDataModule:
        return MemmapDataModule(**{"store_dir": out / "stores", "batch_size": 4, **options})

    MemmapDataModule(Points(60), store_dir=out / "stores").prepare_data()
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if rank:
        MemmapDataModule(Damaged(60), store_dir=out / "others").prepare_data()
    cases: dict[str, Callable[[], MemmapDataModule]] = {
        "seed": lambda: data(seed=rank),
        "batch_size and drop_last": lambda: data(batch_size=4 + rank, drop_last=bool(rank)),
        "shuffle_block": lambda: data(shuffle_block=2 + rank),
        "residency": lambda: data(residency="stream" if rank else "mmap"),
        "store": lambda: data(store_dir=out / ("others" if rank else "stores")),
        "skip_steps": lambda: data(skip_steps=[rank]),
        "store that may grow": lambda: data(
            store_dir=out / ("others" if rank else "stores"),
            train_dataset=Damaged(60) if rank else Points(60),
            build="while_training",
            num_workers=1,
        ),
        "missing store": lambda: data(store_dir=out / ("nowhere" if rank else "stores")),
        "dataset": lambda: data(train_dataset=Points(60 + rank)),
        "too few rows": lambda: data(train_dataset=Points(1), store_dir=out / "one"),
    }
    told = {}
    for name, make in cases.items():
        trainer = make_trainer(out, strategy="ddp", devices=devices)
        try:
            trainer.fit(Regression(), make())
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"
    # The processes are as good as new.
    trainer = make_trainer(out, strategy="ddp", devices=devices)
    trainer.fit(Regression(), data())
    told["global_step"] = str(trainer.global_step)
    return {"told": told, "rank": rank}


def test_ranks_that_differ_are_refused_on_every_rank(tmp_path: Path) -> None:
    ranks = launch(refused, tmp_path, processes=2, devices=2)
    first, second = (rank["told"] for rank in ranks)
    assert first.keys() == second.keys()
    for case, words in {
        "seed": "seed: 0 on rank 0; 1 on rank 1",
        "batch_size and drop_last": (
            "batch_size: 4 on rank 0; 5 on rank 1 | drop_last: False on rank 0; True on rank 1"
        ),
        "shuffle_block": "shuffle_block: 2 on rank 0; 3 on rank 1",
        # Both would be right alone, and have another order.
        "residency": "shuffle_block: None on rank 0; ",
        "store": "the train store: 60 rows in 24 shards, content ",
        "store that may grow": "the train store: 60 rows in 24 shards, content ",
        "skip_steps": "skip_steps: ((0, 1),) on rank 0; ((1, 2),) on rank 1",
    }.items():
        for told in (first, second):
            assert told[case].startswith("RankMismatchError: "), case
            assert words in told[case], case
    for told in (first, second):
        assert told["missing store"].startswith("RankMismatchError: ")
        words = r"train on rank 0; .*missing on rank 1"
        assert re.search(words, told["missing store"])
    # Who failed says why, and the others are told who it was.
    assert second["dataset"].startswith("DatasetError: ")
    assert "rank 1: DatasetError: " in first["dataset"]
    # Both know by themselves that one row is too few for two.
    for told in (first, second):
        assert told["too few rows"].startswith("PlacementError: ")
        # 60 rows in steps of 8, the last of 12.
        assert told["global_step"] == "7"
