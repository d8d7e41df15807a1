"""Manual optimization with several networks, some of which are frozen while others are trained."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memmap import MemmapDataModule
from tests.support.distributed.scenarios.training import make_strategy
from tests.support.models import Points, Regression, make_trainer

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


def whole_weights(module: nn.Module) -> Tensor:
    """All parameters as one vector; sharded ones are gathered, on all ranks."""
    parts = [getattr(p, "full_tensor", lambda p=p: p)() for p in module.parameters()]
    return torch.cat([part.detach().flatten().float() for part in parts])


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
