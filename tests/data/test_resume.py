"""A resumed fit says when its data or its order are not what the checkpoint was saved with."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_memmap import MemmapDataModule
from lightning_memmap.sampling import Weighted
from tests.support.models import Points, Regression, make_trainer


def fit(
    path: Path,
    dataset: Any,
    stores: str = "stores",
    checkpoint: Path | None = None,
    save: bool = False,
    **options: Any,
) -> None:
    data = MemmapDataModule(
        dataset, store_dir=path / stores, batch_size=8, num_shards=4, overwrite=True
    )
    callback = ModelCheckpoint(path / "saved", "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(
        path,
        max_epochs=2,
        enable_checkpointing=save,
        callbacks=[callback] if save else [],
        **options,
    )
    trainer.fit(Regression(), data, ckpt_path=checkpoint)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    fit(tmp_path, Points(40), save=True)
    return tmp_path / "saved"


@pytest.mark.parametrize("stores", ["stores", "others"], ids=["overwritten", "elsewhere"])
def test_other_rows_inside_an_epoch_are_warned_of(tmp_path: Path, saved: Path, stores: str) -> None:
    with pytest.warns(UserWarning, match="train store"):
        fit(tmp_path, Points(40, 7), stores, saved / "step=3.ckpt")


def test_other_rows_of_an_epoch_that_begins_are_not_warned_of(tmp_path: Path, saved: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*train store")
        fit(tmp_path, Points(40, 7), "others", saved / "step=5.ckpt")


def test_same_rows_in_a_store_that_was_built_again_are_not_warned_of(
    tmp_path: Path, saved: Path
) -> None:
    shutil.rmtree(tmp_path / "stores")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*train store")
        for stores in ("stores", "others"):
            fit(tmp_path, Points(40), stores, saved / "step=3.ckpt")


def test_sampler_that_overfit_batches_ignores_is_warned_of(tmp_path: Path) -> None:
    data = MemmapDataModule(
        Points(40),
        store_dir=tmp_path / "stores",
        batch_size=8,
        sampler=Weighted(list(range(1, 41))),
    )
    trainer = make_trainer(tmp_path, overfit_batches=2)
    with pytest.warns(UserWarning, match="sampler="):
        trainer.fit(Regression(), data)
