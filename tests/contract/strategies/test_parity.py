"""Training from data on many devices gives the weights of training on one."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_memmap import MemmapDataModule
from tests.support.models import Points, Regression, make_trainer, weights
from tests.support.processes import expected_batches

NUM_ROWS = 331
EPOCHS = 3
SEED = 5
#: The bound where kernels may add up in another order. What is seen is mostly 0.
TOLERANCE = {"rtol": 1e-6, "atol": 1e-7}


class Recorder(Regression):
    """Notes the loss of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.step(batch, "train")
        self.losses.append(loss.detach())
        return loss


def fit_superbatch(path: Path, devices: int, batch_size: int, **options: Any) -> Recorder:
    data = MemmapDataModule(
        Points(NUM_ROWS), store_dir=path / "stores", batch_size=batch_size, seed=SEED, **options
    )
    module = Recorder()
    trainer = make_trainer(
        path, strategy="memmap_superbatch", devices=devices, max_epochs=EPOCHS, limit_val_batches=0
    )
    trainer.fit(module, datamodule=data)
    return module


class StockData(L.LightningDataModule):
    """torch's own DataLoader over the dataset itself, told which rows each step has."""

    def __init__(self, global_batch: int) -> None:
        super().__init__()
        self.global_batch = global_batch

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        epoch = self.trainer.current_epoch
        steps = expected_batches(NUM_ROWS, self.global_batch, epoch, SEED)
        return DataLoader(Points(NUM_ROWS), batch_sampler=steps)

    def val_dataloader(self) -> Any:
        return []


def fit_stock(path: Path, global_batch: int) -> Recorder:
    module = Recorder()
    trainer = make_trainer(
        path, max_epochs=EPOCHS, reload_dataloaders_every_n_epochs=1, limit_val_batches=0
    )
    trainer.fit(module, datamodule=StockData(global_batch))
    return module


@pytest.mark.parametrize(
    ("devices", "batch_size"), [(1, 64), (2, 32), (4, 16), (8, 8), (3, 16), (6, 8)]
)
def test_weights_on_many_devices_are_those_of_one_and_of_stock_lightning(
    tmp_path: Path, devices: int, batch_size: int
) -> None:
    found = fit_superbatch(tmp_path, devices, batch_size)
    one = fit_superbatch(tmp_path, 1, devices * batch_size)
    assert found.seen == one.seen
    assert torch.equal(torch.stack(found.losses), torch.stack(one.losses))
    assert torch.equal(weights(found), weights(one))
    stock = fit_stock(tmp_path, devices * batch_size)
    assert found.seen == stock.seen
    torch.testing.assert_close(torch.stack(found.losses), torch.stack(stock.losses), **TOLERANCE)
    torch.testing.assert_close(weights(found), weights(stock), **TOLERANCE)
    assert (weights(found) - weights(Recorder())).abs().max() > 0.1
