"""Batch transforms for images, with random numbers for each row.

Each one is a callable of a batch and a `RowRandom`, and an example of how to write one. They change
some fields of a batch that is a dict and copy nothing else. Chain them with `Compose`::

    transform = Compose([RandomCrop(padding=4), RandomFlip(), Cutout(8)])

`MixUp` and `CutMix` mix the rows of a batch, so they belong in `lightning_memmap.OnSuperBatch`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from lightning_memmap.errors import check_integer
from lightning_memmap.loading.row_random import RowRandom
from lightning_memmap.loading.transform import OnSuperBatch, check_callable, has_parameter

__all__ = ["ColorJitter", "Compose", "CutMix", "Cutout", "MixUp", "RandomCrop", "RandomFlip"]

#: Weights of red, green and blue in a grey value (ITU-R BT.601).
_GREY = 0.299, 0.587, 0.114


class Compose:
    """Runs batch transforms in order.

    Args:
        transforms: Callables or modules that map a batch to a batch. Those with a parameter
            ``random`` receive the same `RowRandom`, so each of its calls has other numbers.

    Raises:
        TypeError: A transform can't be called.
        ValueError: A transform has a parameter ``generator``, or is an `OnSuperBatch`.
    """

    def __init__(self, transforms: Sequence[Callable[..., Any]]) -> None:
        for transform in transforms:
            check_callable("transforms", transform)
            if isinstance(transform, OnSuperBatch):
                raise ValueError(
                    "transforms: OnSuperBatch has no effect inside of Compose: wrap the whole,"
                    " OnSuperBatch(Compose([...]))"
                )
            if has_parameter(transform, "generator"):
                raise ValueError(
                    f"transforms: {transform!r} has a parameter generator, which Compose doesn't"
                    " pass: use a parameter random"
                )
        self.transforms = [
            (transform, has_parameter(transform, "random")) for transform in transforms
        ]

    def __call__(self, batch: Any, random: RowRandom) -> Any:
        """Transform a batch of B rows."""
        for transform, takes_random in self.transforms:
            batch = transform(batch, random=random) if takes_random else transform(batch)
        return batch


class RandomCrop:
    """Crops each image at a random place, after padding it with zeros.

    All ``fields`` of a row, such as an image and its mask, are cropped at the same place.

    Args:
        size: Height and width of the crops, or one number for both; by default the size of the
            images.
        padding: Pixels added on all four sides.
        fields: Keys of the images in a batch: tensors of shape (B, C, H, W).

    Raises:
        ValueError: A size or the padding is out of range, or a field isn't (B, C, H, W).
    """

    def __init__(
        self,
        size: int | tuple[int, int] | None = None,
        padding: int = 0,
        fields: str | Sequence[str] = ("image",),
    ) -> None:
        self.size = None if size is None else _parse_size(size)
        self.padding = check_integer("padding", padding, 0, "0 pixels or more")
        self.fields = _parse_fields(fields)

    def __call__(self, batch: Mapping[str, Any], random: RowRandom) -> dict[str, Any]:
        """Crop the images of a batch of B rows."""
        images = {name: _image(self, batch, name) for name in self.fields}
        height, width = images[self.fields[0]].shape[-2:]
        rows, columns = self.size or (height, width)
        spare = height + 2 * self.padding - rows, width + 2 * self.padding - columns
        if min(spare) < 0:
            raise ValueError(
                f"RandomCrop(size={self.size}, padding={self.padding}): images of {height} x"
                f" {width} pixels are too small: choose a smaller size"
            )
        top, left = (random.randint(high=side + 1) for side in spare)
        every = torch.arange(len(top), device=top.device)
        cropped = {}
        for name, image in images.items():
            padded = F.pad(image, (self.padding,) * 4)
            # A view of all crops, of shape (B, C, spare rows + 1, spare columns + 1, *size).
            crops = padded.unfold(2, rows, 1).unfold(3, columns, 1)
            cropped[name] = crops[every, :, top, left]
        return {**batch, **cropped}


class RandomFlip:
    """Mirrors each image with a probability.

    Args:
        p: The probability.
        fields: Keys of the images in a batch: tensors of shape (B, ..., H, W), or (B, ..., W) for
            ``dim=-1``.
        dim: The dimension to mirror along: -1 mirrors left and right, -2 top and bottom.

    Raises:
        ValueError: ``p`` isn't in [0, 1], or ``dim`` is neither -1 nor -2.
    """

    def __init__(
        self, p: float = 0.5, fields: str | Sequence[str] = ("image",), dim: int = -1
    ) -> None:
        if dim not in (-1, -2):
            raise ValueError(f"dim={dim}: choose -1 (left and right) or -2 (top and bottom)")
        self.p = _check_probability(p)
        self.fields = _parse_fields(fields)
        self.dim = dim

    def __call__(self, batch: Mapping[str, Any], random: RowRandom) -> dict[str, Any]:
        """Mirror some images of a batch of B rows."""
        chosen = random.bernoulli(p=self.p)
        flipped = {}
        for name in self.fields:
            image = _tensor(self, batch, name)
            if image.ndim <= -self.dim:
                raise ValueError(
                    f"RandomFlip: the field {name!r} has the shape {tuple(image.shape)}, and"
                    f" dim={self.dim} is its rows: choose another field or dim"
                )
            flipped[name] = torch.where(_beside(chosen, image), image.flip(self.dim), image)
        return {**batch, **flipped}


class Cutout:
    """Fills a square at a random place of each image (DeVries and Taylor 2017).

    The centre is any pixel of the image, so a part of the square may be outside of it.

    Args:
        size: Height and width of the square in pixels.
        field: Key of the images in a batch: a tensor of shape (B, C, H, W).
        value: Value of the filled pixels.
        p: The probability that an image is changed.

    Raises:
        ValueError: ``size`` is below 1, or ``p`` isn't in [0, 1].
    """

    def __init__(self, size: int, field: str = "image", value: float = 0.0, p: float = 1.0) -> None:
        self.size = check_integer("size", size, 1, "at least 1 pixel")
        self.field = field
        self.value = value
        self.p = _check_probability(p)

    def __call__(self, batch: Mapping[str, Any], random: RowRandom) -> dict[str, Any]:
        """Fill a square in the images of a batch of B rows."""
        image = _image(self, batch, self.field)
        height, width = image.shape[-2:]
        top = random.randint(high=height) - self.size // 2
        left = random.randint(high=width) - self.size // 2
        size = torch.where(random.bernoulli(p=self.p), self.size, 0)
        inside = _box(top, left, top + size, left + size, height, width)
        return {**batch, self.field: image.masked_fill(inside[:, None], self.value)}


class ColorJitter:
    """Changes brightness, contrast and saturation of each image, in this order.

    Each factor is drawn uniformly from ``[max(0, 1 - amount), 1 + amount)``. An image is blended by
    it with black, with its mean grey value, and with its own grey values.

    Args:
        brightness: Amount for brightness, 0 or greater.
        contrast: Amount for contrast.
        saturation: Amount for saturation; needs images with 3 channels.
        field: Key of the images in a batch: a tensor of shape (B, C, H, W), uint8 from 0 to 255
            or floating from 0 to 1. Values are clamped to that range, and the dtype stays.

    Raises:
        ValueError: An amount is negative, or the first batch has floating images far outside of
            the range from 0 to 1. (torchvision and Kornia clamp these.)
    """

    def __init__(
        self,
        brightness: float = 0.0,
        contrast: float = 0.0,
        saturation: float = 0.0,
        field: str = "image",
    ) -> None:
        amounts = {"brightness": brightness, "contrast": contrast, "saturation": saturation}
        for name, amount in amounts.items():
            if not amount >= 0:
                raise ValueError(f"{name}={amount}: pass 0 or more")
        self.amounts = tuple(amounts.values())
        self.field = field
        self._is_checked = False

    def __call__(self, batch: Mapping[str, Any], random: RowRandom) -> dict[str, Any]:
        """Change the colours of the images of a batch of B rows."""
        image = _image(self, batch, self.field)
        if image.dtype != torch.uint8 and not image.is_floating_point():
            raise ValueError(
                f"ColorJitter: the field {self.field!r} is {image.dtype}: pass uint8 images from 0"
                " to 255, or floating ones from 0 to 1"
            )
        if self.amounts[2] and image.shape[1] != len(_GREY):
            raise ValueError(
                f"ColorJitter: saturation needs 3 channels, and the field {self.field!r} has"
                f" {image.shape[1]}: pass saturation=0"
            )
        if not self._is_checked:
            # Once, because it waits for the device.
            self._check_range(image)
        largest = 1.0 if image.is_floating_point() else 255.0
        changed = image.float()
        brightness, contrast, saturation = (
            random.uniform(low=max(0.0, 1 - amount), high=1 + amount)[:, None, None, None]
            for amount in self.amounts
        )
        if self.amounts[0]:
            changed = (changed * brightness).clamp_(0, largest)
        if self.amounts[1]:
            mean = _grey(changed).mean((-2, -1), keepdim=True)
            changed = torch.lerp(mean, changed, contrast).clamp_(0, largest)
        if self.amounts[2]:
            changed = torch.lerp(_grey(changed), changed, saturation).clamp_(0, largest)
        if not image.is_floating_point():
            changed = changed.round_()
        return {**batch, self.field: changed.to(image.dtype)}

    def _check_range(self, image: Tensor) -> None:
        """Raise for floating images that are not from 0 to 1, such as from 0 to 255."""
        self._is_checked = image.numel() > 0
        if not image.is_floating_point() or not image.numel():
            return
        low, high = (bound.item() for bound in image.aminmax())
        # Resampled images exceed the range a little.
        if low < -1 or high > 2:
            raise ValueError(
                f"ColorJitter: the field {self.field!r} has values from {low:.3g} to {high:.3g}:"
                " pass floating images from 0 to 1, such as image / 255, before they are"
                " normalised, or uint8 images"
            )


class _Mix(ABC):
    """Mixes each row with another row of the batch, and their targets by the same weight."""

    def __init__(
        self,
        num_classes: int | None = None,
        alpha: float = 1.0,
        field: str = "image",
        target: str = "label",
    ) -> None:
        if not alpha > 0:
            raise ValueError(f"alpha={alpha}: pass a number above 0")
        if num_classes is not None:
            check_integer("num_classes", num_classes, 1, "at least 1 class")
        self.num_classes = num_classes
        self.alpha = alpha
        self.field = field
        self.target = target

    def __call__(self, batch: Mapping[str, Any], random: RowRandom) -> dict[str, Any]:
        """Mix the rows of a batch.

        Args:
            batch: ``field`` holds images, and ``target`` classes, integers of shape (B,), or
                floating targets of shape (B, ...).
            random: Random numbers of the rows.

        Returns:
            The batch with mixed rows and targets: with ``num_classes``, targets are probabilities,
            float32 of shape (B, num_classes).
        """
        image = self._checked_image(batch)
        partner = _partners(random)
        mixed, weight = self._mixed(image, image[partner], random)
        target = _tensor(self, batch, self.target)
        if self.num_classes is not None:
            if target.is_floating_point():
                raise ValueError(
                    f"{type(self).__name__}: targets {self.target!r} are {target.dtype}, not"
                    " classes: leave out num_classes"
                )
            target = F.one_hot(target.long(), self.num_classes).float()
        if not target.is_floating_point():
            raise ValueError(
                f"{type(self).__name__}: targets {self.target!r} are {target.dtype}, which can't be"
                " mixed: pass num_classes for classes"
            )
        share = _beside(weight, target)
        target = torch.lerp(target[partner], target, share.to(target.dtype))
        return {**batch, self.field: mixed, self.target: target}

    def _checked_image(self, batch: Mapping[str, Any]) -> Tensor:
        """Return the images of a batch, if they can be mixed."""
        return _image(self, batch, self.field)

    @abstractmethod
    def _mixed(self, image: Tensor, other: Tensor, random: RowRandom) -> tuple[Tensor, Tensor]:
        """Mix images, and return the weight of the first ones, float32 of shape (B,)."""


class MixUp(_Mix):
    """Blends each image with another one of the batch, and their targets (Zhang et al. 2018).

    The weight of each row is drawn from Beta(alpha, alpha). Its partner is the next row in a random
    order of the rows of the batch. Run it in `OnSuperBatch`, so that these are the rows of all
    data devices. Processes mix the rows that they have, so partners depend on their number.

    Args:
        num_classes: Number of classes, where targets are classes; None for floating targets.
        alpha: Parameter of the Beta distribution, above 0.
        field: Key of the images in a batch: a floating tensor of shape (B, ...).
        target: Key of the targets.

    Raises:
        ValueError: ``alpha`` or ``num_classes`` is out of range.
    """

    @override
    def _checked_image(self, batch: Mapping[str, Any]) -> Tensor:
        image = _tensor(self, batch, self.field)
        if not image.is_floating_point():
            raise ValueError(
                f"MixUp: the field {self.field!r} is {image.dtype}, which can't be blended: convert"
                " it to a floating dtype first"
            )
        return image

    @override
    def _mixed(self, image: Tensor, other: Tensor, random: RowRandom) -> tuple[Tensor, Tensor]:
        weight = _symmetric_beta(random, self.alpha)
        return torch.lerp(other, image, _beside(weight, image).to(image.dtype)), weight


class CutMix(_Mix):
    """Pastes a box of another image of the batch into each image (Yun et al. 2019).

    The box covers ``1 - w`` of the image, with ``w`` drawn from Beta(alpha, alpha), before it is
    cut off at the border. Targets are mixed by the area that is left. For the partner of a row,
    see `MixUp`.

    Args:
        num_classes: Number of classes, where targets are classes; None for floating targets.
        alpha: Parameter of the Beta distribution, above 0.
        field: Key of the images in a batch: a tensor of shape (B, C, H, W).
        target: Key of the targets.

    Raises:
        ValueError: ``alpha`` or ``num_classes`` is out of range.
    """

    @override
    def _mixed(self, image: Tensor, other: Tensor, random: RowRandom) -> tuple[Tensor, Tensor]:
        height, width = image.shape[-2:]
        side = (1 - _symmetric_beta(random, self.alpha)).sqrt()
        bounds = []
        for length in (height, width):
            centre = random.randint(high=length)
            half = (side * length / 2).long()
            bounds += [(centre - half).clamp(min=0), (centre + half).clamp(max=length)]
        top, bottom, left, right = bounds
        inside = _box(top, left, bottom, right, height, width)
        weight = 1 - (bottom - top) * (right - left) / (height * width)
        return torch.where(inside[:, None], other, image), weight


def _parse_size(size: int | Sequence[int]) -> tuple[int, int]:
    sides = (size, size) if isinstance(size, int) else tuple(size)
    if len(sides) != 2:
        raise ValueError(f"size={size!r}: pass the height and the width, or one number for both")
    height, width = (check_integer("size", side, 1, "at least 1 pixel") for side in sides)
    return height, width


def _parse_fields(fields: str | Sequence[str]) -> tuple[str, ...]:
    return (fields,) if isinstance(fields, str) else tuple(fields)


def _tensor(transform: object, batch: Any, name: str) -> Tensor:
    """Return a field of a batch that is a dict of tensors."""
    kind = type(transform).__name__
    if not isinstance(batch, Mapping) and not hasattr(batch, "keys"):
        raise TypeError(
            f"{kind}: the batch is a {type(batch).__name__}: return dicts from the dataset, such as"
            f" {{{name!r}: ...}}"
        )
    if name not in batch.keys():  # noqa: SIM118  # of a TensorDict
        raise ValueError(f"{kind}: the batch has no field {name!r}: choose of {[*batch.keys()]}")
    value = batch[name]
    if not isinstance(value, Tensor):
        raise TypeError(f"{kind}: the field {name!r} is a {type(value).__name__}: pass a tensor")
    return value


def _image(transform: object, batch: Any, name: str) -> Tensor:
    """Return a field of a batch that is of shape (B, C, H, W)."""
    image = _tensor(transform, batch, name)
    if image.ndim != 4:
        raise ValueError(
            f"{type(transform).__name__}: the field {name!r} has the shape {tuple(image.shape)}:"
            " it must be (B, C, H, W); use unsqueeze(1) for images without a channel dimension"
        )
    return image


def _check_probability(p: float) -> float:
    if not 0 <= p <= 1:
        raise ValueError(f"p={p}: pass a probability from 0 to 1")
    return p


def _beside(values: Tensor, tensor: Tensor) -> Tensor:
    """Reshape one value per row so that it broadcasts to a tensor of rows."""
    return values.view(-1, *[1] * (tensor.ndim - 1))


def _grey(image: Tensor) -> Tensor:
    """Convert images of shape (B, C, H, W) to grey values, of shape (B, 1, H, W)."""
    if image.shape[1] == 1:
        return image
    weights = torch.tensor(_GREY, dtype=image.dtype, device=image.device)
    return torch.einsum("bchw,c->bhw", image, weights)[:, None]


def _box(
    top: Tensor, left: Tensor, bottom: Tensor, right: Tensor, height: int, width: int
) -> Tensor:
    """Return which pixels are inside of a box for each row, bool of shape (B, H, W)."""
    rows = torch.arange(height, device=top.device)
    columns = torch.arange(width, device=top.device)
    is_row = (rows >= top[:, None]) & (rows < bottom[:, None])
    is_column = (columns >= left[:, None]) & (columns < right[:, None])
    return is_row[:, :, None] & is_column[:, None, :]


def _partners(random: RowRandom) -> Tensor:
    """Return the partner of each row: the next row in a random order, int64 of shape (B,).

    The order depends on which rows are in the batch, and not on the order that they have there.
    """
    order = random.uniform().argsort(stable=True)
    partner = torch.empty_like(order)
    partner[order] = order.roll(-1)
    return partner


def _symmetric_beta(random: RowRandom, alpha: float) -> Tensor:
    """Draw from Beta(alpha, alpha), float32 of shape (B,).

    From Student's t distribution with 2 * alpha degrees of freedom, which R. Bailey's polar method
    draws (Mathematics of Computation 62, 1994); L. Devroye, Non-Uniform Random Variate Generation,
    1986, chapter IX.3.
    """
    first, second = random.uniform(2).double().unbind(1)
    cosine = (2 * math.pi * second).cos()
    # In (0, 1], so that its power is finite.
    inverse = 1 / ((first + 2.0**-25).pow(-1 / alpha) - 1)
    return (0.5 + 0.5 * cosine / (inverse + cosine.square()).sqrt()).float()
