"""Augmentations of Kornia whose parameters are drawn for each row.

Kornia draws the parameters of a batch from torch's global generator, so they depend on which rows
are in the batch. `KorniaRows` runs the same code, but a `RowRandom` draws its random
numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_memmap._compat.tensors import PRIVATE_DRAWS
from lightning_memmap.loading.row_random import RowRandom

__all__ = ["KorniaRows"]


class KorniaRows:
    """Runs augmentations of Kornia, with parameters that are drawn for each row.

    An augmentation that draws numbers for the whole batch raises an error at its first batch:
    ``RandomMotionBlur``, ``RandomPlasmaBrightness``, ``RandomPlasmaContrast``, and others with
    ``same_on_batch=True``. ``ColorJitter`` and ``ColorJiggle`` make their changes in a fixed order:
    brightness, contrast, saturation, hue.

    Args:
        augmentations: Augmentations such as ``kornia.augmentation.RandomAffine(15.0)``, which run
            in order.
        fields: Keys of the images in a batch, floating tensors of shape (B, C, H, W), which have
            the same parameters.

    Raises:
        TypeError: One is a container, or mixes rows (``RandomMixUpV2``, ``RandomCutMixV2``,
            ``RandomMosaic``, ``RandomJigsaw``, ``RandomTransplantation``, ``PatchMix``).
        ValueError: ``p_batch`` is neither 0 nor 1.
        ImportError: Kornia isn't installed.
    """

    def __init__(self, augmentations: Sequence[Any], fields: Sequence[str] = ("image",)) -> None:
        try:
            from kornia.augmentation import AugmentationBase2D
        except ImportError as error:
            raise ImportError(
                "KorniaRows needs Kornia: pip install 'lightning_memmap[kornia]'"
            ) from error
        for each in augmentations:
            name = type(each).__name__
            if not isinstance(each, AugmentationBase2D):
                raise TypeError(
                    f"augmentations: {name} isn't an augmentation of single images by Kornia: pass"
                    " a list instead of a container; lightning_memmap.augmentations has MixUp and"
                    " CutMix"
                )
            if each.p_batch not in (0, 1):
                raise ValueError(
                    f"augmentations: {name} with p_batch={each.p_batch} draws for a whole batch:"
                    " use p for probabilities of rows"
                )
        self.augmentations = [*augmentations]
        self.fields = tuple(fields)

    def __call__(self, batch: Mapping[str, Any], random: RowRandom) -> dict[str, Any]:
        """Augment the images of a batch of B rows."""
        images = {name: batch[name] for name in self.fields}
        for augmentation in self.augmentations:
            first = images[self.fields[0]]
            with _RowNumbers(random, type(augmentation).__name__):
                params = augmentation.forward_parameters(first.shape)
                images = {
                    name: augmentation(image, params=dict(params)) for name, image in images.items()
                }
        return {**batch, **images}


class _RowNumbers(TorchFunctionMode):
    """Replaces random numbers of torch by the numbers of a `RowRandom`."""

    def __init__(self, random: RowRandom, name: str) -> None:
        super().__init__()
        self._random = random
        self._name = name

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if func in _DRAWS:
            shape, draw = _DRAWS[func](args, options)
            if not shape or shape[0] != len(self._random):
                raise ValueError(
                    f"augmentations: {self._name} draws random numbers of shape {tuple(shape)} for"
                    f" {len(self._random)} rows, which aren't numbers for each row: use it without"
                    " KorniaRows"
                )
            numbers = draw(self._random, shape[1:])
            dtype = options.get("dtype") or torch.get_default_dtype()
            return numbers.to(options.get("device") or numbers.device, dtype)
        if func is torch.randperm and self._name in _ORDERED:
            return torch.arange(args[0])
        if func in _OTHERS:
            raise ValueError(
                f"augmentations: {self._name} draws with {func.__name__}, which has no numbers for"
                " each row: use it without KorniaRows"
            )
        return func(*args, **options)


_Draw = Callable[[RowRandom, Sequence[int]], Tensor]


def _sizes(args: tuple[Any, ...], options: Any) -> Sequence[int]:
    size = options.get("size", args)
    while len(size) == 1 and not isinstance(size[0], int):
        size = size[0]
    return [int(each) for each in size]


def _rand(args: tuple[Any, ...], options: Any) -> tuple[Sequence[int], _Draw]:
    return _sizes(args, options), lambda random, shape: random.uniform(*shape)


def _randn(args: tuple[Any, ...], options: Any) -> tuple[Sequence[int], _Draw]:
    return _sizes(args, options), lambda random, shape: random.normal(*shape)


def _like(draw: Any) -> Any:
    return lambda args, options: draw((args[0].shape,), options)


def _bernoulli(args: tuple[Any, ...], options: Any) -> tuple[Sequence[int], _Draw]:
    p = args[0]
    return p.shape, lambda random, shape: random.bernoulli(*shape, p=p.to(random.device))


def _randint(args: tuple[Any, ...], options: Any) -> tuple[Sequence[int], _Draw]:
    *bounds, size = args if "size" not in options else (*args, options["size"])
    low, high = (0, *bounds) if len(bounds) == 1 else bounds
    options.setdefault("dtype", torch.int64)
    return size, lambda random, shape: random.randint(*shape, low=low, high=high)


_DRAWS: dict[Any, Callable[[tuple[Any, ...], Any], tuple[Sequence[int], _Draw]]] = {
    torch.rand: _rand,
    torch.randn: _randn,
    torch.rand_like: _like(_rand),
    torch.randn_like: _like(_randn),
    torch.bernoulli: _bernoulli,
    torch.randint: _randint,
}
#: Draw the order of their changes for a whole batch.
_ORDERED = frozenset({"ColorJitter", "ColorJiggle"})
_OTHERS = {
    torch.randperm, torch.multinomial, torch.normal, torch.poisson, *PRIVATE_DRAWS,
    Tensor.uniform_, Tensor.normal_, Tensor.random_, Tensor.bernoulli_, Tensor.exponential_,
    Tensor.cauchy_, Tensor.log_normal_, Tensor.geometric_,
}  # fmt: skip
