"""Augment an image and its mask together: batch transforms of `examples.segmentation`.

They run on the data devices, on whole batches, and each row moves independently of the others.

A ``Compose`` of Albumentations works per sample and on numpy arrays: docs/guides/recipes.md
shows how to use one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ToTraining(nn.Module):
    """Batch transform: stored bytes to the dtypes that the network and the losses need."""

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return images from -1 to 1, masks as int64 of shape (B, H, W), and labels as float32."""
        return {
            "image": batch["image"].float().div_(127.5).sub_(1),
            "mask": batch["mask"][:, 0].long(),
            "striped": batch["striped"].float(),
            "kinds": batch["kinds"].float(),
        }


class MirrorAndTurn(ToTraining):
    """Batch transform for training: mirror and turn each row at random, then convert it.

    Half of the rows are mirrored. Each row is turned by 0, 90, 180 or 270 degrees and by a small
    free angle. Image and mask are sampled at the same points: the image is interpolated, and the
    mask, whose classes cannot be mixed, takes the nearest pixel. Reflection fills the border.

    Args:
        max_degrees: Largest free angle in either direction, in degrees.
    """

    def __init__(self, max_degrees: float = 10.0) -> None:
        super().__init__()
        self.max_degrees = max_degrees

    def forward(  # type: ignore[override]  # a generator makes a transform random
        self, batch: dict[str, Tensor], generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Move ``image`` and ``mask``, then convert the batch as `ToTraining` does."""
        image = batch["image"].float()
        mask = batch["mask"].float()
        rows, _, height, width = image.shape
        chance = torch.rand(3, rows, generator=generator, device=image.device)
        mirror = torch.where(chance[0] < 0.5, -1.0, 1.0)
        quarters = (chance[1] * 4).floor() * (torch.pi / 2)
        angle = quarters + torch.deg2rad((chance[2] * 2 - 1) * self.max_degrees)
        # Maps points of the result to points of the input; both axes run from -1 to 1.
        cos = angle.cos()
        sin = angle.sin()
        zero = torch.zeros_like(angle)
        to_x = torch.stack([mirror * cos, -mirror * sin * (height / width), zero], dim=1)
        to_y = torch.stack([sin * (width / height), cos, zero], dim=1)
        turn = torch.stack([to_x, to_y], dim=1)
        points = F.affine_grid(turn, list(image.shape), align_corners=False)
        moved = {
            name: F.grid_sample(pixels, points, mode, "reflection", align_corners=False)
            for name, pixels, mode in (("image", image, "bilinear"), ("mask", mask, "nearest"))
        }
        return super().forward({**batch, **moved})
