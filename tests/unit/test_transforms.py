"""Adapters that make batch transforms of per-sample callables."""

import dataclasses
import random
from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from lightning_memmap.loading import Padded, RowList
from lightning_memmap.loading.super_batch import Collator
from lightning_memmap.loading.transform import DeviceTransform
from lightning_memmap.store import Store
from lightning_memmap.transforms import PerSample
from tests.rows import CPU, image_of, make_loader

Pair = namedtuple("Pair", ["image", "label"])


@dataclasses.dataclass
class Texts:
    text: Any
    text2: Any


class Flip:
    """Called as Albumentations is: arrays by keyword, channels last, a mapping back.

    Args:
        channels: Channels of the images.
    """

    def __init__(self, channels: int = 3) -> None:
        self.channels = channels

    def __call__(self, **arrays: Any) -> dict[str, Any]:
        for array in arrays.values():
            assert isinstance(array, np.ndarray), "keyword arguments are arrays"
        image, mask = arrays["image"], arrays["mask"]
        assert image.shape == (4, 5, self.channels), "images have their channels last"
        assert mask.shape == (4, 5), "a mask without channels stays as it is"
        return {"image": image[:, ::-1], "mask": mask[:, ::-1], "other": None}


def images(channels: int = 3) -> torch.Tensor:
    return torch.arange(2 * channels * 20, dtype=torch.uint8).view(2, channels, 4, 5)


def masks() -> torch.Tensor:
    return torch.arange(40).view(2, 4, 5)


class TestSamples:
    def test_per_sample_gives_samples_and_collates_results(self) -> None:
        given = []

        def transform(sample: Any) -> Any:
            given.append(sample)
            return {"image": sample["image"].float() / 2, "sum": sample["label"] + 1}

        batch = {"image": images(), "label": torch.tensor([3, 4])}
        found = PerSample(transform)(batch)
        samples = [{"image": images()[row], "label": torch.tensor(3 + row)} for row in range(2)]
        for one, other in zip(given, samples, strict=True):
            assert torch.equal(one["image"], other["image"])
            assert one["label"] == other["label"]
        assert torch.equal(found["image"], images().float() / 2)
        assert found["sum"].tolist() == [4, 5]

    @pytest.mark.parametrize(
        "batch",
        [
            torch.arange(3),
            [torch.arange(3), torch.arange(6).view(3, 2)],
            Pair(torch.arange(6).view(3, 2), torch.arange(3)),
            {"a": [torch.arange(3)], "b": {"c": torch.ones(3, 2, 2)}},
            TensorDict({"a": torch.arange(3), "b": {"c": torch.ones(3, 2, 2)}}, [3]),
        ],
        ids=["tensor", "list", "namedtuple", "nested", "TensorDict"],
    )
    def test_per_sample_without_change_gives_the_batch_back(self, batch: Any) -> None:
        found = PerSample(lambda sample: sample)(batch)
        assert type(found) is type(batch)
        assert getattr(found, "batch_size", None) == getattr(batch, "batch_size", None)
        for one, other in zip(leaves(found), leaves(batch), strict=True):
            assert torch.equal(one, other)

    def test_field_whose_name_begins_with_that_of_a_list_is_checked(self) -> None:
        def more(sample: Any) -> Any:
            sample.text2 = sample.text2.long() if sample.text == "b" else sample.text2
            return sample

        batch = Texts(RowList(["a", "b"]), torch.ones(2))
        with pytest.raises(ValueError, match=r"int64 tensor.* at \.text2 for row 1"):
            PerSample(more)(batch)

    def test_texts_under_new_keys_are_lists_with_one_for_each_row(self) -> None:
        def told(sample: Any) -> Any:
            row = int(sample["row"])
            return {**sample, "name": f"row {row}", "pair": (str(row), b"bytes")}

        batches = [PerSample(told)({"row": torch.tensor(rows)}) for rows in ([0, 2], [1])]
        for count, names in ((1, ["row 0", "row 2"]), (2, ["row 0", "row 1", "row 2"])):
            found = Collator(lambda leaves: leaves).assemble(batches[:count], 0, len(names), CPU)
            assert found["name"] == names
            assert isinstance(found["name"], RowList)
            assert found["pair"][1] == [b"bytes"] * len(names)

    def test_tensordicts_of_rows_are_one_with_the_rows_in_front(self) -> None:
        found = PerSample(lambda row: TensorDict({"a": row}, [2]))(torch.ones(3, 2))
        assert found.batch_size == found["a"].shape == (3, 2)


def leaves(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    children = batch.values() if isinstance(batch, Mapping) else batch
    return [leaf for child in children for leaf in leaves(child)]


class TestKeywords:
    @pytest.mark.parametrize("channels", [1, 3])
    def test_keywords_give_arrays_and_take_results_back(self, channels: int) -> None:
        batch = {"image": images(channels), "mask": masks(), "label": torch.tensor([3, 4])}
        transform = PerSample(Flip(channels), keywords={"image": "image", "mask": "mask"})
        found = transform(batch)
        assert list(found) == ["image", "mask", "label"]
        assert torch.equal(found["image"], images(channels).flip(-1))
        assert torch.equal(found["mask"], masks().flip(-1))
        assert found["image"].dtype == torch.uint8
        assert found["mask"].dtype == torch.int64
        assert torch.equal(found["label"], batch["label"])

    def test_keywords_leave_the_given_batch_as_it_was(self) -> None:
        batch = {"image": images(), "target": {"mask": masks()}}
        transform = PerSample(Flip(), keywords={"image": "image", "mask": "target.mask"})
        found = transform(batch)
        assert torch.equal(batch["image"], images())
        assert torch.equal(batch["target"]["mask"], masks())
        assert torch.equal(found["target"]["mask"], masks().flip(-1))

    @pytest.mark.parametrize("key", ["it's", 'the "best"', "'quoted'", "a b", "a.b"])
    def test_keywords_name_keys_with_any_characters(self, key: str) -> None:
        batch = {key: torch.zeros(2, 1, 4, 4), "other": [torch.ones(2)]}
        found = PerSample(lambda image: {"image": image + 1}, {"image": key})(batch)
        assert (found[key] == 1).all()

    def test_keywords_name_positions_in_lists(self) -> None:
        batch = [images(), {"mask": masks()}, torch.tensor([3, 4])]
        found = PerSample(Flip(), keywords={"image": "0", "mask": "1.mask"})(batch)
        assert torch.equal(found[0], images().flip(-1))
        assert torch.equal(found[1]["mask"], masks().flip(-1))
        assert found[2].tolist() == [3, 4]

    def test_keywords_with_new_shape_and_dtype_go_back_with_channels_first(self) -> None:
        def crop(image: Any) -> dict[str, Any]:
            return {"image": (image[:2, :3] / 2).astype(np.float32)}

        found = PerSample(crop, keywords={"image": "image"})({"image": images()})
        assert found["image"].dtype == torch.float32
        assert torch.equal(found["image"], images()[:, :, :2, :3] / 2)

    def test_keywords_with_dropped_channel_put_it_back(self) -> None:
        def squeeze(image: Any) -> dict[str, Any]:
            return {"image": image[..., 0]}

        found = PerSample(squeeze, keywords={"image": "image"})({"image": images(1)})
        assert torch.equal(found["image"], images(1))

    @pytest.mark.parametrize("name", ["mask", "image.0", "target.mask", "0", "", "target"])
    def test_keywords_of_what_is_no_field_raise_and_name_it(self, name: str) -> None:
        transform = PerSample(Flip(), keywords={"image": "image", "mask": name})
        with pytest.raises(KeyError, match=rf"'{name}'.*target\.0"):
            transform({"image": images(), "target": [masks()]})

    @pytest.mark.parametrize("height", [4, 3])
    def test_keywords_with_tensors_keep_their_channels_first(self, height: int) -> None:
        # As ToTensorV2 gives them: views of the image, and masks without channels as they are.
        def to_tensor(image: Any, mask: Any) -> dict[str, Any]:
            return {
                "image": torch.from_numpy(image[:height].transpose(2, 0, 1)),
                "mask": torch.from_numpy(mask[:height]),
            }

        transform = PerSample(to_tensor, keywords={"image": "image", "mask": "mask"})
        found = transform({"image": images(), "mask": masks()})
        assert torch.equal(found["image"], images()[:, :, :height])
        assert torch.equal(found["mask"], masks()[:, :height])

    def test_keywords_with_a_tensor_whose_channels_are_last_raise(self) -> None:
        transform = PerSample(
            lambda mask: {"mask": torch.from_numpy(mask)}, keywords={"mask": "mask"}
        )
        message = (
            r"'mask' is a tensor of shape \(4, 5, 3\) with its 3 channels last.*transpose_mask"
        )
        with pytest.raises(ValueError, match=message):
            transform({"mask": images()})

    def test_keywords_with_boxes_give_boxes(self) -> None:
        def shift(image: Any, boxes: Any) -> dict[str, Any]:
            return {"image": image, "boxes": [tuple(box + 1) for box in boxes]}

        boxes = torch.arange(24.0).view(2, 3, 4)
        transform = PerSample(shift, keywords={"image": "image", "boxes": "boxes"})
        assert torch.equal(transform({"image": images(), "boxes": boxes})["boxes"], boxes + 1)

    def test_keywords_with_a_key_dropped_raise_and_name_it(self) -> None:
        transform = PerSample(
            lambda image, mask: {"image": image}, keywords={"image": "image", "mask": "mask"}
        )
        with pytest.raises(KeyError, match="the result of row 0 has no 'mask'"):
            transform({"image": images(), "mask": masks()})


class TestWithoutReturn:
    """A forgotten return statement is an error that names the callable and the row."""

    def test_keywords_of_padded_images_name_the_forms_that_help(self) -> None:
        padded = Padded(torch.zeros(2, 4, 4, 3), torch.full((2, 2), 4))
        transform = PerSample(Flip(), keywords={"image": "photo.image", "mask": "mask"})
        with pytest.raises(KeyError, match=r"'photo\.image'.*variable=") as raised:
            transform({"photo": {"image": padded}, "mask": torch.zeros(2, 4, 4)})
        assert "image.0" not in str(raised.value)
        with pytest.raises(KeyError, match=r"'photo'.*photo\.image"):
            PerSample(Flip(), keywords={"image": "photo"})({"photo": {"image": images()}})

    @pytest.mark.parametrize("keywords", [None, {"image": "image"}], ids=["sample", "keywords"])
    def test_result_of_none_raises_and_names_callable_and_row(
        self, keywords: dict[str, str] | None
    ) -> None:
        rows = iter(range(2))

        def forgetful(sample: Any = None, image: Any = None) -> Any:
            return None if next(rows) else {"image": sample if image is None else image}

        message = r"callable .*forgetful returned None for row 1 of the batch: .* return statement"
        with pytest.raises(TypeError, match=message):
            PerSample(forgetful, keywords)({"image": images()})

    @pytest.mark.parametrize("keywords", [None, {"image": "image"}], ids=["sample", "keywords"])
    def test_field_of_none_raises_and_names_the_field(
        self, keywords: dict[str, str] | None
    ) -> None:
        transform = PerSample(lambda *_, **__: {"image": None}, keywords)
        with pytest.raises(TypeError, match=r"<lambda> returned None at \['image'\] for row 0"):
            transform({"image": images()})

    def test_function_that_cannot_be_called_raises(self) -> None:
        made: Any = PerSample
        with pytest.raises(TypeError, match=r"function=3: an int cannot be called; give"):
            made(3)


class TestRowsThatDiffer:
    """What one row becomes and another does not is an error that names the row and the field."""

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                lambda image: image[:2],
                r"uint8 {kind} of shape \(.*\) at \['image'\] for row 1 and"
                r" a uint8 {kind} of shape \(.*\) for row 0: crop, pad",
            ),
            (lambda image: image / np.float32(2), r"a float\d\d {kind} .*\['image'\] for row 1"),
            (lambda image: image.tolist(), r"\['image'\S* for row 1"),
        ],
        ids=["size", "dtype", "type"],
    )
    @pytest.mark.parametrize("keywords", [None, {"image": "image"}], ids=["sample", "keywords"])
    def test_results_that_differ_raise_and_name_row_and_field(
        self, change: Callable[[Any], Any], message: str, keywords: dict[str, str] | None
    ) -> None:
        rows = iter(range(2))

        def transform(sample: Any = None, image: Any = None) -> dict[str, Any]:
            value = sample["image"] if sample is not None else image
            return {"image": change(value) if next(rows) else value}

        kind = "tensor" if keywords is None else "array"
        with pytest.raises(ValueError, match=message.format(kind=kind)):
            PerSample(transform, keywords)({"image": images()})

    def test_results_with_other_keys_raise_and_name_the_row(self) -> None:
        rows = iter([{"a": 1}, {"a": 1}, {"a": 1, "b": 2}])
        with pytest.raises(ValueError, match=r"\['b'\].* for row 2"):
            PerSample(lambda sample: next(rows))(torch.arange(3))

    def test_results_with_numbers_of_other_types_raise(self) -> None:
        rows = iter([1, 1, 1.5])
        with pytest.raises(
            ValueError, match=r"a float at its result for row 2 .* an int for row 0"
        ):
            PerSample(lambda sample: next(rows))(torch.arange(3))


class TestInLoader:
    @pytest.mark.parametrize("num_devices", [1, 3])
    def test_per_sample_in_loader_is_that_of_the_samples(
        self, numbered_store: Callable[[int, int], Store], num_devices: int
    ) -> None:
        store = numbered_store(37, 24)

        def brighten(image: Any) -> dict[str, Any]:
            return {"image": image + random.randrange(1, 5)}

        make = [
            make_loader(
                store,
                num_devices,
                6 // num_devices,
                transform=PerSample(brighten, keywords={"image": "image"}),
            )
            for _ in range(2)
        ]
        shifts = []
        for one, other in zip(*make, strict=True):
            batch, again = one.to(CPU), other.to(CPU)
            assert torch.equal(batch["image"], again["image"])
            difference = batch["image"] - image_of(batch["row"])
            shifts += [value.unique().tolist() for value in difference]
        assert {len(shift) for shift in shifts} == {1}
        assert {shift[0] for shift in shifts} == {1, 2, 3, 4}

    def test_per_sample_keeps_records_that_are_given_row_by_row(self) -> None:
        def mirror(sample: Any) -> Any:
            image, objects = sample
            box, keep = objects["box"], objects["label"] > 0
            mirrored = torch.stack([8 - box[:, 1], 8 - box[:, 0]], dim=1)
            return image.flip(-1), {"box": mirrored[keep], "label": objects["label"][keep]}

        records = [
            {"box": torch.arange(2.0 * n).view(n, 2), "label": torch.arange(n)} for n in (2, 0, 3)
        ]
        images = torch.arange(24).view(3, 8)
        for batch in ([images, RowList(records)], [RowList(records), images]):
            first = isinstance(batch[0], RowList)
            function = (lambda sample: mirror(sample[::-1])[::-1]) if first else mirror
            found = PerSample(function)(batch)
            objects, image = found if first else found[::-1]
            assert torch.equal(image, images.flip(-1))
            assert isinstance(objects, RowList)
            assert [row["label"].tolist() for row in objects] == [[1], [], [1, 2]]
            assert objects[2]["box"].tolist() == [[5, 6], [3, 4]]

    def test_per_sample_keywords_leave_records_and_do_not_take_them(self) -> None:
        batch = {"image": torch.zeros(2, 1, 4, 4), "objects": RowList([[1], []])}
        found = PerSample(lambda image: {"image": image + 1}, {"image": "image"})(batch)
        assert found["objects"] is batch["objects"]
        assert (found["image"] == 1).all()
        with pytest.raises(KeyError, match="'objects' is given row by row: leave keywords out"):
            PerSample(lambda **_: {}, {"objects": "objects"})(batch)


class OwnRandomNumbers:
    """Random as an Albumentations ``Compose`` is: with its own generator."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng()

    def set_random_seed(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def __call__(self, image: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
        turns = int(self.rng.integers(4))
        return {"image": np.rot90(image, turns), "mask": np.rot90(mask, turns)}


def test_callable_with_own_random_numbers_repeats_and_stays_aligned() -> None:
    square = torch.arange(24 * 16).view(24, 4, 4)
    batch = {"image": square[:, None], "mask": square}
    augment = PerSample(OwnRandomNumbers(), {"image": "image", "mask": "mask"})
    transform = DeviceTransform(augment, CPU)
    first, again, other = transform(batch, 1), transform(batch, 1), transform(batch, 2)
    assert torch.equal(first["image"], again["image"])
    assert not torch.equal(first["image"], other["image"])
    assert torch.equal(first["image"][:, 0], first["mask"])
