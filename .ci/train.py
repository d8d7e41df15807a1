"""Trains with the installed package, as its user would: run by .ci/run outside of the clone."""

import sys
from pathlib import Path

import lightning as L
import torch

import lightning_memmap
from lightning_memmap import MemmapDataModule


class Line(L.LightningModule):
    """Learns a line."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The squared error of a batch."""
        return torch.nn.functional.mse_loss(self.layer(batch["x"]), batch["y"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=0.3)


rows = [{"x": torch.tensor([i / 96]), "y": torch.tensor([2 * i / 96 - 1])} for i in range(96)]
model, trainer = (
    Line(),
    L.Trainer(
        strategy="memmap_superbatch", devices=2, accelerator="cpu", max_epochs=40, logger=False
    ),
)
trainer.fit(model, MemmapDataModule(rows, store_dir="stores/line", batch_size=8))
package = Path(lightning_memmap.__file__).parent
assert package.is_relative_to(sys.prefix), package
assert (package / "py.typed").exists()
assert abs(model.layer.weight.item() - 2) < 0.1, model.layer.weight
print("trained with", package)
