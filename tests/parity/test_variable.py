"""Training on rows that differ in length: the same on one data device and on several."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memmap import MemmapDataModule
from tests.datasets import Ragged
from tests.models import Sounds, make_trainer, weights

NUM_ROWS, GLOBAL_BATCH = 150, 24


def fit(path: Path, strategy: str, devices: int, form: str = "pad", **options: Any) -> Sounds:
    data = MemmapDataModule(
        Ragged(NUM_ROWS),
        store_dir=path / "stores",
        batch_size=GLOBAL_BATCH // devices,
        seed=5,
        variable=dict.fromkeys(("sound", "ids"), form) | {"image": "list"},
        **options,
    )
    module = Sounds()
    trainer = make_trainer(
        path, strategy=strategy, devices=devices, max_epochs=2, limit_val_batches=0
    )
    trainer.fit(module, datamodule=data)
    return module


@pytest.mark.parametrize("residency", ["mmap", "device"])
@pytest.mark.parametrize("form", ["pad", "jagged", "list"])
def test_weights_do_not_depend_on_the_number_of_data_devices(
    tmp_path: Path, form: str, residency: str
) -> None:
    one = fit(tmp_path, "memmap_superbatch", 1, form)
    assert sorted(sum(one.seen, [])) == sorted([*range(NUM_ROWS)] * 2)  # noqa: RUF017  # few
    for devices in (2, 3, 4):
        many = fit(tmp_path, "memmap_superbatch", devices, form, residency=residency)
        assert many.seen == one.seen
        assert many.texts == one.texts
        assert torch.equal(torch.stack(many.losses), torch.stack(one.losses))
        assert torch.equal(weights(many), weights(one))


def test_weights_under_a_transform_do_not_depend_on_the_number_of_data_devices(
    tmp_path: Path,
) -> None:
    one = fit(tmp_path, "memmap_superbatch", 1, transform=louder)
    plain = fit(tmp_path, "memmap_superbatch", 1)
    assert not torch.equal(weights(plain), weights(one))
    for devices in (2, 3, 4):
        many = fit(tmp_path, "memmap_superbatch", devices, transform=louder)
        assert torch.equal(weights(many), weights(one))


def louder(batch: Any) -> Any:
    return {**batch, "sound": batch["sound"]._replace(values=batch["sound"].values * 2)}


@pytest.mark.parametrize("form", ["pad", "jagged", "list"])
@pytest.mark.parametrize("strategy", ["memmap_dp", "auto"])
def test_weights_under_other_strategies_are_the_same(
    tmp_path: Path, strategy: str, form: str
) -> None:
    one = fit(tmp_path, "memmap_superbatch", 1, form)
    other = fit(tmp_path, strategy, 3 if strategy == "memmap_dp" else 1, form)
    torch.testing.assert_close(weights(other), weights(one), rtol=1e-5, atol=1e-6)
