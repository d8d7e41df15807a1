"""Batch transforms for images against their definitions, row by row."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from lightning_memmap.augmentations import (
    ColorJitter,
    Compose,
    CutMix,
    Cutout,
    MixUp,
    RandomCrop,
    RandomFlip,
)
from lightning_memmap.augmentations import _symmetric_beta as symmetric_beta
from lightning_memmap.loading.row_random import RowRandom
from lightning_memmap.transforms import OnSuperBatch
from tests.support.rows import CPU, make_loader

NUM_ROWS = 64
TRANSFORMS: dict[str, Any] = {
    "crop": RandomCrop(padding=2),
    "small crop": RandomCrop((5, 3)),
    "flip": RandomFlip(),
    "cutout": Cutout(3),
    "jitter": ColorJitter(0.4, 0.4, 0.4),
    "all": Compose([RandomCrop(padding=1), RandomFlip(dim=-2), nn.Identity(), Cutout(2, p=0.5)]),
}
MIXES: dict[str, Any] = {"mixup": MixUp(10, 0.4), "cutmix": CutMix(10)}


def batch_of(rows: Any, height: int = 8, width: int = 6) -> dict[str, Tensor]:
    """Images whose pixels are all different, between 1 and 2."""
    rows = torch.as_tensor(rows)
    pixels = torch.arange(3 * height * width).view(3, height, width)
    angles = rows[:, None, None, None] * 12.9898 + pixels * 78.233
    image = (1 + (angles.double().sin() * 43758.5453) % 1).float()
    return {"image": image, "mask": image[:, 0], "label": rows % 10, "row": rows}


def numbers(rows: Any = range(NUM_ROWS)) -> RowRandom:
    return RowRandom(rows, seed=3, epoch=1)


class TestEveryTransform:
    @pytest.mark.parametrize("name", TRANSFORMS)
    def test_row_is_changed_alike_in_every_batch(self, name: str) -> None:
        rows = [*range(NUM_ROWS)]
        whole = TRANSFORMS[name](batch_of(rows), numbers())["image"]
        some = rows[5:40:3][::-1]
        again = TRANSFORMS[name](batch_of(some), numbers(some))["image"]
        assert torch.equal(whole[some], again)
        different = whole[:, :, :3] != batch_of(rows)["image"][:, :, :3, : whole.shape[3]]
        assert different.flatten(1).any(1).float().mean() > 0.2

    @pytest.mark.parametrize("name", MIXES)
    def test_row_is_mixed_alike_in_every_order_of_the_batch(self, name: str) -> None:
        rows = [*range(NUM_ROWS)]
        order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(1)).tolist()
        whole = MIXES[name](batch_of(rows), numbers())
        again = MIXES[name](batch_of(order), numbers(order))
        for field in ("image", "label"):
            assert torch.equal(whole[field][order], again[field])

    @pytest.mark.parametrize("name", [*TRANSFORMS, *MIXES])
    def test_input_is_not_changed(self, name: str) -> None:
        batch, same = batch_of(range(NUM_ROWS)), batch_of(range(NUM_ROWS))
        found = {**TRANSFORMS, **MIXES}[name](batch, numbers())
        assert torch.equal(batch["image"], same["image"])
        assert found.keys() == batch.keys()
        assert torch.equal(found["row"], same["row"])

    def test_loader_mixes_the_rows_of_all_devices(self, numbered_store: Any) -> None:
        def mix(batch: Any, random: RowRandom) -> Any:
            image = batch["image"].float()
            return MixUp(None, field="image", target="target")(
                {"image": image, "target": image.flatten(1)}, random
            )

        found = []
        for devices in (1, 2, 4):
            loader = make_loader(
                numbered_store(96, 24), devices, 24 // devices, transform=OnSuperBatch(mix)
            )
            found.append([step.to(CPU) for step in loader])
            assert torch.allclose(found[-1][0]["image"].flatten(1), found[-1][0]["target"])
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
        torch.testing.assert_close(found[2], found[0], rtol=0, atol=0)


class TestCropAndFlip:
    def test_crop_is_a_part_of_the_padded_image_anywhere(self) -> None:
        rows = range(2000)
        batch = batch_of(rows, 4, 3)
        crop = RandomCrop((3, 4), padding=1, fields=("image", "mask"))
        batch["mask"] = batch["mask"][:, None]
        found = crop(batch, numbers(rows))
        padded = np.pad(batch["image"].numpy(), ((0, 0), (0, 0), (1, 1), (1, 1)))
        places = []
        for row in rows:
            (place,) = (
                (top, left)
                for top in range(4)
                for left in range(2)
                if np.array_equal(
                    padded[row, :, top : top + 3, left : left + 4], found["image"][row].numpy()
                )
            )
            places.append(place[0] * 2 + place[1])
        assert stats.chisquare(np.bincount(places, minlength=8)).pvalue > 1e-3
        assert torch.equal(found["mask"][:, 0], found["image"][:, 0])

    @pytest.mark.parametrize("dim", [-1, -2])
    def test_flip_mirrors_half_of_the_images_and_their_masks(self, dim: int) -> None:
        batch = batch_of(range(1000))
        found = RandomFlip(fields=("image", "mask"), dim=dim)(batch, numbers(range(1000)))
        flipped = (found["image"] == batch["image"].flip(dim)).flatten(1).all(1)
        same = (found["image"] == batch["image"]).flatten(1).all(1)
        assert torch.equal(flipped, ~same)
        assert stats.binomtest(int(flipped.sum()), 1000).pvalue > 1e-3
        assert torch.equal(found["mask"], found["image"][:, 0])
        assert torch.equal(RandomFlip(0.0)(found, numbers(range(1000)))["image"], found["image"])


class TestCutout:
    @pytest.mark.parametrize("size", [1, 2, 3, 20])
    def test_square_around_any_pixel_is_filled(self, size: int) -> None:
        rows = range(3000)
        batch = batch_of(rows, 4, 5)
        found = Cutout(size, value=-1.0)(batch, numbers(rows))["image"]
        holes = found == -1
        assert torch.equal(found[~holes], batch["image"][~holes])
        expected = set()
        for y in range(4):
            for x in range(5):
                hole = np.zeros((4, 5), bool)
                top, left = y - size // 2, x - size // 2
                hole[max(0, top) : top + size, max(0, left) : left + size] = True
                expected.add(hole.tobytes())
        assert {row.tobytes() for row in holes[:, 0].numpy()} == expected
        assert (holes == holes[:, :1]).all()
        untouched = Cutout(size, value=-1.0, p=0.25)(batch, numbers(rows))["image"] != -1
        share = int(untouched.flatten(1).all(1).sum())
        assert stats.binomtest(share, 3000, 0.75).pvalue > 1e-3


class TestColorJitter:
    @pytest.mark.parametrize("amounts", [(0.5, 0, 0), (0, 0.5, 0), (0, 0, 0.5), (0.5, 0.3, 2.0)])
    def test_images_are_blended_by_factors_of_the_row(self, amounts: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        image = torch.rand(NUM_ROWS, 3, 4, 4, generator=generator)
        found = ColorJitter(*amounts)({"image": image}, numbers())["image"]
        random = numbers()
        factors = [random.uniform(low=max(0, 1 - a), high=1 + a).tolist() for a in amounts]
        for row in range(NUM_ROWS):
            pixels = image[row].double().numpy()
            grey = np.array([0.299, 0.587, 0.114])
            brightness, contrast, saturation = (factor[row] for factor in factors)
            pixels = np.clip(pixels * brightness, 0, 1)
            mean = np.tensordot(grey, pixels, 1).mean()
            pixels = np.clip(mean + contrast * (pixels - mean), 0, 1)
            own = np.tensordot(grey, pixels, 1)
            pixels = np.clip(own + saturation * (pixels - own), 0, 1)
            np.testing.assert_allclose(found[row].numpy(), pixels, atol=1e-5)

    def test_bytes_stay_bytes(self) -> None:
        generator = torch.Generator().manual_seed(0)
        image = torch.randint(0, 256, (NUM_ROWS, 3, 4, 4), generator=generator, dtype=torch.uint8)
        jitter = ColorJitter(0.4, 0.4, 0.4)
        found = jitter({"image": image}, numbers())["image"]
        exact = jitter({"image": image / 255}, numbers())["image"]
        assert found.dtype == torch.uint8
        assert (found / 255 - exact).abs().max() <= 0.51 / 255
        grey = ColorJitter(0.4, 0.4)({"image": image[:, :1]}, numbers())["image"]
        assert grey.shape == (NUM_ROWS, 1, 4, 4)


@pytest.mark.parametrize("name", [*TRANSFORMS, *MIXES])
def test_batch_without_rows_stays_one(name: str) -> None:
    transform = {**TRANSFORMS, **MIXES}[name]
    found = transform(batch_of(torch.arange(0)), numbers([]))
    assert len(found["image"]) == len(found["label"]) == 0


class TestMixing:
    @pytest.mark.parametrize("name", MIXES)
    def test_targets_are_mixed_like_the_images(self, name: str) -> None:
        batch = batch_of(range(NUM_ROWS))
        found = MIXES[name](batch, numbers())
        partners = []
        for row in range(NUM_ROWS):
            image, target = found["image"][row], found["label"][row]
            weight = None
            for other in range(NUM_ROWS):
                first, second = batch["image"][row], batch["image"][other]
                if other == row:
                    continue
                if name == "mixup":
                    share = ((image - second) / (first - second)).double()
                    if (share.max() - share.min()) < 1e-2 and -1e-3 < share.mean() < 1.001:
                        weight = share.mean()
                elif ((image == first) | (image == second)).all() and (image == second).any():
                    pasted = (image == second)[0]
                    # The pixels of a box.
                    box = pasted.any(1).sum() * pasted.any(0).sum()
                    assert pasted.sum() == box
                    weight = 1 - box / pasted.numel()
                if weight is not None:
                    partners.append(other)
                    break
            expected = torch.zeros(10)
            if weight is None:  # An empty box.
                assert torch.equal(image, batch["image"][row])
                expected[row % 10] = 1
            else:
                expected[row % 10] += float(weight)
                expected[other % 10] += 1 - float(weight)
            torch.testing.assert_close(target, expected, rtol=0, atol=1e-2)
        assert len(partners) > NUM_ROWS * 0.7
        # No two rows have one partner.
        if name == "cutmix":
            assert len({*partners}) == len(partners)

    def test_floating_targets_are_mixed_as_they_are(self) -> None:
        batch = batch_of(range(NUM_ROWS))
        found = MixUp(None, target="mask")(batch, numbers())
        assert torch.allclose(found["mask"], found["image"][:, 0])

    @pytest.mark.parametrize("alpha", [0.05, 0.2, 0.5, 1.0, 3.0])
    def test_weights_have_a_beta_distribution(self, alpha: float) -> None:
        drawn = symmetric_beta(RowRandom(range(20_000)), alpha)
        assert ((drawn >= 0) & (drawn <= 1)).all()
        # Where it rounds to 0 or 1, as it does for a small alpha, the distribution has steps.
        inner = drawn[(drawn > 1e-6) & (drawn < 1 - 1e-6)].double().numpy()
        low, high = stats.beta.cdf([1e-6, 1 - 1e-6], alpha, alpha)
        assert stats.binomtest(len(inner), 20_000, high - low).pvalue > 1e-3
        found = (stats.beta.cdf(inner, alpha, alpha) - low) / (high - low)
        assert stats.kstest(found, "uniform").pvalue > 1e-3


IMAGE = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
SHAPED = RandomCrop(2), Cutout(3), ColorJitter(0.4), CutMix(8)


def on(transform: Any, image: Any = IMAGE, **fields: Any) -> Any:
    """A call with four images, whose labels are their numbers."""
    batch = {"image": image, "label": torch.arange(len(image)), **fields}
    return lambda: transform(batch, RowRandom(range(len(image))))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RandomCrop((0, 3)), "size=0"),
        (lambda: RandomCrop(padding=-1), "padding=-1"),
        (on(RandomCrop((20, 3))), r"size=\(20, 3\)"),
        (lambda: RandomFlip(1.5), "p=1.5"),
        (lambda: RandomFlip(dim=0), "dim=0"),
        (lambda: Cutout(0), "size=0"),
        (lambda: ColorJitter(contrast=-0.1), "contrast=-0.1"),
        (lambda: MixUp(alpha=0), "alpha=0"),
        (lambda: CutMix(0), "num_classes=0"),
        (on(MixUp()), "num_classes"),
        (lambda: Compose([3]), "transforms=3"),  # type: ignore[list-item]
        (lambda: Compose([lambda batch, generator: batch]), "generator"),
        (lambda: Compose([RandomFlip(), OnSuperBatch(MixUp(5))]), r"OnSuperBatch\(Compose"),
        *(
            (on(transform, torch.rand(shape)), r"'image'.*B, C, H, W")
            for transform in SHAPED
            for shape in ((8, 8, 8), (8, 7), (8, 3, 2, 8, 8))
        ),
        (on(RandomFlip(1.0, dim=-2), IMAGE[:, 0, 0, :2]), "'image'.*dim=-2"),
        (on(RandomFlip(1.0, dim=-1), IMAGE[:, 0, 0, 0]), "'image'.*dim=-1"),
        *(
            (on(ColorJitter(0.4), torch.ones(4, 3, 8, 8).to(dtype)), "'image'")
            for dtype in (torch.int16, torch.int64, torch.bool)
        ),
        # Far outside of [0, 1].
        *((on(ColorJitter(0.4), IMAGE * scale), "'image'") for scale in (255, -3)),
        (on(MixUp(2), label=torch.rand(4, 2)), r"'label'.*num_classes"),
        (on(MixUp(2), IMAGE.to(torch.uint8)), r"'image'.*uint8"),
        (on(RandomFlip(fields="picture")), r"'picture'.*'image'"),
        (lambda: RandomFlip()((IMAGE,), RowRandom(range(4))), "tuple"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_augmented_is_named(make: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        make()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_color_jitter_keeps_the_dtype(dtype: torch.dtype) -> None:
    out = ColorJitter(0.4, 0.4, 0.4)({"image": IMAGE.to(dtype)}, RowRandom(range(4)))["image"]
    assert out.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.bool])
def test_classes_of_any_integer_dtype_are_mixed(dtype: torch.dtype) -> None:
    labels = torch.arange(4) % 2
    batch = {"image": torch.rand(4, 3, 8, 8), "label": labels.to(dtype)}
    mixed = MixUp(2)(batch, RowRandom(range(4)))
    expected = MixUp(2)({**batch, "label": labels}, RowRandom(range(4)))
    assert torch.equal(mixed["label"], expected["label"])


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("uniform", {"low": torch.arange(4.0), "high": 9.0}),
        ("normal", {"std": torch.ones(4)}),
        ("randint", {"high": torch.arange(1, 5)}),
        ("bernoulli", {"p": torch.rand(4)}),
    ],
)
def test_parameters_per_row_do_not_change_the_shape(method: str, options: Any) -> None:
    (name,) = (name for name, value in options.items() if isinstance(value, Tensor))
    random = RowRandom(range(4))
    for shape in ((1,), (2,)):
        with pytest.raises(ValueError, match=rf"{name}.*\(4, 1\)"):
            getattr(random, method)(*shape, **options)
    assert getattr(random, method)(**options).shape == (4,)
    options[name] = options[name][:, None]
    assert getattr(random, method)(2, **options).shape == (4, 2)
