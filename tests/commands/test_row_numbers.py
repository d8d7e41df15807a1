"""Row numbers are the same in a table of predictions, in a batch and in the command ``rows``."""

from pathlib import Path
from typing import Any

import pytest

from lightning_memmap import MemmapDataModule, open_store
from lightning_memmap.callbacks import PredictionTable
from lightning_memmap.commands.rows import describe_step
from lightning_memmap.placement.topology import find_topology
from lightning_memmap.sampling import Subset
from tests.support.datasets import Scenes
from tests.support.models import Boxes, make_trainer, set_up

NUM_ROWS = 100


class Numbering(Boxes):
    """Predicts the numbers of rows."""

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        return {"row": batch["row"], "row_number": batch["row_number"]}


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [None, [*range(90, 20, -3)]])
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
    set_up(data, "fit")
    order = data.make_train_order(open_store(data.store_path("train")))
    for step, batch in enumerate(data.train_dataloader()):
        shown = describe_step(data, order, find_topology(None), 0, step)
        assert shown["rows"] == batch["row_number"].tolist()
