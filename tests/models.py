"""Small modules to train, and the dataset that they learn from."""

import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

#: Names the accelerator of `make_trainer` in programs of tests.
ACCELERATOR_VARIABLE = "LIGHTNING_MEMMAP_TEST_ACCELERATOR"


class Points(Dataset[dict[str, Any]]):
    """Row ``i``: the number ``i``, eight floats that depend on it alone, and their sum of sines.

    Args:
        num_rows: Rows.
        offset: Added to the row numbers, so that splits differ.
    """

    def __init__(self, num_rows: int, offset: int = 0) -> None:
        rows = torch.arange(offset, offset + num_rows)
        self.row = rows
        self.x = torch.sin(rows[:, None] * torch.arange(1, 9) * 0.37)
        self.y = torch.sin(self.x).sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"row": self.row[index], "x": self.x[index], "y": self.y[index]}


class Regression(L.LightningModule):
    """A small network that notes what it is given.

    Attributes:
        seen: By stage, the rows of each batch.
        dtypes: The dtypes of ``x`` that training_step was given.
    """

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        with torch.no_grad():
            for parameter in self.net.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        self.seen: dict[str, list[list[int]]] = {}
        self.dtypes: set[torch.dtype] = set()

    def stages(self) -> list[nn.Module]:
        return [self.net[:2], self.net[2:]]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(output, batch["y"])

    def step(self, batch: dict[str, Tensor], stage: str) -> Tensor:
        self.seen.setdefault(stage, []).append(batch["row"].tolist())
        loss = self.loss(self(batch["x"]), batch)
        # Over all rows of all processes where an epoch is evaluated, which others act upon.
        self.log(
            f"{stage}_loss", loss, batch_size=len(batch["row"]), sync_dist=stage in ("val", "test")
        )
        return loss

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.dtypes.add(batch["x"].dtype)
        return self.step(batch, "train")

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.step(batch, "val")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.step(batch, "test")

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return {"row": batch["row"], "y": self(batch["x"])}

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Sgd(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class ByLbfgs(L.LightningModule):
    """Has an optimizer that calls the step several times. For a class that has a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Penalised(L.LightningModule):
    """Has a penalty on the parameters themselves. For a class that has a step."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss + sum(parameter.norm() for parameter in self.parameters())


class Manual(Regression):
    """Optimizes by hand, every second batch, with its own clipping."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = self.step(batch, "train")
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            optimizer: Any = self.optimizers()
            self.clip_gradients(optimizer, gradient_clip_val=0.5)
            optimizer.step()
            optimizer.zero_grad()


class TwoOptimizers(Regression):
    """Two parts, two optimizers, two schedulers, taken in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        schedulers: Any = self.lr_schedulers()
        optimizer = optimizers[batch_idx % 2]
        self.toggle_optimizer(optimizer)
        self.manual_backward(self.step(batch, "train"))
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)
        schedulers[batch_idx % 2].step()

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.Adam(self.net[0].parameters(), lr=0.05),
            torch.optim.SGD(self.net[2].parameters(), lr=0.1, momentum=0.9),
        ]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in optimizers]


class Scheduled(Regression):
    """A learning rate that halves with every optimizer step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.08)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Plateau(Regression):
    """A learning rate that follows the validation loss."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.08)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.1, patience=0, threshold=1e9, threshold_mode="abs"
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
        }


def make_trainer(path: Path, **options: Any) -> L.Trainer:
    """A Trainer on the CPU that writes nothing but what it is asked to, below ``path``.

    A program that `tests.distributed.harness.launch` has started may be told another accelerator.
    """
    defaults: dict[str, Any] = {
        "accelerator": os.environ.get(ACCELERATOR_VARIABLE, "cpu"),
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": path,
    }
    return L.Trainer(**{**defaults, **options})


def weights(module: nn.Module) -> Tensor:
    """All parameters as one vector, on the CPU."""
    return torch.cat([p.detach().cpu().flatten() for p in module.parameters()])
