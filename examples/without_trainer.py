"""Train without a Trainer: a loop of your own with Lightning Fabric.

    python examples/without_trainer.py
    python examples/without_trainer.py --devices 2

Each process gets its own rows of the same global batches. A checkpoint has the position of the
loader, so a run that was stopped inside an epoch continues with the next unseen row. To see that,
add ``--stop_after 30``, and run the program again without it.
"""

from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from torch import Tensor, nn

from examples.data.digits import Digits
from lightning_memmap import MemmapDataModule
from lightning_memmap.augmentations import Compose, RandomCrop


def normalize(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Turn ``image``, uint8 of shape (B, 1, 8, 8), into normalised float32."""
    return {**batch, "image": (batch["image"] / 255 - 0.305) / 0.376}


def make_network() -> nn.Module:
    """Make a small network for 8x8 images of 10 classes."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def count_correct(model: Any, loader: Any) -> tuple[int, int]:
    """Count the rows of this process, and those that a model classifies correctly.

    Args:
        model: Computes the logits of images.
        loader: Yields batches.

    Returns:
        The number of correct rows, and of all rows.
    """
    correct = 0
    rows = 0
    with torch.inference_mode():
        for batch in loader:
            predicted = model(batch["image"]).argmax(1)
            correct += int((predicted == batch["label"]).sum())
            rows += len(predicted)
    return correct, rows


def main(
    devices: int = 1, max_epochs: int = 3, batch_size: int = 64, stop_after: int | None = None
) -> None:
    """Train and validate, and save a checkpoint after each epoch and when the program stops.

    Args:
        devices: Processes, each with a GPU if there is one.
        max_epochs: Epochs to train.
        batch_size: Rows of each process in a step.
        stop_after: Stop after this number of steps, as if the run were interrupted.
    """
    fabric = L.Fabric(devices=devices, strategy="ddp" if devices > 1 else "auto")
    fabric.launch()
    fabric.seed_everything(0)
    data = MemmapDataModule(
        Digits("train"),
        Digits("val"),
        store_dir="stores/without_trainer",
        batch_size=batch_size,
        transform=Compose([RandomCrop(padding=1), normalize]),
        eval_transform=normalize,
    )
    data.use_fabric(fabric)
    data.prepare_data()
    data.setup("fit")
    loaders: Any = data.train_dataloader(), data.val_dataloader()
    loader, val_loader = fabric.setup_dataloaders(*loaders)
    network = make_network()
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
        counts = torch.tensor(count_correct(model, val_loader))
        total: Any = fabric.all_reduce(counts, reduce_op="sum")
        correct, rows = total.tolist()
        fabric.print(f"epoch {state['epoch']}: accuracy {correct / rows:.4f} of {rows} rows")


if __name__ == "__main__":
    auto_cli(main)
