"""An existing data module under DDP, converted and written by hand."""

from pathlib import Path
from typing import Any

import lightning as L
from torch.utils.data import DataLoader, DistributedSampler

from lightning_memmap import MemmapDataModule
from tests.support.models import Points, Regression, make_trainer, weights


class Divided(L.LightningDataModule):
    """Divides its rows among processes itself, and notes the hooks that are called.

    Args:
        out: Holds a file once `prepare_data` was called.
        fails_on: The rank whose `setup` fails.
    """

    def __init__(self, out: Path, fails_on: int | None = None) -> None:
        super().__init__()
        self.out = out
        self.fails_on = fails_on
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")
        (self.out / "downloaded").touch()

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        self.calls.append(f"setup {stage}")
        if self.trainer.global_rank == self.fails_on:
            raise OSError("no such dataset")
        assert (self.out / "downloaded").exists()
        self.train, self.val = Points(64), Points(32, 100)

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, 8, sampler=DistributedSampler(self.train))

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, 8, sampler=DistributedSampler(self.val, shuffle=False))


def fit(out: Path, strategy: str) -> dict[str, Any]:
    """Train from the converted data module, and from one written by hand."""
    theirs = Divided(out)
    made = MemmapDataModule.from_datamodule(theirs, store_dir=out / "made")
    datasets = Points(64), Points(32, 100)
    written = MemmapDataModule(*datasets, store_dir=out / "by_hand", batch_size=8)
    found: dict[str, Any] = {}
    for name, data in (("made", made), ("by_hand", written)):
        module = Regression()
        trainer = make_trainer(out, strategy=strategy, devices=2, max_epochs=2)
        trainer.fit(module, data)
        found[name] = {"seen": module.seen, "weights": weights(module)}
    return {
        **found,
        "calls": [str(call).replace("TrainerFn.FITTING", "fit") for call in theirs.calls],
    }


def fail(out: Path, fails_on: int) -> dict[str, Any]:
    """Return the error that each rank raises where the set-up of one fails."""
    made = MemmapDataModule.from_datamodule(Divided(out, fails_on), store_dir=out / "made")
    try:
        make_trainer(out, strategy="ddp", devices=2).fit(Regression(), made)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": None}
