"""`RowLog`: values per row that a module logs instead of returning them; also of documents."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_memmap import MemmapDataModule
from lightning_memmap.callbacks import RowResults
from lightning_memmap.results import RowLog, read_row_results
from lightning_memmap.sampling import Packed
from tests.support.documents import (
    KEYS,
    NUM_DOCUMENTS,
    Documents,
    PerDocument,
    check_documents,
    make_packs,
)
from tests.support.models import Points, Regression, make_trainer
from tests.support.versions import weights_only

NUM_ROWS = 61


class Logging(RowLog, Regression):
    """Logs the losses of its rows, and returns their mean alone."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        losses = (self(batch["x"]) - batch["y"]).square().mean(1)
        self.log_rows("row_loss", losses)
        self.log_rows("row", batch["row"])
        return losses.mean()

    def validation_step(
        self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.log_rows("row", batch["row"])


def fit(path: Path, module: Any, **options: Any) -> None:
    trainer = make_trainer(
        path,
        max_epochs=2,
        callbacks=[
            RowResults(path / "loss", ["row_loss"]),
            RowResults(path / "row", ["row"]),
            RowResults(path / "val", ["row"], split="val"),
        ],
        **options,
    )
    data = MemmapDataModule(
        Points(NUM_ROWS),
        Points(20, offset=100),
        store_dir=path / "stores",
        batch_size=4,
        num_shards=4,
    )
    trainer.fit(module, data)


class Frozen(Logging):
    def __init__(self) -> None:
        super().__init__(lr=0.0)


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("strategy", ["memmap_superbatch", "memmap_dp"])
def test_logged_rows_are_results(tmp_path: Path, strategy: str, devices: int) -> None:
    fit(tmp_path, Frozen(), strategy=strategy, devices=devices)
    rows = read_row_results(tmp_path / "row", "all")["row"]
    assert torch.equal(rows, torch.arange(NUM_ROWS).expand(2, -1))
    points = Points(NUM_ROWS)
    losses = (Regression()(points.x) - points.y).square().mean(1)
    torch.testing.assert_close(read_row_results(tmp_path / "loss")["row_loss"], losses.detach())
    assert read_row_results(tmp_path / "val")["row"].tolist() == [*range(100, 120)]


def test_values_that_are_no_tensor_are_an_error() -> None:
    with pytest.raises(TypeError, match="row_loss"):
        Logging().log_rows("row_loss", [1.0, 2.0])  # type: ignore[arg-type]


def test_rows_that_a_step_did_not_log_again_are_an_error(tmp_path: Path) -> None:
    class Once(Logging):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
            if batch_idx == 0:
                return super().training_step(batch, batch_idx)
            return self(batch["x"]).mean()

    with pytest.raises(ValueError, match="row_loss"):
        fit(tmp_path, Once())


def test_logged_values_may_have_the_name_of_what_the_step_returns(tmp_path: Path) -> None:
    class Loss(RowLog, Regression):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
            losses = batch["row"].float()
            self.log_rows("loss", losses)
            return (losses * self(batch["x"]).mean(1)).mean()

    trainer = make_trainer(tmp_path, max_epochs=1, callbacks=[RowResults(tmp_path / "r", ["loss"])])
    data = MemmapDataModule(Points(NUM_ROWS), store_dir=tmp_path / "stores", batch_size=4)
    trainer.fit(Loss(), data)
    assert read_row_results(tmp_path / "r")["loss"].tolist() == [*range(NUM_ROWS)]


@pytest.mark.parametrize("devices", [1, 2])
def test_packed_documents_have_a_value_each_through_a_resume(tmp_path: Path, devices: int) -> None:
    for fails, checkpoint in ((5, None), (-1, tmp_path / "step=4.ckpt")):
        trainer = make_trainer(
            tmp_path,
            strategy="memmap_superbatch",
            devices=devices,
            max_epochs=2,
            enable_checkpointing=True,
            callbacks=[
                RowResults(tmp_path / "r", KEYS),
                ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=2),
            ],
        )
        options = weights_only(checkpoint is not None)
        with nullcontext() if checkpoint else pytest.raises(InterruptedError):
            trainer.fit(
                PerDocument(fails), make_packs(tmp_path, devices), ckpt_path=checkpoint, **options
            )
    check_documents(tmp_path / "r")


def fit_packs(path: Path, module: Any, sampler: Packed, keys: list[str]) -> Any:
    """Train an epoch on packs, and return their order."""
    trainer = make_trainer(path, max_epochs=1, callbacks=[RowResults(path / "r", keys)])
    data = MemmapDataModule(
        Documents(), store_dir=path / "stores", batch_size=4, num_shards=2, sampler=sampler
    )
    trainer.fit(module, data)
    return data.order


def test_values_of_packs_instead_of_documents_are_an_error(tmp_path: Path) -> None:
    class PerPack(PerDocument):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log_rows("document", batch["tokens"][:, 0])
            return self.net(torch.ones(1, 8)).mean()

    with pytest.raises(ValueError, match=r"'document'.*\(B, max_documents"):
        fit_packs(tmp_path, PerPack(), Packed("tokens", 16), ["document"])


def test_cut_document_has_the_value_of_its_last_piece(tmp_path: Path) -> None:
    order = fit_packs(tmp_path, PerDocument(), Packed("tokens", 7, split=True), ["length"])
    packed = order.documents_at(0, np.arange(order.num_positions))
    rows = order.pool.dataset_rows(packed.pool_index).tolist()
    last = dict(zip(rows, packed.lengths[:, 0].tolist(), strict=True))
    assert len(rows) > len(last) == NUM_DOCUMENTS
    lengths = read_row_results(tmp_path / "r")["length"].tolist()
    assert lengths == [last[row] for row in range(NUM_DOCUMENTS)]
