"""Training on encoded images: as on the same images stored decoded, on any number of devices."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_memmap import MemmapDataModule
from tests.datasets import FORMS, EncodedImages
from tests.models import Brightness, make_trainer, weights

NUM_ROWS, GLOBAL_BATCH = 100, 24


def fit(
    path: Path,
    devices: int,
    strategy: str = "memmap_superbatch",
    decoded: bool = False,
    checkpoint: Path | None = None,
    callbacks: list[Any] | None = None,
    **options: Any,
) -> Brightness:
    data = MemmapDataModule(
        EncodedImages(NUM_ROWS, decoded),
        store_dir=path / ("decoded" if decoded else "encoded"),
        batch_size=GLOBAL_BATCH // devices,
        seed=5,
        variable=None if decoded else FORMS,
        **options,
    )
    module = Brightness()
    trainer = make_trainer(
        path,
        strategy=strategy,
        devices=devices,
        max_epochs=2,
        limit_val_batches=0,
        enable_checkpointing=callbacks is not None,
        callbacks=callbacks or [],
    )
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    return module


@pytest.mark.parametrize("residency", ["mmap", "device"])
def test_weights_are_those_of_decoded_images_on_any_number_of_data_devices(
    tmp_path: Path, residency: str
) -> None:
    decoded = fit(tmp_path, 1, decoded=True)
    for devices in (1, 2, 3, 4):
        encoded = fit(tmp_path, devices, residency=residency)
        assert encoded.seen == decoded.seen
        assert torch.equal(weights(encoded), weights(decoded))


def test_weights_under_a_transform_do_not_depend_on_the_number_of_data_devices(
    tmp_path: Path,
) -> None:
    decoded = fit(tmp_path, 1, decoded=True, transform=brighter)
    assert not torch.equal(weights(fit(tmp_path, 1)), weights(decoded))
    for devices in (1, 2, 3, 4):
        encoded = fit(tmp_path, devices, transform=brighter)
        assert torch.equal(weights(encoded), weights(decoded))


def brighter(batch: Any) -> Any:
    return {**batch, "image": batch["image"] // 2 + 100}


@pytest.mark.parametrize("strategy", ["memmap_dp", "auto"])
def test_weights_under_other_strategies_are_the_same(tmp_path: Path, strategy: str) -> None:
    one = fit(tmp_path, 1)
    other = fit(tmp_path, 3 if strategy == "memmap_dp" else 1, strategy)
    torch.testing.assert_close(weights(other), weights(one), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_run_goes_on_in_the_middle_of_an_epoch_bit_for_bit(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=1, save_top_k=-1)
    whole = fit(tmp_path, 2, callbacks=[saver])
    for step in (2, 7):
        for devices in (1, 2, 4):
            rest = fit(tmp_path, devices, checkpoint=tmp_path / "saved" / f"step={step}.ckpt")
            assert rest.seen == whole.seen[step:]
            assert torch.equal(weights(rest), weights(whole))
