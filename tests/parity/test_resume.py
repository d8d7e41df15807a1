"""A checkpoint from inside an epoch goes on with the next unseen row, on any device count."""

from itertools import chain
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_memmap import MemmapDataModule
from tests.models import Points, Regression, make_trainer, weights

NUM_ROWS = 331
EPOCHS = 3


class Recorder(Regression):
    """Notes the rows of each epoch, and the epochs after which it was validated."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, list[list[int]]] = {epoch: [] for epoch in range(EPOCHS)}
        self.validated: list[int] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.rows[self.current_epoch].append(batch["row"].tolist())
        return self.loss(batch, "train")

    def on_validation_start(self) -> None:
        self.validated.append(self.current_epoch)


def fit(
    path: Path, devices: int, batch_size: int, checkpoint: Path | None = None, save: bool = False
) -> Recorder:
    data = MemmapDataModule(
        Points(NUM_ROWS), Points(50, 1000), store_dir=path / "stores", batch_size=batch_size
    )
    saver = ModelCheckpoint(path / "saved", "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(
        path,
        strategy="memmap_superbatch",
        devices=devices,
        max_epochs=EPOCHS,
        num_sanity_val_steps=0,
        enable_checkpointing=save,
        callbacks=[saver] if save else [],
    )
    module = Recorder()
    trainer.fit(module, data, ckpt_path=checkpoint)
    return module


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recorder]:
    """A run of 4 x 16 rows a step with a checkpoint after each: 6 steps an epoch."""
    path = tmp_path_factory.mktemp("whole")
    return path, fit(path, 4, 16, save=True)


# The resumed run saves nothing.
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("step", [1, 3, 5, 6, 8, 17])
@pytest.mark.parametrize(("devices", "batch_size"), [(1, 64), (1, 16), (2, 16), (8, 16), (8, 8)])
def test_resume_on_other_device_count_continues_row_stream(
    whole_run: tuple[Path, Recorder], step: int, devices: int, batch_size: int
) -> None:
    path, whole = whole_run
    resumed = fit(path, devices, batch_size, path / "saved" / f"step={step}.ckpt")
    steps_before = step
    for epoch in range(EPOCHS):
        batches = whole.rows[epoch]
        done, steps_before = min(steps_before, len(batches)), max(0, steps_before - len(batches))
        expected = list(chain(*batches[done:]))
        assert list(chain(*resumed.rows[epoch])) == expected
        # An epoch with nothing left to train may still have its validation to do.
        assert (epoch in resumed.validated) or not expected
    assert max(len(rows) for rows in chain(*resumed.rows.values())) < 2 * devices * batch_size
    if devices * batch_size == 64:
        assert torch.equal(weights(resumed), weights(whole))
