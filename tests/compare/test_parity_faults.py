"""The parity check: quiet where nothing is wrong, under each strategy; and every fault is found."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_memmap import MemmapDataModule
from lightning_memmap.compare.folder import WEIGHTS
from tests.compare.runs import (
    ROWS,
    STEPS,
    Double,
    OfItsDevice,
    check_run,
    check_runs_parity,
)
from tests.support.models import Points, Regression, Sgd

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("quick_runs"),
]

#: Strategies of one process. Those of several: `tests.compare.test_in_processes`.
STRATEGIES = ("memmap_superbatch", "memmap_dp", "memmap_model_parallel")
LOADERS = ("auto+workers0", "memmap_dp+workers0", "memmap_superbatch+first_epoch")
Batches = Iterator[dict[str, Tensor]]


class Taught(Regression):
    """Two optimizers that take a step for each batch, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([each], lr=0.01) for each in self.parameters()]


class Drawing(Regression):
    """Draws random numbers where the check does not see that it does."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(nn.functional.dropout(x, 0.5, self.training))
        return y


class Summed(Regression):
    """Has a loss that is the sum over rows."""

    def step(self, batch: Any, stage: str) -> Tensor:
        return super().step(batch, stage) * len(batch["row"])


class Skipping(Regression):
    """Has no loss in every second step, which then changes nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 2 else super().training_step(batch, batch_idx)


@dataclass
class Picture:
    """A sample that ``default_collate`` takes no part of but the numbers."""

    image: Any
    row: int
    weight: float


class Pictures(Dataset[Any]):
    """Grey and coloured images, with numbers beside them."""

    def __init__(self, mode: str, as_dict: bool) -> None:
        self.mode, self.as_dict = mode, as_dict

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        colour = index if self.mode == "L" else (index, 2 * index, 3)
        image = Image.new(self.mode, (4, 2), colour)
        picture = Picture(image, index, index / ROWS)
        return vars(picture) if self.as_dict else picture


class OnPictures(Regression):
    """A regression on pictures of eight pixels in each channel."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found = batch if isinstance(batch, dict) else vars(batch)
        x = found["image"].flatten(2).float().mean(1) / ROWS
        y = found["weight"].float()[:, None]
        return self.step({"row": found["row"], "x": x, "y": y}, "train")


ALL = ("auto", *LOADERS, *STRATEGIES)
FEW = ("auto", "auto+workers0", "memmap_superbatch")
BY_WORKERS = ("auto", "auto+workers0", "auto+workers1")


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize(
    ("make", "variants", "options"),
    [
        (Regression, ALL, {}),
        (Regression, ALL, {"transform": Double()}),
        (Taught, FEW, {}),
        (Skipping, FEW, {}),
        (OnPictures, BY_WORKERS, {"rows": Pictures("L", True)}),
        (OnPictures, BY_WORKERS, {"rows": Pictures("RGB", False)}),
    ],
)
def test_variants_that_do_the_same_are_found_to_agree(
    tmp_path: Path, make: type[Regression], variants: tuple[str, ...], options: dict[str, Any]
) -> None:
    checks = {variant: check_run(tmp_path, variant, make, **options) for variant in variants}
    skipped = [f"no loss, or NaN, in {STEPS // 2} of {STEPS} steps"] if make is Skipping else []
    for variant, parity in check_runs_parity(tmp_path, checks).items():
        assert (variant, parity.problems, parity.notes) == (variant, [], skipped)
        assert parity.holds is True
        assert parity.steps_with_equal_rows == [STEPS, STEPS]


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_rows_that_are_cast_on_their_way_to_the_model_are_the_same_rows(
    tmp_path: Path, precision: str
) -> None:
    variants = ("auto", "auto+workers0", "memmap_superbatch", "memmap_dp")
    trainer = {"precision": precision}
    checks = {variant: check_run(tmp_path, variant, trainer=trainer) for variant in variants}
    for parity in check_runs_parity(tmp_path, checks).values():
        assert parity.steps_with_equal_rows == [STEPS, STEPS]


def repeated(batches: Batches) -> Batches:
    for step, batch in enumerate(batches):
        rows = torch.arange(len(batch["row"]))
        rows[5] = 4 if step == 2 else 5
        yield {name: leaf[rows] for name, leaf in batch.items()}


def swapped(batches: Batches) -> Batches:
    """Two steps exchange their first rows."""
    kept = [{name: leaf.clone() for name, leaf in batch.items()} for batch in batches]
    for leaf, other in zip(kept[2].values(), kept[3].values(), strict=True):
        leaf[0], other[0] = other[0].clone(), leaf[0].clone()
    yield from kept


def dropped(batches: Batches) -> Batches:
    """The next epoch begins a step early."""
    for step, batch in enumerate(batches):
        if step < STEPS - 1:
            yield batch


def mislabelled(batches: Batches) -> Batches:
    for batch in batches:
        yield {**batch, "y": batch["y"].roll(1, 0)}


class Altered:
    """A loader whose batches something happens to."""

    def __init__(self, loader: Any, fault: Callable[[Batches], Batches]) -> None:
        self._loader, self._fault = loader, fault

    def __iter__(self) -> Batches:
        return self._fault(iter(self._loader))

    def __len__(self) -> int:
        return len(self._loader)


@pytest.mark.parametrize("transform", [None, Double()], ids=["plain", "transform"])
def test_wrong_rows_are_found(tmp_path: Path, transform: nn.Module | None) -> None:
    def faulty(fault: Callable[[Batches], Batches]) -> type[MemmapDataModule]:
        class Data(MemmapDataModule):
            def train_dataloader(self) -> Any:
                return Altered(super().train_dataloader(), fault)

        return Data

    right = check_run(tmp_path, "auto", transform=transform)
    weights = right.folder / WEIGHTS
    faults = (repeated, swapped, dropped, mislabelled)
    wrong = {}
    for fault in faults:
        (tmp_path / fault.__name__).mkdir()
        wrong[fault.__name__] = check_run(
            tmp_path / fault.__name__,
            "auto",
            data_class=faulty(fault),
            transform=transform,
            store_dir=tmp_path / "stores",
            reference=weights,
        )
    wrong["seed"] = check_run(tmp_path, "memmap_superbatch", transform=transform, seed=1)
    found = check_runs_parity(tmp_path, {"right": right, **wrong})
    assert [name for name, parity in found.items() if parity.holds] == ["right"]
    if transform is None:
        # The first wrong step, whatever came of it.
        first = {"repeated": 2, "swapped": 2, "dropped": STEPS - 1, "mislabelled": 0, "seed": 0}
        for name, step in first.items():
            assert found[name].problems[0].endswith(f"from step {step} on"), name


class ScaledGradients(Sgd):
    """Its loss is that of the others, and its gradients are not."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad *= 1.01


def test_transform_that_depends_on_the_device_is_found(tmp_path: Path) -> None:
    checks = {
        variant: check_run(tmp_path, variant, transform=OfItsDevice())
        for variant in ("auto", "memmap_superbatch", "memmap_dp")
    }
    auto, *others = check_runs_parity(tmp_path, checks).values()
    assert auto.holds is True
    for parity in others:
        assert parity.holds is False
        # The rows are right. What is made of them is not.
        assert parity.steps_with_equal_rows == [STEPS, STEPS]
        assert any("losses differ" in problem for problem in parity.problems)


def test_other_gradients_are_found(tmp_path: Path) -> None:
    checks = {
        "auto": check_run(tmp_path, "auto", Sgd),
        "faulty": check_run(tmp_path, "memmap_superbatch", ScaledGradients),
    }
    parity = check_runs_parity(tmp_path, checks)["faulty"]
    assert parity.holds is False
    assert parity.steps_with_equal_rows == [STEPS, STEPS]
    assert any("weights differ" in problem for problem in parity.problems)


class Normed(Regression):
    """Normalises by the rows that it is given at once."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(16))


@pytest.mark.parametrize("make", [Drawing, Summed, Normed])
def test_loss_that_depends_on_how_rows_are_divided_is_found(
    tmp_path: Path, make: type[Regression]
) -> None:
    variants = ("auto", "memmap_superbatch", "memmap_dp", "memmap_dp+workers0")
    checks = {variant: check_run(tmp_path, variant, make) for variant in variants}
    assert [check.ranks[0].num_separate_batches for check in checks.values()] == [1, 1, 2, 2]
    *whole, divided, loaded = check_runs_parity(tmp_path, checks).values()
    assert [parity.holds for parity in whole] == [True, True]
    for parity in (divided, loaded):
        assert parity.holds is False
        assert parity.steps_with_equal_rows == [STEPS, STEPS]
        assert any("losses differ" in problem for problem in parity.problems)
        assert "in 2 parts" in parity.notes[0]


class Unstable(Points):
    """Some of its rows are others each time that they are read."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)
        return {**row, "x": row["x"] + torch.rand(())} if index % 7 == 3 else row


def test_dataset_whose_rows_change_is_found(tmp_path: Path) -> None:
    checks = {
        variant: check_run(tmp_path, variant, rows=Unstable(ROWS))
        for variant in ("auto", "auto+workers0")
    }
    stored, loaded = check_runs_parity(tmp_path, checks).values()
    assert stored.holds is True
    assert loaded.holds is False
    assert loaded.steps_with_equal_rows == [0, STEPS]
