"""Compiled modules log, and toggle optimizers."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_memmap import MemmapDataModule

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`"),
    # torch's own, while it imports modules and traces a loss.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

ROWS = [{"x": torch.tensor([i / 32]), "y": torch.tensor([i / 16])} for i in range(32)]


class Logs(L.LightningModule):
    """Logs in its step, each way, and as an epoch's mean."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch["x"]), batch["y"])
        self.log("loss", loss)
        self.log_dict({"mean": loss, "twice": 2 * loss}, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Players(Logs):
    """Steps two optimizers, each of which freezes the parameters of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(1, 1)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for sign, optimizer in zip((1, -0.1), optimizers, strict=True):
            self.toggle_optimizer(optimizer)
            loss = sign * (self.net(batch["x"]) - self.other(batch["x"]) - batch["y"]).square()
            optimizer.zero_grad()
            self.manual_backward(loss.mean())
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.log("loss", loss.mean())

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), 0.1) for part in (self.net, self.other)]


def fit(make: Any, path: Path, strategy: Any, devices: int, *, compiled: bool) -> Any:
    """Train two epochs; the module and what it logged."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    module = make()
    trainer = L.Trainer(
        accelerator="cpu", strategy=strategy, devices=devices, max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=path,
    )  # fmt: skip
    given: Any = torch.compile(module, backend="eager") if compiled else module
    trainer.fit(given, MemmapDataModule(ROWS, store_dir=path / "stores", batch_size=8 // devices))
    return module, trainer


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        ("memmap_superbatch", 2),
        ("memmap_dp", 2),
        ("memmap_model_parallel", 1),
        ("memmap_independent", 1),
    ],
)
def test_compiled_module_trains_and_logs_as_it_is(
    tmp_path: Path, strategy: str, devices: int
) -> None:
    compiled, its = fit(Logs, tmp_path / "a", strategy, devices, compiled=True)
    plain, other = fit(Logs, tmp_path / "b", strategy, devices, compiled=False)
    torch.testing.assert_close(compiled.state_dict(), plain.state_dict())
    assert its.callback_metrics.keys() == other.callback_metrics.keys() >= {"loss"}
    torch.testing.assert_close(dict(its.callback_metrics), dict(other.callback_metrics))
    assert "log" not in vars(compiled)


def test_compiled_module_toggles_optimizers_as_it_is(tmp_path: Path) -> None:
    compiled, its = fit(Players, tmp_path / "a", "memmap_superbatch", 1, compiled=True)
    plain, other = fit(Players, tmp_path / "b", "memmap_superbatch", 1, compiled=False)
    torch.testing.assert_close(compiled.state_dict(), plain.state_dict())
    torch.testing.assert_close(dict(its.callback_metrics), dict(other.callback_metrics))
    for name, value in Players().state_dict().items():
        assert not torch.allclose(value, plain.state_dict()[name]), name
    assert all(parameter.requires_grad for parameter in compiled.parameters())
