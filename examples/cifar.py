"""A CIFAR-10-sized network, trained from uint8 images that stay on the data devices.

    python examples/cifar.py
    python examples/cifar.py --data fashion-mnist --width 16
    python examples/cifar.py --data cifar10 --folder data/cifar-10-batches-bin --max_epochs 20
    lightning-memmap fit --config examples/configs/cifar.yaml

All images are 3x32x32 bytes and stay bytes until they reach the network: each data device crops
and mirrors the rows that it fetches, a quarter of the bytes of floats moves to the root device, and
the network converts and normalises.

The digits of scikit-learn (BSD licence) and Fashion-MNIST (by Zalando SE, MIT licence; see
`examples.digits.FashionMNIST`) are enlarged to that size. CIFAR-10 (by Krizhevsky, Nair and Hinton)
is read from the unpacked binary version of its files, ``cifar-10-binary.tar.gz`` of
https://www.cs.toronto.edu/~kriz/cifar.html. The python version is pickled: reading it would run
whatever code it contains, so this example does not read it.
"""

from pathlib import Path
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from torch import Tensor, nn
from torch.utils.data import Dataset

from examples.digits import Digits, FashionMNIST, ImageClassifier
from lightning_memmap import MemmapDataModule
from lightning_memmap.callbacks import RunSummary

DataName = Literal["digits", "fashion-mnist", "cifar10"]

#: Rows of each of CIFAR-10's six files.
CIFAR10_ROWS = 10_000
#: A label, then 32 x 32 bytes each for red, green and blue.
CIFAR10_ROW_BYTES = 1 + 3 * 32 * 32


class SmallImages(Dataset[dict[str, Any]]):
    """Colour images of 32x32, of 10 classes.

    A sample is ``{"image": uint8 tensor of shape (3, 32, 32), "label": int from 0 to 9}``. The
    digits are enlarged four times, Fashion-MNIST gets a black border of two pixels, and both have
    three equal colour channels.

    Args:
        split: ``train``, ``val`` or ``test``. The last 5,000 of CIFAR-10's 50,000 training rows
            are ``val``.
        data: Which images.
        folder: Folder of the files of Fashion-MNIST or CIFAR-10; required for CIFAR-10.

    Raises:
        ValueError: An unknown split or data, no folder for CIFAR-10, or a damaged file.
        FileNotFoundError: The files are missing; the message says how to get them.
    """

    def __init__(
        self, split: str, data: DataName = "digits", folder: str | Path | None = None
    ) -> None:
        if data == "cifar10":
            self.images, self.labels = read_cifar10(split, folder)
        elif data == "fashion-mnist":
            fashion = FashionMNIST(split, folder)
            self.images = F.pad(fashion.images, [2] * 4).expand(-1, 3, -1, -1)
            self.labels = fashion.labels
        elif data == "digits":
            digits = Digits(split)
            large = digits.images.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
            self.images = large.expand(-1, 3, -1, -1)
            self.labels = digits.labels
        else:
            raise ValueError(f"data={data!r}: choose one of digits, fashion-mnist, cifar10")

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"image": self.images[row], "label": self.labels[row]}


def read_cifar10(split: str, folder: str | Path | None) -> tuple[Tensor, list[int]]:
    """Read the binary version of CIFAR-10.

    Args:
        split: ``train``, ``val`` or ``test``.
        folder: The folder of ``data_batch_1.bin`` and so on.

    Returns:
        The images, uint8 of shape (B, 3, 32, 32), and their labels.

    Raises:
        ValueError: An unknown split, no folder, or a damaged file.
        FileNotFoundError: The files are missing; the message says how to get them.
    """
    if split not in ("train", "val", "test"):
        raise ValueError(f"split={split!r}: choose one of train, val, test")
    if folder is None:
        raise ValueError(
            "folder=None: name the folder of CIFAR-10's binary version, cifar-10-batches-bin"
        )
    names = ["test_batch"] if split == "test" else [f"data_batch_{i}" for i in range(1, 6)]
    rows = np.concatenate([_read_file(Path(folder), name) for name in names])
    held_out = 0 if split == "test" else len(rows) // 10
    rows = rows[-held_out:] if split == "val" else rows[: len(rows) - held_out]
    images = torch.from_numpy(np.ascontiguousarray(rows[:, 1:])).view(-1, 3, 32, 32)
    return images, rows[:, 0].tolist()


def _read_file(folder: Path, name: str) -> np.ndarray:
    """The rows of one file, uint8 of shape (rows, 1 + 3 * 32 * 32)."""
    path = folder / f"{name}.bin"
    if not path.is_file():
        found = f"; {name} in it is of the python version, which is pickled and not read"
        raise FileNotFoundError(
            f"no {path.name} in {folder}{found if (folder / name).exists() else ''}. Unpack"
            " cifar-10-binary.tar.gz of https://www.cs.toronto.edu/~kriz/cifar.html, and give the"
            " folder cifar-10-batches-bin in it"
        )
    expected = CIFAR10_ROWS * CIFAR10_ROW_BYTES
    if (size := path.stat().st_size) != expected:
        raise ValueError(f"{path} has {size} bytes, expected {expected}: download it again")
    rows = np.fromfile(path, np.uint8).reshape(CIFAR10_ROWS, CIFAR10_ROW_BYTES)
    if (label := rows[:, 0].max()) > 9:
        raise ValueError(f"{path} has the label {label}; there are 10 classes: download it again")
    return rows


class CropAndFlip(nn.Module):
    """Batch transform for training: crop each padded image at random, and mirror half of them.

    Each row is cropped and mirrored independently, all of them in one gather on the data device.

    Args:
        padding: Black pixels added on each side before the image is cropped to its size again.
        flip: Whether to mirror half of the images, left to right.
    """

    def __init__(self, padding: int = 4, flip: bool = True) -> None:
        super().__init__()
        self.padding = padding
        self.flip = flip

    def forward(self, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Transform ``image``, of shape (B, C, H, W) and any dtype, and keep everything else."""
        image = batch["image"]
        rows, channels, height, width = image.shape
        device = image.device
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


class SmallResNet(ImageClassifier):
    """A residual network of nine layers for images of 3x32x32 bytes, of 10 classes.

    Eight convolutions and a linear layer, after David Page's "How to train your ResNet" of 2018.

    Args:
        lr: Highest learning rate, which rises to this value and falls to nearly zero in one cycle.
        width: Channels of the first layer.
        weight_decay: Weight decay of all parameters.
    """

    def __init__(self, lr: float = 0.4, width: int = 64, weight_decay: float = 5e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.weight_decay = weight_decay
        network = nn.Sequential(
            _convolution(3, width),
            _convolution(width, 2 * width, pool=True),
            _Residual(2 * width),
            _convolution(2 * width, 4 * width, pool=True),
            _convolution(4 * width, 8 * width, pool=True),
            _Residual(8 * width),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
            nn.Linear(8 * width, 10),
        )
        # The layout that is fast for convolutions on tensor cores.
        self.network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, image: Tensor) -> Tensor:
        """Logits of shape (B, 10) for uint8 images of shape (B, 3, 32, 32)."""
        scaled = image.contiguous(memory_format=torch.channels_last).float().div_(255)
        # The largest of many activations are large; this makes the first logits small.
        return 0.125 * self.network(scaled.sub_(0.5).div_(0.25))  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        """SGD with Nesterov momentum, and one cycle of the learning rate over all steps."""
        optimizer = torch.optim.SGD(
            self.parameters(),
            lr=self.lr,
            momentum=0.9,
            nesterov=True,
            weight_decay=self.weight_decay,
        )
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            self.lr,
            total_steps=int(self.trainer.estimated_stepping_batches),
            cycle_momentum=False,
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class _Residual(nn.Module):
    """Two convolutions, added to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _convolution(channels, channels), _convolution(channels, channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.layers(x)
        return added


def _convolution(channels_in: int, channels_out: int, pool: bool = False) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
        *([nn.MaxPool2d(2)] if pool else []),
    )


def main(
    data: DataName = "digits",
    folder: str | None = None,
    store_dir: str | None = None,
    devices: int | None = None,
    batch_size: int = 64,
    max_epochs: int = 5,
    lr: float = 0.4,
    width: int = 8,
) -> None:
    """Train with memmap_superbatch, test, and print a summary.

    Args:
        data: Which images.
        folder: Folder of the files of Fashion-MNIST or CIFAR-10.
        store_dir: Directory of the stores, by default stores/cifar- and the name of the data.
        devices: GPUs, by default all; on a CPU logical data devices, by default 2.
        batch_size: Rows per data device and step.
        max_epochs: Epochs to train.
        lr: Highest learning rate.
        width: Channels of the first layer; 64 is the network's full size.
    """
    L.seed_everything(0)
    datamodule = MemmapDataModule(
        *(SmallImages(split, data, folder) for split in ("train", "val", "test")),
        store_dir=store_dir or f"stores/cifar-{data}",
        batch_size=batch_size,
        # The mirror image of a digit is not a digit.
        transform=CropAndFlip(flip=data != "digits"),
    )
    is_on_gpu = torch.cuda.is_available()
    trainer = L.Trainer(
        strategy="memmap_superbatch",
        devices=devices or ("auto" if is_on_gpu else 2),
        max_epochs=max_epochs,
        precision="bf16-mixed" if is_on_gpu and torch.cuda.is_bf16_supported() else "32-true",
        callbacks=[RunSummary()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model = SmallResNet(lr, width)
    trainer.fit(model, datamodule=datamodule)
    trainer.test(model, datamodule=datamodule, verbose=False)


if __name__ == "__main__":
    auto_cli(main)
