"""Classify small grey images: scikit-learn's digits, or Fashion-MNIST.

    python examples/digits.py
    python examples/digits.py --data fashion-mnist --max_epochs 5
    lightning-memmap fit --config examples/configs/digits.yaml

The images are stored once as uint8 and stay resident on the data devices. Random shifts and the
conversion to normalised floats happen later, to each batch, on the data device that fetched it.

The digits (1,797 images of 8x8) come with scikit-learn (BSD licence). Fashion-MNIST (70,000 images
of 28x28, by Zalando SE, MIT licence) is read from a folder; see `FashionMNIST`.
"""

import gzip
import hashlib
import os
import struct
import zlib
from pathlib import Path
from typing import Any, Literal
from urllib.request import urlopen

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_memmap import MemmapDataModule
from lightning_memmap.callbacks import RunSummary

Sample = dict[str, Any]


class Digits(Dataset[Sample]):
    """scikit-learn's digits: 1,257 rows to train on, 270 to validate and 270 to test.

    A sample is ``{"image": uint8 tensor of shape (1, 8, 8), "label": int from 0 to 9}``.

    Args:
        split: ``train``, ``val`` or ``test``.

    Raises:
        ValueError: An unknown split.
    """

    def __init__(self, split: str) -> None:
        bounds = {"train": (0, 1257), "val": (1257, 1527), "test": (1527, 1797)}
        if split not in bounds:
            raise ValueError(f"split={split!r}: choose one of {', '.join(bounds)}")
        digits = load_digits()
        # The file is sorted by writer: after a permutation, every split has all writers.
        rows = np.random.RandomState(0).permutation(len(digits.target))[slice(*bounds[split])]
        # Grey levels are 0 to 16 in the file and 0 to 255 here.
        grey = np.rint(digits.images[rows] * (255 / 16)).astype(np.uint8)
        self.images = torch.from_numpy(grey)[:, None]
        self.labels = digits.target[rows].tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> Sample:
        return {"image": self.images[row], "label": self.labels[row]}


#: The home of Fashion-MNIST and the MD5 sums of its files, both from the README of
#: https://github.com/zalandoresearch/fashion-mnist.
FASHION_MNIST_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
FASHION_MNIST_MD5 = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
#: Where Debian's package dataset-fashion-mnist puts the files.
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")


class FashionMNIST(Dataset[Sample]):
    """Fashion-MNIST: 55,000 rows to train on, 5,000 to validate and 10,000 to test.

    A sample is ``{"image": uint8 tensor of shape (1, 28, 28), "label": int from 0 to 9}``. The
    files are named ``train-images-idx3-ubyte`` and so on, with or without ``.gz``.

    Args:
        split: ``train``, ``val`` (the last 5,000 of the training file) or ``test``.
        folder: Folder of the files, by default that of Debian's package
            ``dataset-fashion-mnist``.
        download: Download missing files into ``folder``, 31 MB in all.

    Raises:
        ValueError: An unknown split, or a file is damaged.
        FileNotFoundError: The files are missing; the message says how to get them.
    """

    def __init__(
        self, split: str, folder: str | Path | None = None, download: bool = False
    ) -> None:
        files = {
            "train": ("train", slice(0, 55_000)),
            "val": ("train", slice(55_000, 60_000)),
            "test": ("t10k", slice(0, 10_000)),
        }
        if split not in files:
            raise ValueError(f"split={split!r}: choose one of {', '.join(files)}")
        if download and folder is None:
            raise ValueError("download=True: name the folder to download to, with folder=...")
        directory = DEBIAN_FOLDER if folder is None else Path(folder)
        prefix, rows = files[split]
        count = 10_000 if prefix == "t10k" else 60_000
        paths = [
            _find_or_download(directory, f"{prefix}-{kind}-ubyte", download)
            for kind in ("images-idx3", "labels-idx1")
        ]
        images, labels = read_idx(paths[0], (count, 28, 28)), read_idx(paths[1], (count,))
        if labels.max() > 9:
            raise ValueError(f"{paths[1]} has the label {labels.max()}; there are 10 classes")
        self.images = torch.from_numpy(images[rows])[:, None]
        self.labels = labels[rows].tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> Sample:
        return {"image": self.images[row], "label": self.labels[row]}


def read_idx(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Read a file of bytes in the idx format of MNIST.

    Two zero bytes, the code of the element type (8 for uint8), the number of dimensions, each
    size as a big-endian 32-bit number, then the elements.

    Args:
        path: The file, compressed if its name ends in ``.gz``.
        shape: Shape of the array that it must hold.

    Returns:
        A uint8 array of that shape.

    Raises:
        ValueError: The file is damaged or holds something else.
    """
    expected = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)
    size = int(np.prod(shape))
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            header = file.read(len(expected))
            # One byte more than expected is enough to see that the file is too long.
            data = file.read(size + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a whole gzip file ({error}): download it again") from error
    if header != expected:
        raise ValueError(
            f"{path} starts with {header.hex(' ')}, but an idx file of {shape} uint8 starts with"
            f" {expected.hex(' ')}: give the right file"
        )
    if len(data) != size:
        found = f"only {len(data)}" if len(data) < size else f"more than {size}"
        raise ValueError(f"{path} has {found} bytes of data, expected {size}: download it again")
    # A copy, since an array over bytes is read-only and torch wants a writable one.
    return np.frombuffer(data, np.uint8).reshape(shape).copy()


def _find_or_download(folder: Path, name: str, download: bool) -> Path:
    packed = folder / f"{name}.gz"
    for path in (packed, folder / name):
        if path.is_file():
            return path
    if not download:
        raise FileNotFoundError(
            f"no {name} or {name}.gz in {folder}. Ways to get it: `apt-get install"
            f" dataset-fashion-mnist` on Debian or Ubuntu puts it into {DEBIAN_FOLDER};"
            " folder=... names another folder that has it; download=True with folder=... downloads"
            f" it from {FASHION_MNIST_URL}"
        )
    url = f"{FASHION_MNIST_URL}/{packed.name}"
    with urlopen(url, timeout=60) as response:
        data: bytes = response.read()
    found, expected = hashlib.md5(data).hexdigest(), FASHION_MNIST_MD5[packed.name]
    if found != expected:
        raise ValueError(f"{url} has the MD5 sum {found}, expected {expected}: it is not kept")
    folder.mkdir(parents=True, exist_ok=True)
    # The file is complete or absent, even when several processes download at once.
    partial = folder / f".{packed.name}.{os.getpid()}"
    partial.write_bytes(data)
    partial.replace(packed)
    return packed


class Normalize(nn.Module):
    """Batch transform: uint8 images to normalised floats.

    Args:
        mean: Mean of the pixels, scaled from 0..255 to 0..1.
        std: Their standard deviation.
    """

    def __init__(self, mean: float, std: float) -> None:
        super().__init__()
        self.mean = mean
        self.std = std

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert ``image``, uint8 of shape (B, C, H, W), to float32 of the same shape."""
        image = batch["image"].float().div_(255).sub_(self.mean).div_(self.std)
        return {**batch, "image": image}


class ShiftAndNormalize(nn.Module):
    """Batch transform for training: shift each image a little, then normalise it.

    Args:
        mean: See `Normalize`.
        std: See `Normalize`.
        max_shift: The most pixels that an image moves in each direction. The uncovered border is
            black.
    """

    def __init__(self, mean: float, std: float, max_shift: int = 1) -> None:
        super().__init__()
        self.normalize = Normalize(mean, std)
        self.max_shift = max_shift

    def forward(self, batch: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        """Transform ``image``, uint8 of shape (B, C, H, W); each row moves independently."""
        image = batch["image"]
        rows, channels, height, width = image.shape
        device = image.device
        shift = torch.randint(
            2 * self.max_shift + 1, (2, rows, 1), generator=generator, device=device
        )
        y = (torch.arange(height, device=device) + shift[0])[:, None, :, None]
        x = (torch.arange(width, device=device) + shift[1])[:, None, None, :]
        row = torch.arange(rows, device=device)[:, None, None, None]
        channel = torch.arange(channels, device=device)[None, :, None, None]
        padded = F.pad(image, [self.max_shift] * 4)
        normalized: dict[str, Tensor] = self.normalize(
            {**batch, "image": padded[row, channel, y, x]}
        )
        return normalized


class ImageClassifier(L.LightningModule):
    """The steps of a classifier of images.

    Subclasses define ``forward`` and ``configure_optimizers``.

    Args:
        num_classes: Number of classes.
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The cross-entropy of a batch, logged as ``train_loss``."""
        loss = F.cross_entropy(self(batch["image"]), batch["label"])
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log ``val_accuracy``."""
        self.val_accuracy(self(batch["image"]), batch["label"])
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log ``test_accuracy``."""
        self.test_accuracy(self(batch["image"]), batch["label"])
        self.log("test_accuracy", self.test_accuracy)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The most likely class of each row, int64 of shape (B,)."""
        return torch.argmax(self(batch["image"]), dim=1)


class DigitsClassifier(ImageClassifier):
    """A small convolutional network for grey images of 10 classes, of any size from 8x8.

    Args:
        lr: Learning rate of Adam.
        width: Channels of the first layer, a multiple of 4.
    """

    def __init__(self, lr: float = 2e-3, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.network = nn.Sequential(
            _convolution(1, width),
            _convolution(width, 2 * width),
            nn.MaxPool2d(2),
            _convolution(2 * width, 2 * width),
            nn.AdaptiveMaxPool2d(4),
            nn.Flatten(),
            nn.Linear(2 * width * 4 * 4, 10),
        )

    def forward(self, image: Tensor) -> Tensor:
        """Logits of shape (B, 10).

        Args:
            image: Shape (B, 1, H, W): normalised floats, or uint8, which is scaled to 0..1.
        """
        if image.dtype == torch.uint8:
            image = image.float() / 255
        logits: Tensor = self.network(image)
        return logits

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def _convolution(channels_in: int, channels_out: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        # Not over the batch: so the result does not depend on which process has which rows.
        nn.GroupNorm(4, channels_out),
        nn.ReLU(),
    )


def main(
    data: Literal["digits", "fashion-mnist"] = "digits",
    folder: str | None = None,
    download: bool = False,
    store_dir: str | None = None,
    devices: int | None = None,
    batch_size: int = 16,
    max_epochs: int = 10,
    lr: float = 2e-3,
) -> None:
    """Train with memmap_superbatch, test, and print a summary.

    Args:
        data: Which images.
        folder: Folder of Fashion-MNIST's files.
        download: Download missing files of Fashion-MNIST into the folder.
        store_dir: Directory of the stores, by default stores/ and the name of the data.
        devices: GPUs, by default all; on a CPU logical data devices, by default 4.
        batch_size: Rows per data device and step.
        max_epochs: Epochs to train.
        lr: Learning rate.
    """
    L.seed_everything(0)
    train, val, test = (
        Digits(split) if data == "digits" else FashionMNIST(split, folder, download)
        for split in ("train", "val", "test")
    )
    mean, std = (0.305, 0.376) if data == "digits" else (0.286, 0.353)
    datamodule = MemmapDataModule(
        train,
        val,
        test,
        store_dir=store_dir or f"stores/{data}",
        batch_size=batch_size,
        transform=ShiftAndNormalize(mean, std),
        eval_transform=Normalize(mean, std),
    )
    trainer = L.Trainer(
        strategy="memmap_superbatch",
        devices=devices or ("auto" if torch.cuda.is_available() else 4),
        max_epochs=max_epochs,
        callbacks=[RunSummary()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model = DigitsClassifier(lr)
    trainer.fit(model, datamodule=datamodule)
    trainer.test(model, datamodule=datamodule, verbose=False)


if __name__ == "__main__":
    auto_cli(main)
