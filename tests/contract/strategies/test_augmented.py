"""A row is augmented identically on 1, 2 and 4 devices, so training is that of one device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_memmap import MemmapDataModule
from lightning_memmap.transforms import OnSuperBatch, RowRandom
from tests.support.models import Points, Regression, SaveAt, make_trainer, weights
from tests.support.processes import launch
from tests.support.training import make_strategy
from tests.support.versions import weights_only

ROWS, GLOBAL_BATCH = 63, 12
SAVE_AT = 4
#: By name, strategies of two processes.
TWO: dict[str, dict[str, Any]] = {
    "memmap_superbatch_ddp": {
        "strategy": "memmap_superbatch_ddp",
        "strategy_options": {"data_devices_per_process": 1},
        "save_at": SAVE_AT,
    },
    "memmap_fsdp2": {"strategy": "memmap_fsdp2"},
}


def augment(batch: Any, random: RowRandom) -> Any:
    """Scale, shift and blank out numbers, with a draw of each kind."""
    x = batch["x"] * random.uniform(8, low=0.5, high=1.5) + 0.1 * random.normal()[:, None]
    x = x * (random.randint(8, high=4) > 0) + 0.01 * random.permutation(8)
    return {**batch, "x": torch.where(random.bernoulli()[:, None], x, -x)}


class Noting(Regression):
    """Notes the augmented numbers of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.augmented: dict[tuple[int, int], list[float]] = {}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        for row, x in zip(batch["row"].tolist(), batch["x"].tolist(), strict=True):
            self.augmented[self.current_epoch, row] = x
        return self.step(batch, "train")


def fit(
    out: Path,
    strategy: str,
    devices: int,
    strategy_options: dict[str, Any] | None = None,
    save_at: int | None = None,
    checkpoint: Path | None = None,
    on_super_batch: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train two epochs on two or more data devices, and return what this rank saw."""
    data = MemmapDataModule(
        Points(ROWS),
        store_dir=out / "stores",
        batch_size=GLOBAL_BATCH // devices,
        transform=OnSuperBatch(augment) if on_super_batch else augment,
        **options,
    )
    trainer = make_trainer(
        out,
        strategy=make_strategy(strategy, strategy_options),
        devices=devices,
        max_epochs=2,
        limit_val_batches=0,
        callbacks=[SaveAt(save_at, out / "middle.ckpt")],
    )
    module = Noting()
    trainer.fit(module, data, ckpt_path=checkpoint, **weights_only(checkpoint and False))
    trainer.save_checkpoint(out / "final.ckpt")
    state = torch.load(out / "final.ckpt", weights_only=True)["state_dict"]
    weights = torch.cat([value.flatten() for value in state.values()])
    return {"augmented": module.augmented, "weights": weights, "steps": trainer.global_step}


def fit_two(out: Path, middle: str) -> dict[str, Any]:
    """Train on two processes under each strategy, and go on with the checkpoint of one process."""
    found = {name: fit(out, devices=2, **options) for name, options in TWO.items()}
    found["resumed"] = fit(out, "memmap_superbatch_ddp", 2, checkpoint=Path(middle))
    return found


#: float32 sums in another order, over 12 steps of Adam.
ATOL = 2e-6


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A training on one device, and where it saved its middle."""
    out = tmp_path_factory.mktemp("one")
    found = fit(out, "memmap_superbatch", 1, save_at=SAVE_AT)
    assert len(found["augmented"]) == 2 * ROWS
    first, second = ([found["augmented"][epoch, row] for row in range(ROWS)] for epoch in range(2))
    assert not any(x == y for x, y in zip(first, second, strict=True))
    assert (found["weights"] - weights(Noting())).abs().max() > 0.1
    return out, found


@pytest.fixture(scope="module")
def two(
    tmp_path_factory: pytest.TempPathFactory, one: tuple[Path, dict[str, Any]]
) -> tuple[Path, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("two")
    middle = str(one[0] / "middle.ckpt")
    return out, launch(fit_two, out, processes=2, middle=middle)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("on_super_batch", [False, True])
def test_weights_on_many_devices_are_bitwise_those_of_one(
    tmp_path: Path, one: tuple[Path, dict[str, Any]], devices: int, on_super_batch: bool
) -> None:
    found = fit(tmp_path, "memmap_superbatch", devices, on_super_batch=on_super_batch)
    assert found["augmented"] == one[1]["augmented"]
    assert torch.equal(found["weights"], one[1]["weights"])


@pytest.mark.parametrize("devices", [2, 4])
def test_weights_of_replicas_are_those_of_one_device(
    tmp_path: Path, one: tuple[Path, dict[str, Any]], devices: int
) -> None:
    found = fit(tmp_path, "memmap_dp", devices)
    assert found["augmented"] == one[1]["augmented"]
    torch.testing.assert_close(found["weights"], one[1]["weights"], rtol=0, atol=ATOL)


def assert_as_one(ranks: list[dict[str, Any]], expected: dict[str, Any], after: int = 0) -> None:
    joined = dict[Any, Any]()
    for rank in ranks:
        assert not joined.keys() & rank["augmented"].keys()
        joined |= rank["augmented"]
        torch.testing.assert_close(rank["weights"], expected["weights"], rtol=0, atol=ATOL)
    assert joined.items() <= expected["augmented"].items()
    assert len(joined) == 2 * ROWS - after


@pytest.mark.parametrize("name", TWO)
def test_weights_of_two_processes_are_those_of_one_device(
    one: tuple[Path, dict[str, Any]], two: tuple[Path, list[dict[str, Any]]], name: str
) -> None:
    assert_as_one([rank[name] for rank in two[1]], one[1])


def test_run_resumed_inside_an_epoch_on_another_number_of_devices_goes_on(
    tmp_path: Path, one: tuple[Path, dict[str, Any]], two: tuple[Path, list[dict[str, Any]]]
) -> None:
    out, expected = one
    seen = SAVE_AT * 12
    assert_as_one([rank["resumed"] for rank in two[1]], expected, seen)
    for middle, strategy, devices in (
        (out / "middle.ckpt", "memmap_superbatch", 4),
        (two[0] / "middle.ckpt", "memmap_superbatch", 2),
        (two[0] / "middle.ckpt", "memmap_dp", 2),
    ):
        found = fit(tmp_path, strategy, devices, checkpoint=middle)
        assert_as_one([found], expected, seen)
