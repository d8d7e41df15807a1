"""Colour images of 32x32 pixels: CIFAR-10, or smaller images in its size.

CIFAR-10 (by Krizhevsky, Nair and Hinton) is read from the unpacked binary version of its files,
``cifar-10-binary.tar.gz`` of https://www.cs.toronto.edu/~kriz/cifar.html. The python version is
pickled: reading it would run whatever code it contains, so it is not read.
"""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from examples.data.digits import Digits
from examples.data.fashion_mnist import FashionMNIST

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
