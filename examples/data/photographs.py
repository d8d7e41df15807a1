"""Patches of photographs in PNG files, written once.

scikit-learn ships two photographs (the licences are in its folder ``datasets/images``).
"""

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

from examples.data.folders import atomic_folder
from lightning_memmap import ImageFolder

#: The folders of each split.
CLASSES = ("flower", "flower_turned", "temple", "temple_turned")
_NUM_ROWS = {"train": 2000, "val": 256, "test": 256}
_SIZE = 128


class Photos(ImageFolder):
    """Patches of two photographs, decoded from a PNG file each time one is read.

    A sample is ``{"image": uint8 tensor of shape (3, 128, 128), "label": int from 0 to 3}``. The
    files of a split are ``<split>/<class>/<name>.png``.

    Args:
        split: ``train``, ``val`` or ``test``.
        folder: Folder of the files. `make_photos` makes a split whose folder is missing.
        mode: As of `lightning_memmap.ImageFolder`. With None the store keeps the files as they are.

    Raises:
        ValueError: An unknown split.
    """

    def __init__(
        self, split: str, folder: str | Path = "stores/photos-png", mode: str | None = "RGB"
    ) -> None:
        if split not in _NUM_ROWS:
            raise ValueError(f"split={split!r}: choose one of {', '.join(_NUM_ROWS)}")
        directory = Path(folder) / split
        if not directory.exists():
            seed = list(_NUM_ROWS).index(split)
            make_photos(directory, num_rows=_NUM_ROWS[split], seed=seed)
        super().__init__(directory, mode)


def make_photos(directory: Path, *, num_rows: int, seed: int) -> None:
    """Write patches of scikit-learn's photographs. The same seed makes the same patches.

    Args:
        directory: The folder of one split, with the layout that `Photos` reads.
        num_rows: Number of patches, of all classes alike.
        seed: Seed of the places.
    """
    temple, flower = load_sample_images().images
    rng = np.random.default_rng(seed)
    with atomic_folder(directory) as partial:
        for name in CLASSES:
            (partial / name).mkdir()
        for row in range(num_rows):
            name = CLASSES[row % len(CLASSES)]
            photo = temple if name.startswith("temple") else flower
            y, x = (int(rng.integers(size - _SIZE + 1)) for size in photo.shape[:2])
            patch = photo[y : y + _SIZE, x : x + _SIZE]
            if name.endswith("turned"):
                patch = patch[::-1]
            image = Image.fromarray(np.ascontiguousarray(patch))
            # Written in a third of the time, and read as fast.
            image.save(partial / name / f"{row:04}.png", compress_level=1)
