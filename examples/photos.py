"""Classify patches of photographs that lie in PNG files.

    python examples/photos.py
    lightning-memmap fit --config examples/configs/photos.yaml
    lightning-memmap compare --config examples/configs/photos.yaml

This is the usual case of training that waits for data: decoding a file takes longer than training
on it. A DataLoader decodes every file again in every epoch. A store has them decoded, once, and
what is left to each epoch is the augmentation: crop, mirror, normalise. Where the decoded images
do not fit, ``encoded=True`` keeps the files, which threads decode while the model trains.

scikit-learn ships two photographs (the licences are in its folder ``datasets/images``). The rows
are patches of them at random places, and the classes are the photograph and whether the patch is
upside down.
"""

from pathlib import Path

import lightning as L
import numpy as np
import torch
from jsonargparse import auto_cli
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

from examples.digits import ImageClassifier
from examples.folders import made_at_once
from lightning_memmap import ImageFolder, MemmapDataModule
from lightning_memmap.callbacks import RunSummary

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
    """Write patches of scikit-learn's photographs. The same seed gives the same patches.

    Args:
        directory: The folder of one split, with the layout that `Photos` reads.
        num_rows: Number of patches, of all classes alike.
        seed: Seed of the places.
    """
    temple, flower = load_sample_images().images
    rng = np.random.default_rng(seed)
    with made_at_once(directory) as made:
        for name in CLASSES:
            (made / name).mkdir()
        for row in range(num_rows):
            name = CLASSES[row % len(CLASSES)]
            photo = temple if name.startswith("temple") else flower
            y, x = (int(rng.integers(size - _SIZE + 1)) for size in photo.shape[:2])
            patch = photo[y : y + _SIZE, x : x + _SIZE]
            if name.endswith("turned"):
                patch = patch[::-1]
            image = Image.fromarray(np.ascontiguousarray(patch))
            # Written in a third of the time, and read as fast.
            image.save(made / name / f"{row:04}.png", compress_level=1)


class CropAndNormalize(nn.Module):
    """Batch transform: crop the middle of each image, and normalise it.

    Args:
        size: Height and width of a crop.
    """

    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.size = size

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Turn ``image``, uint8 of (B, C, H, W), into float32 of (B, C, size, size)."""
        height, width = batch["image"].shape[2:]
        y, x = (height - self.size) // 2, (width - self.size) // 2
        crop = batch["image"][:, :, y : y + self.size, x : x + self.size]
        return {**batch, "image": self.normalize(crop)}

    def normalize(self, image: Tensor) -> Tensor:
        """Convert bytes to float32 numbers from -2 to 2."""
        return image.float().sub_(127.5).div_(64)


class RandomCropAndFlip(CropAndNormalize):
    """Batch transform for training: crop each image at random, mirror half of them, normalise.

    Args:
        size: Height and width of a crop.
    """

    def forward(  # type: ignore[override]  # a generator makes a transform random
        self, batch: dict[str, Tensor], generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Transform ``image`` as `CropAndNormalize`, each row at a place of its own."""
        image = batch["image"]
        rows, _, height, width = image.shape
        drawn = torch.rand(3, rows, generator=generator, device=image.device)
        y = (drawn[0] * (height - self.size + 1)).long()
        x = (drawn[1] * (width - self.size + 1)).long()
        # A view of every possible crop, of which one is copied for each row.
        crops = image.unfold(2, self.size, 1).unfold(3, self.size, 1)
        chosen = crops[torch.arange(rows, device=image.device), :, y, x]
        mirrored = (drawn[2] < 0.5)[:, None, None, None]
        chosen = torch.where(mirrored, chosen.flip(-1), chosen)
        return {**batch, "image": self.normalize(chosen)}


class PhotoClassifier(ImageClassifier):
    """A small convolutional network for images of three channels and four classes.

    Args:
        lr: Learning rate of Adam.
        width: Channels of the first layer, a multiple of 4.
    """

    def __init__(self, lr: float = 2e-3, width: int = 16) -> None:
        super().__init__(len(CLASSES))
        self.save_hyperparameters()
        self.lr = lr
        self.network = nn.Sequential(
            _convolution(3, width),
            _convolution(width, 2 * width),
            _convolution(2 * width, 4 * width),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(4 * width * 4 * 4, len(CLASSES)),
        )

    def forward(self, image: Tensor) -> Tensor:
        """Logits of shape (B, 4) for normalised images of shape (B, 3, H, W)."""
        logits: Tensor = self.network(image)
        return logits

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def _convolution(channels_in: int, channels_out: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride=2, padding=1, bias=False),
        # Not over the batch: so the result does not depend on which process has which rows.
        nn.GroupNorm(4, channels_out),
        # Smooth: in a patch of plain sky, rounding would move all pixels over the edge of a ReLU.
        nn.SiLU(),
    )


def main(
    folder: str = "stores/photos-png",
    store_dir: str = "stores/photos",
    devices: int | None = None,
    batch_size: int = 32,
    max_epochs: int = 5,
    lr: float = 2e-3,
    encoded: bool = False,
) -> None:
    """Train with memmap_superbatch, test, and print a summary.

    Args:
        folder: Folder of the PNG files; missing ones are made.
        store_dir: Directory of the stores.
        devices: GPUs, by default all; on a CPU logical data devices, by default 2.
        batch_size: Rows per data device and step.
        max_epochs: Epochs to train.
        lr: Learning rate.
        encoded: Keep the images encoded in the stores. Then choose another ``store_dir``.
    """
    L.seed_everything(0)
    datamodule = MemmapDataModule(
        *(Photos(split, folder, None if encoded else "RGB") for split in _NUM_ROWS),
        store_dir=store_dir,
        batch_size=batch_size,
        transform=RandomCropAndFlip(),
        eval_transform=CropAndNormalize(),
        variable={"image": "decode"} if encoded else None,
    )
    trainer = L.Trainer(
        strategy="memmap_superbatch",
        devices=devices or ("auto" if torch.cuda.is_available() else 2),
        max_epochs=max_epochs,
        callbacks=[RunSummary()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model = PhotoClassifier(lr)
    trainer.fit(model, datamodule=datamodule)
    trainer.test(model, datamodule=datamodule, verbose=False)


if __name__ == "__main__":
    auto_cli(main)
