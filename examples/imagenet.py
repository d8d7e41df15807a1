"""Train a ResNet on a folder of JPEG files, on 4 GPUs.

    pip install torchvision -e ".[images,turbo]"
    python examples/imagenet.py /data/imagenet --devices 4

The folder has ``train/CLASS/NAME.JPEG`` and ``val/CLASS/NAME.JPEG``. The store keeps the JPEG files
as they are. While a step is computed, threads decode a random part of each image of the next steps;
flips and colours are changed on the GPUs. Each row has its own random numbers, so the images of an
epoch are the same on 1, 2 or 4 GPUs, and after a resume.

To continue a run that was interrupted: ``--ckpt_path checkpoints/imagenet/last.ckpt``.
"""

from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from lightning.pytorch import callbacks
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_memmap import ImageFolder, MemmapDataModule
from lightning_memmap.augmentations import ColorJitter, Compose, RandomFlip
from lightning_memmap.schema import Decode

#: Mean and standard deviation of the channels of ImageNet, for values from 0 to 255.
MEAN = 123.675, 116.28, 103.53
STD = 58.395, 57.12, 57.375


def normalize(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Turn ``image``, uint8 of (B, 3, H, W), into normalised float32."""
    image = batch["image"]
    mean = torch.tensor(MEAN, device=image.device)[:, None, None]
    std = torch.tensor(STD, device=image.device)[:, None, None]
    return {**batch, "image": (image - mean) / std}


def make_network(name: str, num_classes: int) -> nn.Module:
    """Make a network of torchvision; ``small`` is one for tests."""
    if name == "small":
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(512, num_classes),
        )
    import torchvision

    network: nn.Module = torchvision.models.get_model(name, num_classes=num_classes)
    return network


class ImageClassifier(L.LightningModule):
    """A classifier, trained by SGD with warm-up and a cosine.

    Args:
        network: Name of a network of torchvision.
        num_classes: Number of classes.
        lr: Highest learning rate.
        warmup: Fraction of the steps in which the learning rate rises.
    """

    def __init__(self, network: str, num_classes: int, lr: float, warmup: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.warmup = warmup
        self.network = make_network(network, num_classes)
        self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # untyped
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, image: Tensor) -> Tensor:
        """Logits of shape (B, num_classes) for images of shape (B, 3, H, W)."""
        logits: Tensor = self.network(image.contiguous(memory_format=torch.channels_last))
        return logits

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy of a batch, with label smoothing."""
        loss = F.cross_entropy(self(batch["image"]), batch["label"], label_smoothing=0.1)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Count the rows that are classified correctly: each row once, on all devices."""
        self.val_accuracy(self(batch["image"]), batch["label"])
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def configure_optimizers(self) -> Any:
        """SGD with Nesterov momentum, without weight decay for biases and norms."""
        decayed = [param for param in self.parameters() if param.ndim > 1]
        others = [param for param in self.parameters() if param.ndim <= 1]
        optimizer = torch.optim.SGD(
            [{"params": decayed, "weight_decay": 5e-5}, {"params": others, "weight_decay": 0.0}],
            lr=self.lr,
            momentum=0.9,
            nesterov=True,
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=self.lr,
            total_steps=int(self.trainer.estimated_stepping_batches),
            pct_start=self.warmup,
            cycle_momentum=False,
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def main(
    folder: str,
    devices: int = 4,
    strategy: str = "ddp",
    network: str = "resnet50",
    size: int = 224,
    batch_size: int = 256,
    max_epochs: int = 90,
    ema: float = 0.9999,
    num_workers: int = 0,
    store_dir: str = "stores/imagenet",
    ckpt_path: str | None = None,
) -> None:
    """Train, and evaluate the moving average of the weights after each epoch.

    Args:
        folder: Has a folder ``train`` and a folder ``val``, each with a folder for each class.
        devices: GPUs; without one, processes on the CPU.
        strategy: ``memmap_superbatch_ddp`` weights uneven last steps by their rows.
        network: Name of a network of torchvision.
        size: Height and width of the images that the network sees.
        batch_size: Rows of each GPU in a step.
        max_epochs: Epochs to train.
        ema: Decay of the moving average.
        num_workers: Processes that read the files while the store is built.
        store_dir: Directory of the stores.
        ckpt_path: A checkpoint of an interrupted run.
    """
    L.seed_everything(0)
    # With mode=None, a sample has the bytes of the file.
    train = ImageFolder(Path(folder) / "train", mode=None)
    data = MemmapDataModule(
        train,
        ImageFolder(Path(folder) / "val", mode=None),
        store_dir=store_dir,
        batch_size=batch_size,
        num_workers=num_workers,
        decode={"image": Decode(size=(size, size), crop="random_resized")},
        transform=Compose([RandomFlip(), ColorJitter(0.4, 0.4, 0.4), normalize]),
        eval_transform=normalize,
    )
    # The learning rate grows with the rows of a step (Goyal et al. 2017).
    lr = 0.1 * batch_size * devices / 256
    checkpoints = callbacks.ModelCheckpoint(
        "checkpoints/imagenet", "best", monitor="val_accuracy", mode="max", save_last=True
    )
    trainer = L.Trainer(
        strategy=strategy,
        devices=devices,
        precision="bf16-mixed" if torch.cuda.is_available() else "32-true",
        max_epochs=max_epochs,
        # Validation uses the average, and the checkpoint has it as the weights.
        callbacks=[callbacks.EMAWeightAveraging(decay=ema), checkpoints],
        logger=False,
        num_sanity_val_steps=0,
    )
    model = ImageClassifier(network, len(train.classes), lr)
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    trainer.validate(model, datamodule=data)


if __name__ == "__main__":
    auto_cli(main)
