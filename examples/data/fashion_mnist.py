"""Fashion-MNIST (by Zalando SE, MIT licence), read from a folder or downloaded into one."""

import gzip
import hashlib
import os
import struct
import zlib
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

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


class FashionMNIST(Dataset[dict[str, Any]]):
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

    def __getitem__(self, row: int) -> dict[str, Any]:
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
    values: NDArray[Any] = np.frombuffer(data, np.uint8).reshape(shape).copy()
    return values


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
