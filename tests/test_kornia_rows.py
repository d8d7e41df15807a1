"""Augmentations of Kornia with parameters for each row."""

from typing import Any

import pytest
import torch

from lightning_memmap.kornia_rows import KorniaRows
from lightning_memmap.loading.row_random import RowRandom

augmentation = pytest.importorskip("kornia.augmentation", reason="kornia isn't installed")

ROWS = [*range(12)]
SOME = [2, 3, 7, 9, 1]
RANGE = (0.5, 1.5)
#: By name of the class, its arguments.
BY_ROW: dict[str, tuple[Any, ...]] = {
    "CenterCrop": (6,),
    "ColorJiggle": (0.2, 0.2, 0.2, 0.1),
    "ColorJitter": (0.2, 0.2, 0.2, 0.1),
    "RandomAffine": (15.0,),
    "RandomBoxBlur": (),
    "RandomBrightness": (RANGE,),
    "RandomChannelDropout": (),
    "RandomChannelShuffle": (),
    "RandomContrast": (RANGE,),
    "RandomCrop": ((9, 8),),
    "RandomElasticTransform": (),
    "RandomEqualize": (),
    "RandomErasing": (),
    "RandomGamma": (RANGE,),
    "RandomGaussianBlur": ((3, 3), (0.1, 2.0)),
    "RandomGaussianIllumination": (),
    "RandomGaussianNoise": (),
    "RandomGrayscale": (),
    "RandomHorizontalFlip": (),
    "RandomHue": ((-0.3, 0.3),),
    "RandomInvert": (),
    "RandomMedianBlur": (),
    "RandomPerspective": (),
    "RandomPlanckianJitter": (),
    "RandomPosterize": (),
    "RandomRGBShift": (),
    "RandomResizedCrop": ((9, 8),),
    "RandomRotation": (30.0,),
    "RandomRotation90": ((0, 3),),
    "RandomSaltAndPepperNoise": ((0.2, 0.3),),
    "RandomSaturation": (RANGE,),
    "RandomSharpness": (),
    "RandomShear": (0.3,),
    "RandomSolarize": (),
    "RandomThinPlateSpline": (),
    "RandomVerticalFlip": (),
    "Resize": ((10, 10),),
}
MIXING = [
    "PatchMix", "RandomCutMixV2", "RandomJigsaw", "RandomMixUpV2", "RandomMosaic",
    "RandomTransplantation",
]  # fmt: skip
#: Their default is a probability for the whole batch.
BY_BATCH_P = {"CenterCrop", "RandomCrop", "RandomResizedCrop", "Resize"}

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def images(rows: list[int]) -> torch.Tensor:
    return torch.rand(12, 3, 16, 20, generator=torch.Generator().manual_seed(0))[rows]


def make(name: str, **options: Any) -> Any:
    if name not in BY_BATCH_P:
        options = {"p": 0.7, **options}
    return getattr(augmentation, name)(*BY_ROW[name], **options)


@pytest.mark.parametrize("name", BY_ROW)
def test_row_is_augmented_alike_in_every_batch(name: str) -> None:
    augment = KorniaRows([make(name)], ["image", "other"])
    before = torch.get_rng_state()
    whole = augment({"image": images(ROWS), "other": images(ROWS)}, RowRandom(ROWS))
    part = augment({"image": images(SOME), "other": images(SOME)}, RowRandom(SOME))
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(whole["image"][SOME], part["image"], rtol=0, atol=1e-6)
    # Fields that are one image in two copies stay one.
    assert torch.equal(whole["image"], whole["other"])
    if whole["image"].shape == images(ROWS).shape:
        changed = (whole["image"] != images(ROWS)).flatten(1).any(1)
        assert 3 <= changed.sum() <= 12


def test_augmentations_have_numbers_of_their_own_and_repeat() -> None:
    flips = [augmentation.RandomHorizontalFlip(p=0.5) for _ in range(2)]
    rows = [*range(400)]
    image = torch.arange(800.0).view(400, 1, 1, 2)
    first, both = (
        KorniaRows(some)({"image": image}, RowRandom(rows))["image"] for some in (flips[:1], flips)
    )
    by_first = (first != image)[:, 0, 0, 0]
    by_both = (both != image)[:, 0, 0, 0]
    for count in (by_first.sum(), by_both.sum(), (by_first & by_both).sum() * 2):
        assert 150 < count < 250
    again = KorniaRows(flips)({"image": image}, RowRandom(rows))["image"]
    assert torch.equal(again, both)
    other = KorniaRows(flips)({"image": image}, RowRandom(rows, epoch=1))["image"]
    assert not torch.equal(other, both)


@pytest.mark.parametrize("name", ["RandomMotionBlur", "RandomPlasmaBrightness"])
def test_augmentation_that_draws_for_a_batch_raises(name: str) -> None:
    arguments = {"RandomMotionBlur": (3, 35.0, 0.5)}.get(name, ())
    augment = KorniaRows([getattr(augmentation, name)(*arguments, p=1.0)])
    with pytest.raises(ValueError, match=f"augmentations: {name}"):
        augment({"image": images(ROWS)}, RowRandom(ROWS))


def test_augmentation_with_the_same_numbers_for_a_batch_raises() -> None:
    augment = KorniaRows([augmentation.RandomAffine(15.0, same_on_batch=True, p=1.0)])
    with pytest.raises(ValueError, match="augmentations: RandomAffine"):
        augment({"image": images(ROWS)}, RowRandom(ROWS))
    with pytest.raises(ValueError, match=r"RandomCrop with p_batch=0\.5"):
        KorniaRows([augmentation.RandomCrop((9, 8), p=0.5)])


@pytest.mark.parametrize("name", MIXING)
def test_augmentation_that_mixes_rows_raises(name: str) -> None:
    with pytest.raises(TypeError, match=f"augmentations: {name}"):
        KorniaRows([getattr(augmentation, name)()])


def test_container_raises() -> None:
    flips = augmentation.AugmentationSequential(augmentation.RandomHorizontalFlip())
    with pytest.raises(TypeError, match="augmentations: AugmentationSequential"):
        KorniaRows([flips])
