"""A folder of images, in which the folder of an image is its class."""

import operator
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_memmap.images import EXTENSIONS, ImageError, decode_image, parse_decoding
from lightning_memmap.store.paths import local_path


class ImageFolder(Dataset[dict[str, Any]]):
    """A map-style dataset of the images in ``root/CLASS/**``, with the class as the label.

    A sample is ``{"image": ..., "label": int}``: the image as uint8 tensor of shape (channels,
    height, width), or the bytes of its file. Classes are the folders in ``root``, sorted by name.
    The images of a class, deeper folders included, are sorted by name. Hidden files and folders,
    and files with other endings than `lightning_memmap.images.EXTENSIONS`, are skipped.

    Args:
        root: The folder of the classes.
        mode: ``"RGB"``, ``"RGBA"`` or ``"L"``, as for `lightning_memmap.schema.Decode`.
            With None, samples have the bytes of each file, which must be decodable.
        size: Height and width in pixels, or one number for both, as for `Decode`. By default,
            images keep their sizes.

    Attributes:
        classes: The names of the classes, by label. A store of this dataset has them as well.
        files: The file of each row, relative to ``root``.
        labels: The label of each row.

    Raises:
        FileNotFoundError: The folder doesn't exist.
        ValueError: It has no folders, a class has no images, or an argument is out of range.
    """

    def __init__(
        self, root: str | Path, mode: str | None = "RGB", size: int | tuple[int, int] | None = None
    ) -> None:
        self.root = local_path(root)
        self.mode = mode
        self.size = parse_decoding(mode, size)
        if not self.root.is_dir():
            raise FileNotFoundError(f"root={str(root)!r}: there is no such folder")
        self.classes = sorted(
            entry.name
            for entry in os.scandir(self.root)
            if entry.is_dir() and not entry.name.startswith(".")
        )
        if not self.classes:
            raise ValueError(f"root={str(root)!r}: it has no folders, one for each class")
        self.files: list[str] = []
        self.labels: list[int] = []
        for label, name in enumerate(self.classes):
            files = [os.path.relpath(path, self.root) for path in _images_in(self.root / name)]
            if not files:
                raise ValueError(
                    f"root={str(root)!r}: class {name!r} has no images ({', '.join(EXTENSIONS)}):"
                    " remove the folder, or put images there"
                )
            self.files += files
            self.labels += [label] * len(files)

    def file_states(self) -> NDArray[np.int64]:
        """Return the size in bytes and the time in ns of each file, int64 of shape (rows, 2).

        Both are -1 for a missing file.
        """
        states = np.full((len(self.files), 2), -1, np.int64)
        for row, file in enumerate(self.files):
            with suppress(FileNotFoundError, NotADirectoryError):
                state = os.stat(self.root / file)
                states[row] = state.st_size, state.st_mtime_ns
        return states

    def __len__(self) -> int:
        return len(self.files)

    @override
    def __getitem__(self, row: int) -> dict[str, Any]:
        """Read an image.

        Args:
            row: The row.

        Raises:
            IndexError: The row is out of range.
            ImageError: The file cannot be decoded. The message names it.
            OSError: It cannot be read.
        """
        file = self.files[operator.index(row)]
        data = (self.root / file).read_bytes()
        try:
            pixels = decode_image(data, self.mode or "RGB", self.size)
        except ImageError as error:
            raise ImageError(f"{self.root / file}: {error}: repair or remove the file") from error
        image = data if self.mode is None else torch.from_numpy(np.array(pixels, order="C"))
        return {"image": image, "label": self.labels[row]}


def _images_in(folder: Path) -> Iterator[str]:
    for path, folders, files in os.walk(folder, onerror=_raise):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith(".") and name.lower().endswith(EXTENSIONS):
                yield os.path.join(path, name)


def _raise(error: OSError) -> NoReturn:
    raise error  # Otherwise the images of a folder that cannot be listed would be skipped.
