"""``skip_unused_hooks``: the same training, and every hook that somebody overrides is called."""

import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loggers import CSVLogger

from lightning_memmap import MemmapDataModule
from lightning_memmap.strategies import SuperBatchStrategy
from tests.models import Points, Regression, make_trainer, weights

TRAIN, VAL = Points(63), Points(20, 100)


class Steps(L.Callback):
    """Notes what callbacks and loggers receive in each step."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *arguments: Any
    ) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        loss = None if outputs is None or "loss" not in outputs else float(outputs["loss"])
        self.found.append((trainer.global_step, loss, metrics))


class Scheduled(Regression):
    """With momentum, a scheduler for each step, and values in what a step returns."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "rows": batch["row"]}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def fit(
    path: Path, skip: bool, module: L.LightningModule | None = None, **options: Any
) -> tuple[L.LightningModule, Steps, L.Trainer]:
    module, steps = module or Scheduled(), Steps()
    options.setdefault("max_epochs", 3)
    callbacks = [steps, *options.pop("callbacks", [])]
    ckpt_path = options.pop("ckpt_path", None)
    trainer = make_trainer(
        path,
        strategy=SuperBatchStrategy(skip_unused_hooks=skip),
        devices=2,
        callbacks=callbacks,
        **options,
    )
    data = MemmapDataModule(TRAIN, VAL, store_dir=path / "stores", batch_size=4)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
    return module, steps, trainer


def logged(path: Path) -> str:
    (found,) = path.rglob("metrics.csv")
    return found.read_text()


def test_training_is_the_same_bit_by_bit(tmp_path: Path) -> None:
    found = []
    for skip in (False, True):
        logger = CSVLogger(tmp_path / str(skip), version=0)
        module, steps, trainer = fit(tmp_path, skip, logger=logger, log_every_n_steps=1)
        found.append((weights(module), steps.found, trainer.global_step, module.seen))
        progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.state_dict()
        found[-1] = (*found[-1], progress, trainer.optimizers[0].state_dict()["param_groups"])
    one, other = found
    assert torch.equal(one[0], other[0])
    assert one[1:] == other[1:]
    assert one[2] == 21
    assert logged(tmp_path / "False") == logged(tmp_path / "True")


def test_fit_goes_on_from_a_checkpoint_and_from_itself(tmp_path: Path) -> None:
    whole, steps, _ = fit(tmp_path, True)
    _, _, trainer = fit(tmp_path, True, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    resumed, later, again = fit(tmp_path, True, ckpt_path=tmp_path / "one.ckpt")
    assert torch.equal(weights(whole), weights(resumed))
    assert [step[:2] for step in later.found] == [step[:2] for step in steps.found[7:]]
    again.fit_loop.max_epochs = 4
    data = MemmapDataModule(TRAIN, VAL, store_dir=tmp_path / "stores", batch_size=4)
    again.fit(resumed, datamodule=data)
    assert again.global_step == 28


HOOKS = ["on_before_zero_grad", "on_before_backward", "on_after_backward"]
HOOKS += ["on_before_optimizer_step"]
OWN_HOOKS = ["optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "backward"]


@pytest.mark.parametrize("name", HOOKS + OWN_HOOKS)
def test_hook_of_the_module_is_called(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return getattr(super(kind, self), name)(*args, **kwargs)

    kind = type("Hooked", (Scheduled,), {name: hook})
    with caplog.at_level(logging.INFO):
        fit(tmp_path, True, kind(), max_epochs=1)
    assert len(calls) == 7
    assert caplog.text.count(f"since Hooked.{name} is overridden") == 1


@pytest.mark.parametrize("name", HOOKS)
def test_hook_of_a_callback_is_called(tmp_path: Path, name: str) -> None:
    calls: list[str] = []

    def hook(self: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(name)

    fit(tmp_path, True, max_epochs=1, callbacks=[type("Hooked", (L.Callback,), {name: hook})()])
    assert len(calls) == 7


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.01},
        {"precision": "bf16-mixed"},
        {"precision": "64-true"},
        {"accumulate_grad_batches": 3},
        {"profiler": "simple"},
    ],
    ids=str,
)
def test_what_has_a_part_in_the_step_has_it_still(tmp_path: Path, options: Any) -> None:
    (one, first, _), (other, second, _) = (fit(tmp_path, skip, **options) for skip in (0, 1))
    assert torch.equal(weights(one), weights(other))
    assert first.found == second.found
    plain, _, _ = fit(tmp_path, True)
    if "profiler" not in options:
        assert not torch.equal(weights(plain).double(), weights(one).double())


def test_accumulation_that_begins_later_is_heeded(tmp_path: Path) -> None:
    found = [
        fit(tmp_path, skip, callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})])
        for skip in (False, True)
    ]
    assert [trainer.global_step for _, _, trainer in found] == [15, 15]
    assert torch.equal(weights(found[0][0]), weights(found[1][0]))


class Closing(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Skipping(Regression):
    """Leaves out every other step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch_idx % 2 else None


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("kind", [Closing, Skipping])
def test_unusual_modules_train_as_ever(tmp_path: Path, kind: type[Regression]) -> None:
    (one, first, _), (other, second, _) = (fit(tmp_path, skip, kind()) for skip in (False, True))
    assert torch.equal(weights(one), weights(other))
    assert first.found == second.found
