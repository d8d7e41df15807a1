"""Callbacks that freeze and thaw parameters train the weights of one process."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor

from lightning_memmap import MemmapDataModule
from tests.support.models import Points, Regression, Thaws, make_trainer, weights, whole_weights
from tests.support.processes import each_case, in_processes
from tests.support.training import make_strategy

ROWS = 51


class Normed(Regression):
    """Has running statistics, and a buffer of a dtype that DDP's backends may not know."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int16))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.steps += 1 + len(batch["row"]) % 2
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9)


class Freezes(Thaws):
    """Trains the first layer in the first epoch alone."""

    def freeze_before_training(self, pl_module: Any) -> None:
        pass

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            pl_module.net[0].requires_grad_(False)


class ThawsInside(Thaws):
    """Trains the first layer from the middle of a group of accumulated steps on."""

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        pass

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.current_epoch == 1 and batch_idx == 1:
            (optimizer,) = trainer.optimizers
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)


class ThawsInStep(Normed):
    """Thaws its first layer in the middle of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.net[0].requires_grad_(True)
        return super().training_step(batch, batch_idx)


CALLBACKS: dict[str, type[BaseFinetuning]] = {
    each.__name__: each for each in (Thaws, Freezes, ThawsInside)
}


def fit(
    out: Path,
    strategy: str,
    devices: int,
    callback: str,
    strategy_options: dict[str, Any] | None = None,
    trainer_options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train for three epochs. The weights of each rank, and those at the start."""
    data = MemmapDataModule(
        Points(ROWS), store_dir=out / "stores", batch_size=12 // devices, num_shards=4
    )
    made = make_strategy(strategy, strategy_options)
    trainer = make_trainer(
        out,
        strategy=made,
        devices=devices,
        max_epochs=3,
        callbacks=[CALLBACKS[callback]()],
        **(trainer_options or {}),
    )
    module = Normed()
    begin = weights(module)
    trainer.fit(module, data)
    return {
        "begin": begin,
        "weights": whole_weights(module),
        "steps": module.steps.item(),
    }


ACCUMULATED = {"ThawsInside": {"accumulate_grad_batches": 2}}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("one")
    return {
        name: fit(out, "memmap_superbatch", 1, name, trainer_options=ACCUMULATED.get(name))
        for name in CALLBACKS
    }


@in_processes(2)
def test_thawed_parameters_train_as_on_one_process(
    tmp_path: Path, one: dict[str, dict[str, Any]]
) -> None:
    strategies = "memmap_superbatch_ddp", "memmap_fsdp2"
    for _, (strategy, callback) in each_case(product(strategies, CALLBACKS)):
        found = fit(tmp_path, strategy, 2, callback, trainer_options=ACCUMULATED.get(callback))
        expected = one[callback]["weights"]
        torch.testing.assert_close(found["weights"], expected, rtol=0, atol=2e-6)
        assert not torch.allclose(expected, one[callback]["begin"], rtol=0, atol=1e-2)


@in_processes(2)
def test_parameters_that_thaw_inside_a_step_are_rejected(tmp_path: Path) -> None:
    data = MemmapDataModule(Points(ROWS), store_dir=tmp_path / "stores", batch_size=6, num_shards=4)
    trainer = make_trainer(tmp_path, strategy="memmap_superbatch_ddp", devices=2)
    with pytest.raises(ValueError, match=r"net\.0\.weight, net\.0\.bias"):
        trainer.fit(ThawsInStep(), data)
