"""Trainings with random numbers for each row: what each rank saw, and the weights."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_memmap import MemmapDataModule
from lightning_memmap.loading.row_random import RowRandom
from lightning_memmap.transforms import OnSuperBatch
from tests.support.distributed.scenarios.training import make_strategy
from tests.support.models import Points, Regression, make_trainer
from tests.support.versions import weights_only

ROWS, GLOBAL_BATCH = 63, 12
SAVE_AT = 4
#: By name, strategies of two processes.
TWO: dict[str, dict[str, Any]] = {
    "memmap_superbatch_ddp": {
        "strategy": "memmap_superbatch_ddp",
        "strategy_options": {"data_devices_per_process": 1},
        "save_at": SAVE_AT,
    },
    "memmap_fsdp2": {"strategy": "memmap_fsdp2"},
}


def augment(batch: Any, random: RowRandom) -> Any:
    """Scale, shift and blank out numbers, with a draw of each kind."""
    x = batch["x"] * random.uniform(8, low=0.5, high=1.5) + 0.1 * random.normal()[:, None]
    x = x * (random.randint(8, high=4) > 0) + 0.01 * random.permutation(8)
    return {**batch, "x": torch.where(random.bernoulli()[:, None], x, -x)}


class Noting(Regression):
    """Notes the augmented numbers of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.augmented: dict[tuple[int, int], list[float]] = {}
        self.save_at: int | None = None

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        for row, x in zip(batch["row"].tolist(), batch["x"].tolist(), strict=True):
            self.augmented[self.current_epoch, row] = x
        return self.step(batch, "train")

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == self.save_at:
            self.trainer.save_checkpoint(Path(self.trainer.default_root_dir, "middle.ckpt"))


def fit(
    out: Path,
    strategy: str,
    devices: int,
    strategy_options: dict[str, Any] | None = None,
    save_at: int | None = None,
    checkpoint: Path | None = None,
    on_super_batch: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train two epochs on two or more data devices, and return what this rank saw."""
    data = MemmapDataModule(
        Points(ROWS),
        store_dir=out / "stores",
        batch_size=GLOBAL_BATCH // devices,
        transform=OnSuperBatch(augment) if on_super_batch else augment,
        **options,
    )
    trainer = make_trainer(
        out,
        strategy=make_strategy(strategy, strategy_options),
        devices=devices,
        max_epochs=2,
        limit_val_batches=0,
    )
    module = Noting()
    module.save_at = save_at
    trainer.fit(module, data, ckpt_path=checkpoint, **weights_only(checkpoint and False))
    trainer.save_checkpoint(out / "final.ckpt")
    state = torch.load(out / "final.ckpt", weights_only=True)["state_dict"]
    weights = torch.cat([value.flatten() for value in state.values()])
    return {"augmented": module.augmented, "weights": weights, "steps": trainer.global_step}


def fit_two(out: Path, middle: str) -> dict[str, Any]:
    """Train on two processes under each strategy, and go on with the checkpoint of one process."""
    found = {name: fit(out, devices=2, **options) for name, options in TWO.items()}
    found["resumed"] = fit(out, "memmap_superbatch_ddp", 2, checkpoint=Path(middle))
    return found
