"""A CIFAR-10-sized network, trained from uint8 images that stay on the data devices.

    python examples/cifar.py
    python examples/cifar.py --data cifar10 --folder data/cifar-10-batches-bin --width 64
    lightning-memmap fit --config examples/configs/cifar.yaml

All images are 3x32x32 bytes and stay bytes until they reach the network: each data device crops
and mirrors the rows that it fetches, a quarter of the bytes of floats moves to the root device, and
the network converts and normalises.
"""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from torch import Tensor, nn

from examples.data.small_images import DataName, SmallImages
from examples.networks import ResNet9
from examples.shared import Classifier, train_and_test
from lightning_memmap import MemmapDataModule


class CropAndFlip(nn.Module):
    """Batch transform for training: crop each padded image at random, and mirror half of them.

    Each row is cropped and mirrored independently, all of them in one gather on the data device.

    Args:
        padding: Black pixels added on each side before the image is cropped to its size again.
        flip: Whether to mirror half of the images, left to right.
    """

    def __init__(self, padding: int = 4, flip: bool = True) -> None:
        super().__init__()
        self.padding, self.flip = padding, flip

    def forward(self, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Transform ``image``, of shape (B, C, H, W) and any dtype, and keep everything else."""
        image = batch["image"]
        (rows, channels, height, width), device = image.shape, image.device
        offsets = 2 * self.padding + 1
        moved = torch.randint(offsets, (2, rows, 1), generator=generator, device=device)
        y = moved[0] + torch.arange(height, device=device)
        x = torch.arange(width, device=device).expand(rows, -1)
        if self.flip:
            mirrored = torch.rand((rows, 1), generator=generator, device=device) < 0.5
            x = torch.where(mirrored, width - 1 - x, x)
        padded = F.pad(image, [self.padding] * 4)
        pixels = y[:, :, None] * padded.shape[3] + (x + moved[1])[:, None, :]
        pixels = pixels.view(rows, 1, -1).expand(-1, channels, -1)
        cropped = padded.flatten(2).gather(2, pixels).view(image.shape)
        return {**batch, "image": cropped}


class SmallResNet(Classifier):
    """A residual network of nine layers for images of 3x32x32 bytes, of 10 classes.

    Args:
        lr: Highest learning rate, which rises to this value and falls to nearly zero in one cycle.
        width: Channels of the first layer.
        weight_decay: Weight decay of all parameters.
    """

    def __init__(self, lr: float = 0.4, width: int = 64, weight_decay: float = 5e-4) -> None:
        super().__init__(10, lr)
        self.save_hyperparameters()
        self.weight_decay, self.network = weight_decay, ResNet9(10, width)

    def forward(self, image: Tensor) -> Tensor:
        """Logits of shape (B, 10) for uint8 images of shape (B, 3, 32, 32)."""
        scaled = image.contiguous(memory_format=torch.channels_last).float().div_(255)
        # The largest of many activations are large; this makes the first logits small.
        return 0.125 * self.network(scaled.sub_(0.5).div_(0.25))  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        """SGD with Nesterov momentum, and one cycle of the learning rate over all steps."""
        settings: Any = {"lr": self.lr, "momentum": 0.9, "weight_decay": self.weight_decay}
        optimizer = torch.optim.SGD(self.parameters(), nesterov=True, **settings)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, self.lr, total_steps=steps, cycle_momentum=False
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main(
    data: DataName = "digits",
    folder: str | None = None,
    devices: int = 2,
    max_epochs: int = 5,
    width: int = 8,
) -> None:
    """Train with memmap_superbatch, test, and print a summary.

    Args:
        data: Which images: those that are smaller are enlarged.
        folder: Folder of the files of Fashion-MNIST or CIFAR-10.
        devices: GPUs; without one, logical data devices on the CPU.
        max_epochs: Epochs to train.
        width: Channels of the first layer; 64 is the network's full size.
    """
    L.seed_everything(0)
    datamodule = MemmapDataModule(
        *(SmallImages(split, data, folder) for split in ("train", "val", "test")),
        store_dir=f"stores/cifar-{data}",
        batch_size=64,
        # The mirror image of a digit is not a digit.
        transform=CropAndFlip(flip=data != "digits"),
    )
    options: Any = {"precision": "bf16-mixed"} if torch.cuda.is_available() else {}
    options |= {"devices": devices, "max_epochs": max_epochs}
    train_and_test(SmallResNet(width=width), datamodule, **options)


if __name__ == "__main__":
    auto_cli(main)
