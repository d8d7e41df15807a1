"""How well boxes were found."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


def iou(first: Tensor, second: Tensor) -> Tensor:
    """Intersections over unions.

    Args:
        first: Boxes of shape (A, 4): left, top, right, bottom.
        second: Boxes of shape (B, 4).

    Returns:
        Those of each box with each, of shape (A, B).
    """
    first, second = first[:, None], second[None]
    corner = torch.maximum(first[..., :2], second[..., :2])
    common = (torch.minimum(first[..., 2:], second[..., 2:]) - corner).clamp(min=0).prod(2)
    areas = [(boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(2) for boxes in (first, second)]
    return common / (areas[0] + areas[1] - common)


class BoxF1(Metric):
    """The F1 score of found objects: 1 if each is found, in the right class, and nothing else.

    An object is found if the intersection over union of a box of its class and its own is above
    0.5. Such a box can belong to one object only, as long as the objects do not overlap.
    """

    full_state_update = False
    num_hits: Tensor
    num_boxes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("num_hits", torch.tensor(0), "sum")
        self.add_state("num_boxes", torch.tensor(0), "sum")

    def update(self, found: Sequence[dict[str, Tensor]], true: Sequence[dict[str, Tensor]]) -> None:
        """Count a batch.

        Args:
            found: For each image, ``box`` of shape (found, 4) and ``label`` of shape (found,).
            true: The same of the objects that are there.
        """
        for given, wanted in zip(found, true, strict=True):
            is_hit = iou(wanted["box"], given["box"]) > 0.5
            is_hit &= wanted["label"][:, None] == given["label"]
            self.num_hits += is_hit.any(dim=1).sum()
            self.num_boxes += sum(is_hit.shape)

    def compute(self) -> Any:
        """The score, a scalar; 0 where there are no boxes at all."""
        return 2 * self.num_hits / self.num_boxes.clamp(min=1)
