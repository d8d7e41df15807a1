"""Trains on packs with a loss that is a mean over tokens, on several processes."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_memmap import MemmapDataModule
from lightning_memmap.sampling import Packed
from tests.loading.test_packed_weights import Counted
from tests.support.distributed.scenarios.training import make_strategy
from tests.support.models import make_trainer

LENGTH, VOCABULARY, LR = 24, 53, 2.0
#: Packs of a global batch. The last one of an epoch has fewer.
GLOBAL_BATCH = 8


def token_losses(layers: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The sum of the losses of all targets, and their number."""
    targets = batch["packing"].targets(batch["inner"]["labels"])
    targets = torch.where(targets >= 0, targets % VOCABULARY, targets)
    logits = layers(batch["tokens"] % VOCABULARY)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss, (targets >= 0).sum()


def make_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Tanh(), nn.Linear(16, VOCABULARY))


class TokenMean(L.LightningModule):
    """Returns the mean over the targets of its own batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_layers()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss, count = token_losses(self.layers, batch)
        return loss / count.clamp(min=1)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        raise AssertionError("limit_val_batches is 0")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


def make_data(path: Path, processes: int) -> MemmapDataModule:
    return MemmapDataModule(
        Counted(),
        store_dir=path,
        batch_size=GLOBAL_BATCH // processes,
        num_shards=8,
        sampler=Packed("tokens", LENGTH, weight="num_targets"),
        layout={"inner.labels": {"value": -100}},
    )


def run(out: Path, strategy: str, devices: int, accumulated: int, epochs: int) -> dict[str, Any]:
    """Train, and return the parameters."""
    trainer = make_trainer(
        out,
        strategy=make_strategy(strategy, None),
        devices=devices,
        accumulate_grad_batches=accumulated,
        max_epochs=epochs,
        limit_val_batches=0,
    )
    module = TokenMean()
    trainer.fit(module, make_data(out / "stores", devices))
    parameters = [getattr(each, "full_tensor", lambda e=each: e)() for each in module.parameters()]
    return {
        "parameters": [each.detach().cpu() for each in parameters],
        "steps": trainer.global_step,
    }
