"""On several processes, a mean over tokens is over all tokens of an optimizer step."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_memmap import MemmapDataModule
from lightning_memmap.sampling import Packed
from tests.loading.test_packed_weights import Counted
from tests.support.models import make_trainer, whole_parameters
from tests.support.processes import each_case, launch
from tests.support.training import make_strategy

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
        sampler=Packed("tokens", LENGTH),
        weight="num_targets",
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
    return {"parameters": [*whole_parameters(module).values()], "steps": trainer.global_step}


EPOCHS = 2


def expected(path: Path, accumulated: int) -> tuple[list[torch.Tensor], int]:
    """The parameters after plain steps on the mean over the tokens of all micro-batches."""
    data = make_data(path, 1)
    data.prepare_data()
    data.setup("fit")
    loader = data.train_dataloader()
    layers = make_layers()
    optimizer = torch.optim.SGD(layers.parameters(), lr=LR)
    num_steps = 0
    for _ in range(EPOCHS):
        batches = [*loader]
        for first in range(0, len(batches), accumulated):
            parts = [token_losses(layers, batch) for batch in batches[first : first + accumulated]]
            loss = torch.stack([part for part, _ in parts]).sum()
            optimizer.zero_grad()
            (loss / sum(int(count) for _, count in parts)).backward()
            optimizer.step()
            num_steps += 1
    return [parameter.detach() for parameter in layers.parameters()], num_steps


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize(
    ("strategy", "devices"), [("memmap_superbatch", 2), ("memmap_dp", 1), ("memmap_dp", 4)]
)
def test_step_of_one_process_is_the_mean_over_all_of_its_tokens(
    tmp_path: Path, strategy: str, devices: int, accumulated: int
) -> None:
    parameters, num_steps = expected(tmp_path / "expected", accumulated)
    result = run(tmp_path / "run", strategy, devices, accumulated, EPOCHS)
    assert result["steps"] == num_steps
    for found, right in zip(result["parameters"], parameters, strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-5)


IN_TWO_PROCESSES = [
    ("memmap_superbatch_ddp", 1), ("memmap_superbatch_ddp", 3), ("memmap_fsdp2", 3)
]  # fmt: skip


def run_each(out: Path) -> dict[str, Any]:
    """Train under each strategy of two processes."""
    return {
        str(number): run(out, strategy, 2, accumulated, EPOCHS)
        for number, (strategy, accumulated) in each_case(IN_TWO_PROCESSES)
    }


def test_step_of_two_processes_is_the_mean_over_all_of_its_tokens(tmp_path: Path) -> None:
    ranks = launch(run_each, tmp_path, processes=2)
    initial = [*make_layers().parameters()]
    for number, (_, accumulated) in enumerate(IN_TWO_PROCESSES):
        parameters, num_steps = expected(tmp_path / "expected", accumulated)
        for result in (rank[str(number)] for rank in ranks):
            assert result["steps"] == num_steps
            pairs = zip(result["parameters"], parameters, initial, strict=True)
            for found, right, before in pairs:
                assert (right - before).abs().max() > 0.05
                torch.testing.assert_close(found, right, rtol=0, atol=1e-5)
