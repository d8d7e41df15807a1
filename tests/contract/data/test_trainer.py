"""What users of Lightning have around a Trainer: bars, short runs, averaged weights."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    RichProgressBar,
    StochasticWeightAveraging,
    TQDMProgressBar,
)

from lightning_memmap import MemmapDataModule
from tests.support.models import Points, Regression
from tests.support.versions import EMAWeightAveraging, needs_ema, weights_only

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:You are trying to `self.log"),
]
STRATEGIES = pytest.mark.parametrize(
    ("strategy", "devices"), [("memmap_superbatch", 2), ("memmap_dp", 2), ("auto", 1)]
)


def make_data(path: Path, batch_size: int = 4) -> MemmapDataModule:
    return MemmapDataModule(
        Points(48), Points(12, 1000), store_dir=path / "stores", batch_size=batch_size
    )


def fit(path: Path, strategy: str = "memmap_superbatch", devices: int = 2, **options: Any) -> Any:
    """Train two epochs of six steps; the module and its Trainer."""
    settings: dict[str, Any] = {
        "max_epochs": 2, "logger": False, "enable_checkpointing": False, "log_every_n_steps": 1,
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": path,
    }  # fmt: skip
    torch.manual_seed(0)
    trainer = L.Trainer(
        accelerator="cpu", strategy=strategy, devices=devices, **(settings | options)
    )
    module = Regression()
    trainer.fit(module, make_data(path, 8 // devices))
    return module, trainer


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_progress_bars_count_the_steps_of_the_loader(tmp_path: Path, bar: Any) -> None:
    shown: list[Any] = []

    class Bar(bar):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, module, *args)
            shown.append(self.total_train_batches)

    fit(tmp_path, callbacks=[Bar()], enable_progress_bar=True)
    assert shown == [6] * 12


@STRATEGIES
@pytest.mark.parametrize(
    ("options", "steps"),
    [({"barebones": True}, 12), ({"overfit_batches": 2}, 4)],
    ids=["barebones", "overfit_batches"],
)
def test_short_and_bare_runs_take_their_steps(
    tmp_path: Path, strategy: str, devices: int, options: dict[str, Any], steps: int
) -> None:
    bare = {"logger": None, "enable_checkpointing": None, "log_every_n_steps": None}
    bare |= {"enable_progress_bar": None, "enable_model_summary": None}
    module, trainer = fit(
        tmp_path, strategy, devices, **options, **(bare if "barebones" in options else {})
    )
    assert trainer.global_step == steps
    assert sum(len(batch) for batch in module.seen["train"]) == 8 * steps


@pytest.mark.parametrize("strategy", ["memmap_superbatch", "auto"])
@pytest.mark.parametrize("kind", ["swa", pytest.param("ema", marks=needs_ema)])
def test_averaged_weights_are_those_of_one_device(tmp_path: Path, strategy: str, kind: str) -> None:
    def average() -> Any:
        if kind == "swa":
            return StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
        return EMAWeightAveraging(decay=0.9)

    found, _ = fit(tmp_path / "one", strategy, 1, callbacks=[average()])
    expected, _ = fit(tmp_path / "two", "memmap_superbatch", 2, callbacks=[average()])
    plain, _ = fit(tmp_path / "plain", "memmap_superbatch", 2)
    for name, weight in expected.named_parameters():
        assert torch.equal(found.get_parameter(name), weight)
    weights = [torch.cat([p.flatten() for p in each.parameters()]) for each in (expected, plain)]
    assert not torch.equal(*weights)


def test_data_module_with_hyperparameters_is_loaded_from_a_checkpoint(tmp_path: Path) -> None:
    class Data(MemmapDataModule):
        def __init__(self, store_dir: str, batch_size: int = 4) -> None:
            super().__init__(Points(48), store_dir=store_dir, batch_size=batch_size)
            self.save_hyperparameters()

    data = Data(str(tmp_path / "stores"), batch_size=6)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Regression(), data)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = Data.load_from_checkpoint(tmp_path / "last.ckpt", **weights_only(True))
    assert again.batch_size == 6
    assert str(again.store_dir) == str(tmp_path / "stores")
