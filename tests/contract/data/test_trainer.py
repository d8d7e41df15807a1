"""What users of Lightning have around a Trainer: bars, short runs, averaged weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    RichProgressBar,
    StochasticWeightAveraging,
    TQDMProgressBar,
)

from lightning_memmap import MemmapDataModule
from tests.support.models import QUIET, Points, Regression, make_trainer, weights
from tests.support.versions import EMAWeightAveraging, needs_ema

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:You are trying to `self.log"),
]
STRATEGIES = pytest.mark.parametrize(
    ("strategy", "devices"), [("memmap_superbatch", 2), ("memmap_dp", 2), ("auto", 1)]
)


def fit(path: Path, strategy: str = "memmap_superbatch", devices: int = 2, **options: Any) -> Any:
    """Train two epochs of six steps; the module and its Trainer."""
    torch.manual_seed(0)
    trainer = make_trainer(path, strategy=strategy, devices=devices, **{"max_epochs": 2, **options})
    module = Regression()
    data = MemmapDataModule(
        Points(48), Points(12, 1000), store_dir=path / "stores", batch_size=8 // devices
    )
    trainer.fit(module, data)
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
    if "barebones" in options:
        options = options | dict.fromkeys(QUIET) | {"max_epochs": 2}
    module, trainer = fit(tmp_path, strategy, devices, **options)
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
    assert torch.equal(weights(found), weights(expected))
    assert not torch.equal(weights(expected), weights(plain))
