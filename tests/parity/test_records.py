"""Training on lists of records: the same on one data device and on several."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memmap import MemmapDataModule, open_store
from lightning_memmap.callbacks import PredictionTable
from lightning_memmap.commands.rows import Epochs
from lightning_memmap.placement import topology_of
from lightning_memmap.sampling import Subset
from lightning_memmap.sampling.schedule import SkippedSteps
from tests.datasets import Scenes
from tests.models import Boxes, make_trainer, weights

NUM_ROWS, GLOBAL_BATCH = 150, 24


def fit(path: Path, strategy: str, devices: int, form: str, **options: Any) -> Boxes:
    data = MemmapDataModule(
        Scenes(NUM_ROWS),
        store_dir=path / "stores",
        batch_size=GLOBAL_BATCH // devices,
        seed=5,
        variable={"objects": form},
        with_row_numbers=True,
        **options,
    )
    module = Boxes()
    options = {"strategy": strategy, "devices": devices, "max_epochs": 2, "limit_val_batches": 0}
    make_trainer(path, **options).fit(module, data)
    return module


@pytest.mark.parametrize("form", ["list", "pad"])
def test_weights_do_not_depend_on_the_number_of_data_devices(tmp_path: Path, form: str) -> None:
    one = fit(tmp_path, "memmap_superbatch", 1, form)
    assert sorted(row for step in one.seen for row in step) == sorted([*range(NUM_ROWS)] * 2)
    for devices in (2, 3, 4):
        for options in ({}, {"transform": lambda batch: batch}, {"residency": "device"}):
            many = fit(tmp_path, "memmap_superbatch", devices, form, **options)
            assert many.seen == one.seen
            assert many.names == one.names
            assert torch.equal(weights(many), weights(one))


@pytest.mark.parametrize("strategy", ["memmap_dp", "auto"])
def test_weights_under_other_strategies_are_the_same(tmp_path: Path, strategy: str) -> None:
    one = fit(tmp_path, "memmap_superbatch", 1, "list")
    other = fit(tmp_path, strategy, 3 if strategy == "memmap_dp" else 1, "list")
    torch.testing.assert_close(weights(other), weights(one), rtol=1e-5, atol=1e-6)


class Numbering(Boxes):
    """Predicts the numbers of rows."""

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        return {"row": batch["row"], "row_number": batch["row_number"]}


@pytest.mark.parametrize("chosen", [None, [*range(120, 20, -3)]])
def test_table_of_predictions_and_rows_command_have_the_same_numbers(
    tmp_path: Path, chosen: list[int] | None
) -> None:
    data = MemmapDataModule(
        Scenes(NUM_ROWS),
        predict_dataset=Scenes(NUM_ROWS),
        store_dir=tmp_path / "stores",
        batch_size=8,
        with_row_numbers=True,
        subset=None if chosen is None else {"predict": Subset(chosen), "train": Subset(chosen)},
    )
    table = PredictionTable(tmp_path / "table")
    trainer = make_trainer(tmp_path, callbacks=[table], strategy="memmap_superbatch", devices=3)
    trainer.predict(Numbering(), datamodule=data, return_predictions=False)
    found = open_store(tmp_path / "table")
    rows = [*range(NUM_ROWS)] if chosen is None else chosen
    assert [int(found[place]["row_number"]) for place in range(len(found))] == rows
    assert [int(found[place]["row"]) for place in range(len(found))] == rows
    data.trainer = None
    data.prepare_data()
    data.setup("fit")
    order = data.train_sampler(open_store(data.store_path("train")))
    epochs = Epochs.of(data, order, topology_of(None), SkippedSteps())
    for step, batch in enumerate(data.train_dataloader()):
        assert epochs.step_rows(0, step).rows == batch["row_number"].tolist()
