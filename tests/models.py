"""Small modules to train, and the dataset that they learn from."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


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

    def loss(self, batch: dict[str, Tensor], stage: str) -> Tensor:
        self.seen.setdefault(stage, []).append(batch["row"].tolist())
        loss = nn.functional.mse_loss(self.net(batch["x"]), batch["y"])
        self.log(f"{stage}_loss", loss, batch_size=len(batch["row"]))
        return loss

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.dtypes.add(batch["x"].dtype)
        return self.loss(batch, "train")

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.loss(batch, "val")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.loss(batch, "test")

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        return {"row": batch["row"], "y": self.net(batch["x"])}

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def make_trainer(path: Path, **options: Any) -> L.Trainer:
    """A Trainer on the CPU that writes nothing but what it is asked to, below ``path``."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
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
