"""Training on images, records and rows of other lengths: the same on any number of data devices."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memmap import MemmapDataModule
from tests.support.datasets import DECODE, EncodedImages, Ragged, Scenes
from tests.support.models import Boxes, Brightness, Sounds, make_trainer, weights
from tests.support.rows import joined

NUM_ROWS, GLOBAL_BATCH = 100, 24


def louder(batch: Any) -> Any:
    return {**batch, "sound": batch["sound"]._replace(values=batch["sound"].values * 2)}


def brighter(batch: Any) -> Any:
    return {**batch, "image": batch["image"] // 2 + 100}


@dataclass(frozen=True)
class Kind:
    """A dataset, the module that learns from it, and how its fields come."""

    dataset: Callable[[int], Any]
    module: Callable[[], Any]
    layout: Any = None
    transform: Any = None
    decode: Any = None


SOUNDS = {"sound", "ids"}
KINDS = {
    "images": Kind(EncodedImages, Brightness, None, brighter, DECODE),
    "records as list": Kind(Scenes, Boxes, {"objects": "list"}),
    "records as pad": Kind(Scenes, Boxes, {"objects": "pad"}, lambda batch: batch),
    "sounds as pad": Kind(Ragged, Sounds, dict.fromkeys(SOUNDS, "pad") | {"image": "list"}, louder),
    **{
        f"sounds as {form}": Kind(Ragged, Sounds, dict.fromkeys(SOUNDS, form) | {"image": "list"})
        for form in ("jagged", "list")
    },
}


def fit(path: Path, kind: Kind, devices: int, strategy: str, **options: Any) -> Any:
    data = MemmapDataModule(
        kind.dataset(NUM_ROWS),
        store_dir=path / "stores",
        batch_size=GLOBAL_BATCH // devices,
        seed=5,
        layout=kind.layout,
        decode=kind.decode,
        with_row_numbers=kind.module is Boxes,
        **options,
    )
    module = kind.module()
    trainer = make_trainer(
        path, strategy=strategy, devices=devices, max_epochs=2, limit_val_batches=0
    )
    trainer.fit(module, datamodule=data)
    return module


def assert_bitwise(found: Any, expected: Any) -> None:
    for name in ("seen", "names", "texts"):
        assert getattr(found, name, None) == getattr(expected, name, None)
    assert torch.equal(weights(found), weights(expected))


@pytest.mark.parametrize("name", KINDS)
def test_weights_do_not_depend_on_devices_residency_and_strategy(tmp_path: Path, name: str) -> None:
    kind = KINDS[name]
    one = fit(tmp_path, kind, 1, "memmap_superbatch")
    assert sorted(joined(one.seen)) == sorted([*range(NUM_ROWS)] * 2)
    for devices, residency in ((2, "device"), (3, "mmap"), (4, "device")):
        assert_bitwise(fit(tmp_path, kind, devices, "memmap_superbatch", residency=residency), one)
    for strategy, devices in (("memmap_dp", 3), ("auto", 1)):
        other = fit(tmp_path, kind, devices, strategy)
        torch.testing.assert_close(weights(other), weights(one), rtol=1e-5, atol=1e-6)
    if kind.transform is not None:
        one = fit(tmp_path, kind, 1, "memmap_superbatch", transform=kind.transform)
        for devices in (2, 3, 4):
            many = fit(tmp_path, kind, devices, "memmap_superbatch", transform=kind.transform)
            assert_bitwise(many, one)


def test_encoded_images_train_as_the_same_images_stored_decoded(tmp_path: Path) -> None:
    decoded = Kind(partial(EncodedImages, decoded=True), Brightness)
    for transform in (None, brighter):
        expected = fit(tmp_path / "decoded", decoded, 1, "memmap_superbatch", transform=transform)
        found = fit(tmp_path, KINDS["images"], 2, "memmap_superbatch", transform=transform)
        assert_bitwise(found, expected)
