"""Compiled modules log."""

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
    # torch's own, while it traces a loss.
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


def fit(path: Path, strategy: str, devices: int, *, compiled: bool) -> Any:
    """Train two epochs; the module and what it logged."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    module = Logs()
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
    compiled, its = fit(tmp_path / "a", strategy, devices, compiled=True)
    plain, other = fit(tmp_path / "b", strategy, devices, compiled=False)
    torch.testing.assert_close(compiled.state_dict(), plain.state_dict())
    assert its.callback_metrics.keys() == other.callback_metrics.keys() >= {"loss"}
    torch.testing.assert_close(dict(its.callback_metrics), dict(other.callback_metrics))
    assert "log" not in vars(compiled)
