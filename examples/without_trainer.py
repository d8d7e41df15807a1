"""Train without a Trainer: a loop of your own over the loader, with Lightning Fabric.

    python examples/without_trainer.py
    python examples/without_trainer.py --devices 2

The loader is used as torch's own. With several processes, each gets its rows of the same global
batches. A checkpoint has the loader's position: a run that was stopped inside an epoch continues
with the next row that it has not seen. Run the program again to see that.
"""

from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli

from examples.data.digits import Digits
from examples.digits import DigitsClassifier, Normalize, ShiftAndNormalize
from lightning_memmap import MemmapDataModule


def accuracy(model: Any, loader: Any) -> tuple[int, int]:
    """Count the rows of this process that a model classifies correctly, and all rows.

    Args:
        model: Computes the logits of images.
        loader: Yields batches.
    """
    right = rows = 0
    with torch.inference_mode():
        for batch in loader:
            chosen = model(batch["image"]).argmax(1)
            right += int((chosen == batch["label"]).sum())
            rows += len(chosen)
    return right, rows


def main(
    devices: int = 1, max_epochs: int = 3, batch_size: int = 64, stop_after: int | None = None
) -> None:
    """Train, validate, and save a checkpoint in each epoch and where the program stops.

    Args:
        devices: Processes, each with a GPU if there is one.
        max_epochs: Epochs to train.
        batch_size: Rows of a step per process.
        stop_after: Stop after this number of steps, as an interrupt would.
    """
    fabric = L.Fabric(devices=devices, strategy="ddp" if devices > 1 else "auto")
    fabric.launch()
    fabric.seed_everything(0)
    data = MemmapDataModule(
        Digits("train"),
        Digits("val"),
        store_dir="stores/without_trainer",
        batch_size=batch_size,
        transform=ShiftAndNormalize(mean=0.305, std=0.376),
        eval_transform=Normalize(mean=0.305, std=0.376),
    )
    data.use_fabric(fabric)
    data.prepare_data()
    data.setup("fit")
    loaders: Any = data.train_dataloader(), data.val_dataloader()
    loader, val_loader = fabric.setup_dataloaders(*loaders)
    network = DigitsClassifier().network
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    model, optimizer = fabric.setup(network, optimizer)

    checkpoint = Path("checkpoints/without_trainer.ckpt")
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "loader": loader,
        "epoch": 0,
        "steps": 0,
    }
    if checkpoint.exists():
        fabric.load(checkpoint, state)
        fabric.print(f"continuing in epoch {state['epoch']} after {state['steps']} steps")
    while state["epoch"] < max_epochs:
        for batch in loader:
            loss = F.cross_entropy(model(batch["image"]), batch["label"])
            optimizer.zero_grad()
            # The last steps of an epoch may have more rows on some processes than on others.
            fabric.backward(loss * data.loss_scale())
            optimizer.step()
            state["steps"] += 1
            if state["steps"] == stop_after:
                fabric.save(checkpoint, state)
                return
        state["epoch"] += 1
        fabric.save(checkpoint, state)
        counts = torch.tensor(accuracy(model, val_loader))
        total: Any = fabric.all_reduce(counts, reduce_op="sum")
        right, rows = total.tolist()
        fabric.print(f"epoch {state['epoch']}: accuracy {right / rows:.4f} of {rows} rows")


if __name__ == "__main__":
    auto_cli(main)
