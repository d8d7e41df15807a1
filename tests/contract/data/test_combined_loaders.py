"""What Lightning itself does with loaders: combines several, and asks for new ones each epoch."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_memmap import MemmapDataModule
from tests.support.models import LONG, SHORT, CombinedData, Regression, make_trainer, weights

pytestmark = pytest.mark.slow


class Plain(L.LightningDataModule):
    """The same rows through torch's loaders."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.mode = mode

    def val_dataloader(self) -> list[Any]:
        return []

    def train_dataloader(self) -> CombinedLoader:
        loaders = {"long": DataLoader(LONG, 8), "short": DataLoader(SHORT, 8)}
        return CombinedLoader(loaders, self.mode)


class Both(Regression):
    """Learns from a batch of each loader in each step."""

    def training_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        if "row" in batch:
            return self.step(batch, "train")
        found = {name: part for name, part in batch.items() if part is not None}
        rows = {name: part["row"].tolist() for name, part in found.items()}
        self.seen.setdefault("both", []).append(rows)  # type: ignore[arg-type]
        losses = [self.loss(self(part["x"]), part) for part in found.values()]
        return torch.stack(losses).mean()


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
@pytest.mark.parametrize(("strategy", "devices"), [("auto", 1), ("memmap_superbatch", 2)])
def test_combined_loaders_give_the_batches_of_torch(
    tmp_path: Path, mode: str, strategy: str, devices: int
) -> None:
    expected, found = Both(), Both()
    options: dict[str, Any] = {"max_epochs": 2, "limit_val_batches": 0}
    make_trainer(tmp_path, **options).fit(expected, Plain(mode))
    trainer = make_trainer(tmp_path, **options, strategy=strategy, devices=devices)
    trainer.fit(found, CombinedData(tmp_path, mode, 8 // devices))
    assert found.seen == expected.seen
    torch.testing.assert_close(weights(found), weights(expected))


class Growing(L.Callback):
    """Another batch size from an epoch on.

    Args:
        sizes: By epoch. The first is that of the data module.
    """

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def on_load_checkpoint(self, trainer: Any, _: Any, checkpoint: dict[str, Any]) -> None:
        trainer.datamodule.batch_size = self.sizes[checkpoint["epoch"]]

    def on_train_epoch_end(self, trainer: Any, _: Any) -> None:
        # The loader of the next epoch is made before the hooks of its start are called.
        trainer.datamodule.batch_size = self.sizes[min(trainer.current_epoch + 1, 2)]


def fit_growing(path: Path, devices: int, ckpt_path: Path | None = None, *others: Any) -> Any:
    module = Regression()
    sizes = [4 // devices, 8 // devices, 16 // devices]
    trainer = make_trainer(
        path,
        strategy="memmap_superbatch",
        devices=devices,
        max_epochs=3,
        limit_val_batches=0,
        reload_dataloaders_every_n_epochs=1,
        callbacks=[Growing(sizes), *others],
    )
    data = MemmapDataModule(LONG, store_dir=path / "long", batch_size=sizes[0])
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return module


@pytest.mark.parametrize("stop", [5, 14, 19])
def test_batch_size_may_change_with_the_epoch(tmp_path: Path, stop: int) -> None:
    class Save(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == stop:
                trainer.save_checkpoint(tmp_path / "stopped.ckpt")

    whole = fit_growing(tmp_path, 1, None, Save())
    sizes = [len(rows) for rows in whole.seen["train"]]
    assert sizes == [4] * 12 + [8] * 6 + [16] * 3
    for devices in (1, 2):
        resumed = fit_growing(tmp_path, devices, tmp_path / "stopped.ckpt")
        assert resumed.seen["train"] == whole.seen["train"][stop:]
        assert torch.equal(weights(resumed), weights(whole))
