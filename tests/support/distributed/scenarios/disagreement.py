"""Ranks that differ in what must be the same: every rank is told, and none waits for ever."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_memmap import MemmapDataModule
from tests.support.models import Points, Regression, make_trainer


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
