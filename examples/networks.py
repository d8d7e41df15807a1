"""Networks of the examples, and their layers."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def convolution(
    channels_in: int,
    channels_out: int,
    stride: int = 1,
    activation: Callable[[], nn.Module] = nn.ReLU,
) -> nn.Module:
    """Make a convolution with group norm and an activation.

    Args:
        channels_in: Channels of the input.
        channels_out: Channels of the output, a multiple of 4.
        stride: Step of the convolution, in pixels.
        activation: Class of the activation.
    """
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False),
        # Unlike batch norm, the result does not depend on the rows of the same process.
        nn.GroupNorm(4, channels_out),
        activation(),
    )


class UNet(nn.Module):
    """A small U-Net.

    Args:
        channels: Channels of the input.
        width: Channels at full resolution.
    """

    def __init__(self, channels: int = 3, width: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [_block(channels, width), _block(width, 2 * width), _block(2 * width, 4 * width)]
        )
        self.up = nn.ModuleList([_block(6 * width, 2 * width), _block(3 * width, width)])

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        """Compute features at full and at a quarter of the resolution.

        Args:
            image: float32 of shape (B, channels, H, W), H and W divisible by 4.

        Returns:
            Tensors of shape (B, width, H, W) and (B, 4 * width, H / 4, W / 4).
        """
        full = self.down[0](image)
        half = self.down[1](F.max_pool2d(full, 2))
        x = quarter = self.down[2](F.max_pool2d(half, 2))
        for block, skipped in zip(self.up, (half, full), strict=True):
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skipped], dim=1))
        return x, quarter


def _block(channels_in: int, channels_out: int) -> nn.Module:
    return nn.Sequential(_normed(channels_in, channels_out), _normed(channels_out, channels_out))


def _normed(channels_in: int, channels_out: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
    )
