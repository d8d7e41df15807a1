"""Optimizers that are toggled train the weights of one process, under every strategy."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_memmap import MemmapDataModule
from tests.support.models import Points, Regression, make_trainer, whole_weights
from tests.support.processes import each_case, in_processes
from tests.support.training import make_strategy

ROWS = 58


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    generator = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    return generator, critic


class Adversarial(Regression):
    """Two networks and two optimizers, which are toggled.

    Args:
        kind: ``in turn``, each network in every second batch; ``both`` in each batch, with the
            generator's output in the critic's step; ``accumulated``, both with a step of the
            optimizers in every second batch; ``looked at``, a forward pass without gradients
            between the backward pass and the step.
    """

    def __init__(self, kind: str = "both") -> None:
        super().__init__()
        del self.net
        self.generator, self.critic = networks()
        self.kind = kind
        self.automatic_optimization = False
        self.looks: list[float] = []

    def stages(self) -> list[nn.Module]:
        return [self.generator, self.critic]

    def loss_of(self, batch: dict[str, Tensor], number: int) -> Tensor:
        fake = self.generator(batch["x"])
        if number == 0:
            return (self.critic(fake) - 1).square().mean()
        real, made = self.critic(batch["x"]), self.critic(fake.detach())
        return (real - batch["y"]).square().mean() + made.square().mean()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        steps = self.kind != "accumulated" or batch_idx % 2 == 1
        for number, optimizer in enumerate(optimizers):
            if self.kind == "in turn" and batch_idx % 2 != number:
                continue
            self.toggle_optimizer(optimizer)
            self.manual_backward(self.loss_of(batch, number))
            if self.kind == "looked at":
                with torch.no_grad():
                    self.looks.append(self.critic(self.generator(batch["x"])).mean().item())
            if steps:
                optimizer.step()
                optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.generator.parameters(), lr=0.1, momentum=0.5),
            torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.5),
        ]


def fit(
    out: Path,
    strategy: str,
    devices: int,
    kinds: list[str],
    strategy_options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train two epochs for each kind. The weights of each network."""
    found = {}
    for kind in kinds:
        data = MemmapDataModule(
            Points(ROWS), store_dir=out / "stores", batch_size=8 // devices, num_shards=4
        )
        trainer = make_trainer(
            out, strategy=make_strategy(strategy, strategy_options), devices=devices, max_epochs=2
        )
        module = Adversarial(kind)
        trainer.fit(module, data)
        found[kind] = {
            "generator": whole_weights(module.generator),
            "critic": whole_weights(module.critic),
        }
    return found


KINDS = ["in turn", "both", "accumulated", "looked at"]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return fit(tmp_path_factory.mktemp("one"), "auto", 1, KINDS)


def assert_as_one(found: dict[str, Any], one: dict[str, Any]) -> None:
    begin = dict(zip(("generator", "critic"), map(whole_weights, networks()), strict=True))
    for kind in KINDS:
        for name, expected in one[kind].items():
            torch.testing.assert_close(found[kind][name], expected, rtol=0, atol=5e-6, msg=kind)
            # Each network was trained.
            assert not torch.allclose(expected, begin[name], rtol=0, atol=0.05)


IN_TWO_PROCESSES: list[tuple[str, dict[str, Any] | None]] = [
    ("memmap_fsdp2", None),
    ("memmap_fsdp2", {"reshard_after_forward": False, "min_unit_parameters": 1}),
    ("memmap_fsdp2", {"reshard_after_forward": True}),
    ("memmap_superbatch_ddp", {"find_unused_parameters": True}),
]


@in_processes(2)
def test_toggled_optimizers_train_as_on_one_process(tmp_path: Path, one: dict[str, Any]) -> None:
    for _, (strategy, options) in each_case(IN_TWO_PROCESSES):
        assert_as_one(fit(tmp_path, strategy, 2, KINDS, options), one)


@pytest.mark.parametrize("strategy", ["memmap_superbatch", "memmap_model_parallel"])
def test_toggled_optimizers_train_as_on_one_device(
    tmp_path: Path, one: dict[str, Any], strategy: str
) -> None:
    assert_as_one(fit(tmp_path, strategy, 2, KINDS), one)
