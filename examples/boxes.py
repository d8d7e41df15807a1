"""A metric for predicted boxes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


def iou(first: Tensor, second: Tensor) -> Tensor:
    """Compute the intersection over union of each pair of boxes.

    Args:
        first: Boxes of shape (A, 4): left, top, right, bottom.
        second: Boxes of shape (B, 4).

    Returns:
        Values of shape (A, B).
    """
    corner = torch.maximum(first[:, None, :2], second[None, :, :2])
    opposite = torch.minimum(first[:, None, 2:], second[None, :, 2:])
    common = (opposite - corner).clamp(min=0).prod(2)
    return common / (area(first)[:, None] + area(second)[None] - common)


def area(boxes: Tensor) -> Tensor:
    """Compute the areas of boxes of shape (N, 4)."""
    return (boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(1)


class BoxF1(Metric):
    """The F1 score of predicted objects: 1 if exactly the true objects are predicted.

    A true object counts as predicted if a box of its class has an intersection over union above 0.5
    with its box. Such a box can match only one object, because objects don't overlap.
    """

    full_state_update = False
    num_hits: Tensor
    num_boxes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("num_hits", torch.tensor(0), "sum")
        self.add_state("num_boxes", torch.tensor(0), "sum")

    def update(
        self, predicted: Sequence[dict[str, Tensor]], true: Sequence[dict[str, Tensor]]
    ) -> None:
        """Count a batch.

        Args:
            predicted: For each image, ``box`` of shape (objects, 4) and ``label`` of shape
                (objects,).
            true: ``box`` and ``label`` of the true objects of each image.
        """
        for prediction, target in zip(predicted, true, strict=True):
            is_hit = iou(target["box"], prediction["box"]) > 0.5
            is_hit &= target["label"][:, None] == prediction["label"]
            self.num_hits += is_hit.any(dim=1).sum()
            self.num_boxes += sum(is_hit.shape)

    def compute(self) -> Any:
        """Compute the score, a scalar; 0 without any boxes."""
        return 2 * self.num_hits / self.num_boxes.clamp(min=1)
