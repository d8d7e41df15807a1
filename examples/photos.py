"""Classify patches of photographs in PNG files, in several processes under ddp.

    python examples/photos.py
    python examples/photos.py --encoded true
    lightning-memmap fit --config examples/configs/photos.yaml
    lightning-memmap compare --config examples/configs/photos.yaml

A DataLoader decodes every file again in every epoch. The store has the decoded images, so a step
only crops and mirrors them. If decoded images don't fit into memory, use ``--encoded true``: the
store keeps the files, and threads decode them while the model trains.

The classes are the photograph of a patch, and whether it is upside down. Lightning's own ``ddp``
starts a process for each device, and each process reads its own rows of the store.
"""

import lightning as L
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from examples.data.photographs import CLASSES, Photos
from lightning_memmap import MemmapDataModule
from lightning_memmap.schema import Decode
from lightning_memmap.transforms import RowRandom

#: Height and width of the crops.
SIZE = 48


def crop_and_normalize(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Crop the middle of ``image``, uint8 of (B, 3, H, W), and turn it into float32."""
    height, width = batch["image"].shape[2:]
    y = (height - SIZE) // 2
    x = (width - SIZE) // 2
    return normalize(batch, batch["image"][:, :, y : y + SIZE, x : x + SIZE])


def random_crop_and_flip(batch: dict[str, Tensor], random: RowRandom) -> dict[str, Tensor]:
    """Crop each image at a random place, mirror half of them, and normalise them.

    `lightning_memmap.augmentations` has the same as `RandomCrop` and `RandomFlip`. This shows how
    to write one yourself: ``random`` has numbers for each row.
    """
    image = batch["image"]
    rows, _, height, width = image.shape
    y = random.randint(high=height - SIZE + 1)
    x = random.randint(high=width - SIZE + 1)
    # A view of every possible crop; one crop is copied for each row.
    crops = image.unfold(2, SIZE, 1).unfold(3, SIZE, 1)
    chosen = crops[torch.arange(rows, device=image.device), :, y, x]
    mirrored = random.bernoulli()[:, None, None, None]
    return normalize(batch, torch.where(mirrored, chosen.flip(-1), chosen))


def normalize(batch: dict[str, Tensor], image: Tensor) -> dict[str, Tensor]:
    """Replace ``image`` by bytes that are converted to float32 numbers from -2 to 2."""
    return {**batch, "image": image.float().sub_(127.5).div_(64)}


class PhotoClassifier(L.LightningModule):
    """A small convolutional network for images of three channels and four classes.

    Args:
        lr: Learning rate of Adam.
        width: Channels of the first layer, a multiple of 4.
    """

    def __init__(self, lr: float = 2e-3, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.val_accuracy = MulticlassAccuracy(len(CLASSES), average="micro")
        self.test_accuracy = MulticlassAccuracy(len(CLASSES), average="micro")
        self.network = nn.Sequential(
            nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False),
            # Group norm, unlike batch norm, doesn't depend on how rows are divided over devices.
            nn.GroupNorm(4, width),
            # SiLU is smooth: a rounding error can't push all pixels of a plain sky across an edge.
            nn.SiLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
            nn.GroupNorm(4, 2 * width),
            nn.SiLU(),
            nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1, bias=False),
            nn.GroupNorm(4, 4 * width),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(4 * width * 4 * 4, len(CLASSES)),
        )

    def forward(self, image: Tensor) -> Tensor:
        """Logits of shape (B, 4) for normalised images of shape (B, 3, H, W)."""
        return self.network(image)  # type: ignore[no-any-return]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Compute the cross-entropy of a batch, logged as ``train_loss``."""
        loss = F.cross_entropy(self(batch["image"]), batch["label"])
        rows = len(batch["label"])
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=rows)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log ``val_loss`` and ``val_accuracy``."""
        logits = self(batch["image"])
        loss = F.cross_entropy(logits, batch["label"])
        self.val_accuracy(logits, batch["label"])
        self.log("val_loss", loss, sync_dist=True, batch_size=len(logits))
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log ``test_accuracy``."""
        self.test_accuracy(self(batch["image"]), batch["label"])
        self.log("test_accuracy", self.test_accuracy)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Predict the most likely class of each row, int64 of shape (B,)."""
        return torch.argmax(self(batch["image"]), dim=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def main(
    devices: int = 2, max_epochs: int = 5, encoded: bool = False, strategy: str = "ddp"
) -> None:
    """Train and test in several processes.

    Args:
        devices: Number of processes, each with a GPU if there is one.
        max_epochs: Epochs to train.
        encoded: Store the files, and decode them in every epoch.
        strategy: Name of a strategy. All have the same rows in every step.
    """
    L.seed_everything(0)
    # With mode=None, a sample has the bytes of the file.
    mode = None if encoded else "RGB"
    data = MemmapDataModule(
        Photos("train", mode=mode),
        Photos("val", mode=mode),
        Photos("test", mode=mode),
        store_dir="stores/photos-encoded" if encoded else "stores/photos",
        batch_size=32,
        transform=random_crop_and_flip,
        eval_transform=crop_and_normalize,
        decode={"image": Decode()} if encoded else None,
    )
    trainer = L.Trainer(
        strategy=strategy,
        devices=devices,
        max_epochs=max_epochs,
        logger=False,
        enable_checkpointing=False,
    )
    model = PhotoClassifier()
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data)


if __name__ == "__main__":
    auto_cli(main)
