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

from lightning_memmap.loading import RowList
from lightning_memmap.loading.row_random import RowRandom
from lightning_memmap.loading.super_batch import Assembler
from lightning_memmap.loading.transform import DeviceTransform
from lightning_memmap.store import Store
from lightning_memmap.transforms import PerSample
from tests.support.rows import CPU, image_of, make_loader

Pair = namedtuple("Pair", ["image", "label"])


@dataclasses.dataclass
class Texts:
    text: Any
    text2: Any


def images(channels: int = 3) -> torch.Tensor:
    return torch.arange(2 * channels * 20, dtype=torch.uint8).view(2, channels, 4, 5)


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
            found = Assembler().assemble(batches[:count], 0, len(names), CPU)
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


class TestWithoutReturn:
    """A forgotten return statement is an error that names the callable and the row."""

    def test_result_of_none_raises_and_names_callable_and_row(self) -> None:
        rows = iter(range(2))

        def forgetful(sample: Any) -> Any:
            return None if next(rows) else sample

        with pytest.raises(TypeError, match=r"forgetful .*None.* row 1"):
            PerSample(forgetful)({"image": images()})

    def test_function_that_cannot_be_called_raises(self) -> None:
        made: Any = PerSample
        with pytest.raises(TypeError, match=r"function=3"):
            made(3)


class TestRowsThatDiffer:
    """What one row becomes and another does not is an error that names the row and the field."""

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                lambda image: image[:2],
                r"uint8 tensor of shape \(2.*\) at \['image'\] for row 1 and"
                r" a uint8 tensor of shape \(3.*\) for row 0",
            ),
            (lambda image: image / np.float32(2), r"float32 tensor .*\['image'\] for row 1"),
            (lambda image: image.tolist(), r"\['image'\S* for row 1"),
        ],
        ids=["size", "dtype", "type"],
    )
    def test_results_that_differ_raise_and_name_row_and_field(
        self, change: Callable[[Any], Any], message: str
    ) -> None:
        rows = iter(range(2))

        def transform(sample: Any) -> dict[str, Any]:
            image = sample["image"]
            return {"image": change(image) if next(rows) else image}

        with pytest.raises(ValueError, match=message):
            PerSample(transform)({"image": images()})

    def test_results_with_other_keys_raise_and_name_the_row(self) -> None:
        rows = iter([{"a": 1}, {"a": 1}, {"a": 1, "b": 2}])
        with pytest.raises(ValueError, match=r"\['b'\].* for row 2"):
            PerSample(lambda sample: next(rows))(torch.arange(3))


class TestInLoader:
    @pytest.mark.parametrize("num_devices", [1, 3])
    def test_per_sample_in_loader_is_that_of_the_samples(
        self, numbered_store: Callable[[int, int], Store], num_devices: int
    ) -> None:
        store = numbered_store(37, 24)

        def brighten(sample: Any) -> dict[str, Any]:
            return {**sample, "image": sample["image"] + random.randrange(1, 5)}

        make = [
            make_loader(
                store,
                num_devices,
                6 // num_devices,
                transform=PerSample(brighten),
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


class OwnRandomNumbers:
    """Random as an Albumentations ``Compose`` is: with its own generator."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng()

    def set_random_seed(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def __call__(self, image: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
        turns = int(self.rng.integers(4))
        return {"image": np.rot90(image, turns), "mask": np.rot90(mask, turns)}


def test_callable_with_own_random_numbers_is_seeded_for_each_row() -> None:
    square = torch.arange(24 * 16).view(24, 4, 4)
    compose = OwnRandomNumbers()

    def augment(sample: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        result = compose(
            image=sample["image"].permute(1, 2, 0).numpy(), mask=sample["mask"].numpy()
        )
        image = torch.from_numpy(np.ascontiguousarray(result["image"])).permute(2, 0, 1)
        return {"image": image, "mask": torch.from_numpy(np.ascontiguousarray(result["mask"]))}

    augment.set_random_seed = compose.set_random_seed  # type: ignore[attr-defined]
    transform = DeviceTransform(PerSample(augment), CPU)

    def turned(rows: list[int], epoch: int = 0) -> torch.Tensor:
        batch = {"image": square[rows, None], "mask": square[rows]}
        # torch's global generator is seeded otherwise each time.
        found = transform(batch, len(rows), RowRandom(rows, seed=1, epoch=epoch))
        assert torch.equal(found["image"][:, 0], found["mask"])
        image: torch.Tensor = found["mask"]
        return image

    rows = [*range(24)]
    whole = turned(rows)
    assert torch.equal(whole, turned(rows))
    assert torch.equal(whole, torch.cat([turned(rows[:5]), turned(rows[5:])]))
    assert not torch.equal(whole, turned(rows, epoch=1))
    assert len({int(image[0, 0]) % 16 for image in whole}) == 4


def test_callable_with_a_parameter_random_receives_the_generator_of_the_row() -> None:
    def add(sample: dict[str, Any], random: np.random.Generator) -> dict[str, Any]:
        return {**sample, "noise": torch.tensor(random.normal(size=3))}

    transform = PerSample(add)
    rows = torch.arange(9)
    whole = transform({"row": rows}, RowRandom(rows.numpy()))["noise"]
    assert torch.equal(whole[4:6], transform({"row": rows[4:6]}, RowRandom([4, 5]))["noise"])
    assert len(whole.unique()) == 27
    random = RowRandom(rows.numpy())
    first, second = (transform({"row": rows}, random=random)["noise"] for _ in range(2))
    assert torch.equal(first, whole)
    assert not (first == second).any()
    with pytest.raises(TypeError, match="random=RowRandom"):
        transform({"row": rows})


def test_loader_passes_the_rows_of_a_per_sample_callable(
    numbered_store: Callable[[int, int], Store],
) -> None:
    def add(sample: dict[str, Any], *, random: np.random.Generator) -> dict[str, Any]:
        return {"row": sample["row"], "noise": random.random()}

    found = []
    for devices in (1, 2, 4):
        loader = make_loader(numbered_store(97, 24), devices, transform=PerSample(add))
        found.append(torch.cat([step.to(CPU)["noise"] for step in loader]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert len(found[0].unique()) == 97
