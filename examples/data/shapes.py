"""Synthetic images with masks and labels in PNG files: one or two circles, crosses and triangles on
a noisy background, striped or not. No small public set has all four fields.
"""

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch.utils.data import Dataset

from examples.data.folders import atomic_folder

#: Class ``k + 1`` of a mask is ``KINDS[k]``; class 0 is the background.
KINDS = ("circle", "cross", "triangle")
_NUM_ROWS = {"train": 640, "val": 128, "test": 128}
_SIZE = 32
#: How far each corner of a shape is from its center, in radii.
_REACH = {"circle": [1.0] * 32, "cross": [1.0, 1.0, 0.4] * 4, "triangle": [1.0] * 3}


class Shapes(Dataset[dict[str, Any]]):
    """Images with masks and labels, from PNG files.

    A sample is ``{"image": RGB image, "mask": grey image, "striped": bool, "kinds": uint8 tensor
    of shape (3,)}``; stored, the images become uint8 of shape (3, H, W) and (1, H, W). The files
    of a split are ``<split>/images/<name>.png``, ``<split>/masks/<name>.png`` with the class of
    each pixel, and ``<split>/labels.csv`` with the columns ``name, striped, circle, cross,
    triangle``.

    Args:
        split: ``train``, ``val`` or ``test``.
        folder: Folder of the files. `make_shapes` makes a split whose folder is missing.

    Raises:
        ValueError: An unknown split.
    """

    def __init__(self, split: str, folder: str | Path = "stores/segmentation-png") -> None:
        if split not in _NUM_ROWS:
            raise ValueError(f"split={split!r}: choose one of {', '.join(_NUM_ROWS)}")
        self.directory = Path(folder) / split
        if not self.directory.exists():
            seed = list(_NUM_ROWS).index(split)
            make_shapes(self.directory, num_rows=_NUM_ROWS[split], seed=seed)
        with open(self.directory / "labels.csv", newline="", encoding="utf-8") as file:
            self.labels = list(csv.DictReader(file))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> dict[str, Any]:
        labels = self.labels[row]
        name = f"{labels['name']}.png"
        with Image.open(self.directory / "images" / name) as file:
            image = file.convert("RGB")
        with Image.open(self.directory / "masks" / name) as file:
            if file.mode not in ("L", "P"):
                raise ValueError(
                    f"the mask {name} has mode {file.mode}; it needs a class index per pixel (L, P)"
                )
            mask = torch.from_numpy(np.array(file))[None]
        kinds = torch.tensor([int(labels[kind]) for kind in KINDS], dtype=torch.uint8)
        return {"image": image, "mask": mask, "striped": labels["striped"] == "1", "kinds": kinds}


def make_shapes(directory: Path, *, num_rows: int, seed: int) -> None:
    """Make synthetic images with masks and labels. The same seed makes the same images.

    Args:
        directory: The folder of one split, with the layout that `Shapes` reads.
        num_rows: Number of images.
        seed: Seed of all random numbers.
    """
    rng = np.random.default_rng(seed)
    with atomic_folder(directory) as partial:
        for kind in ("images", "masks"):
            (partial / kind).mkdir()
        with open(partial / "labels.csv", "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["name", "striped", *KINDS])
            for row in range(num_rows):
                striped = bool(rng.random() < 0.5)
                image, mask = _draw(rng, striped)
                image.save(partial / "images" / f"{row:04}.png")
                mask.save(partial / "masks" / f"{row:04}.png")
                visible = set(np.unique(np.array(mask)).tolist())
                present = [int(index in visible) for index in range(1, len(KINDS) + 1)]
                writer.writerow([f"{row:04}", int(striped), *present])


def _draw(rng: np.random.Generator, striped: bool) -> tuple[Image.Image, Image.Image]:
    """Draw one RGB image and its mask."""
    base = rng.uniform(80, 170, 3)
    background = base + rng.normal(0, 20, (_SIZE, _SIZE, 3))
    if striped:
        y, x = np.mgrid[:_SIZE, :_SIZE]
        angle = rng.uniform(0, math.pi)
        wave = np.sin((x * math.cos(angle) + y * math.sin(angle)) * 2 * math.pi / 6)
        background += 45 * wave[..., None]
    image = Image.fromarray(background.clip(0, 255).astype(np.uint8))
    mask = Image.new("L", image.size)
    for _ in range(rng.integers(1, 3)):
        kind = int(rng.integers(len(KINDS)))
        radius = rng.uniform(6, 10)
        center = rng.uniform(radius, _SIZE - radius, 2)
        # Far from the background in each channel.
        color = tuple(((base + rng.uniform(100, 155, 3)) % 256).astype(int).tolist())
        reach = np.array(_REACH[KINDS[kind]])[:, None]
        angles = 2 * math.pi * (rng.random() + np.arange(len(reach)) / len(reach))
        directions = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        corners = center + radius * reach * directions
        outline = [(float(x), float(y)) for x, y in corners]
        ImageDraw.Draw(image).polygon(outline, fill=color)
        ImageDraw.Draw(mask).polygon(outline, fill=kind + 1)
    return image, mask
