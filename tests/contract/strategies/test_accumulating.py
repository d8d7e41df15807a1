"""``memmap_fsdp2`` reduces accumulated gradients once a step, and trains as one process."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_memmap import MemmapDataModule
from lightning_memmap.strategies import FSDP2Strategy
from tests.strategies.test_fsdp2 import Deep
from tests.support.models import Points, make_trainer, whole_weights
from tests.support.processes import launch

#: The last two micro-batches are smaller, and have odd numbers of rows.
ROWS, BATCH, GROUP = 111, 12, 3


class Accumulating(Deep):
    """Counts the gradients that are there when an optimizer steps.

    Args:
        stops_at: The micro-batch of the first epoch at which the epoch ends.
        fails_at: The micro-batch of the first epoch at which the step raises.
    """

    def __init__(
        self,
        stops_at: int | None = None,
        fails_at: int | None = None,
    ) -> None:
        super().__init__()
        self.stops_at = stops_at
        self.fails_at = fails_at
        self.num_grads: list[int] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.current_epoch == 0 and batch_idx == self.fails_at:
            raise ArithmeticError("a step that fails")
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if self.current_epoch == 0 and batch_idx == self.stops_at else None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.num_grads.append(sum(p.grad is not None for p in self.parameters()))


class ByHand(Accumulating):
    """Keeps the gradients of all micro-batches of a step, the last one's too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(self.net[0], self.net[1], *self.blocks, self.net[2])
        del self.blocks
        self.automatic_optimization = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        strategy: Any = self.trainer.strategy
        with getattr(strategy, "block_backward_sync", nullcontext)():
            self.manual_backward(loss / GROUP)
        if batch_idx % GROUP == GROUP - 1:
            optimizer.step()
            optimizer.zero_grad()

    def on_train_epoch_end(self) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()


def fit(
    out: Path,
    processes: int,
    module: nn.Module,
    trainer_options: dict[str, Any] | None = None,
    **options: Any,
) -> L.Trainer:
    strategy: Any = (
        FSDP2Strategy(wrap_classes=["Block"], **options) if processes > 1 else "memmap_superbatch"
    )
    trainer = make_trainer(
        out,
        strategy=strategy,
        devices=processes,
        **{
            "max_epochs": 2,
            "accumulate_grad_batches": GROUP,
            "limit_val_batches": 0,
            **(trainer_options or {}),
        },
    )
    data = MemmapDataModule(
        Points(ROWS), Points(12), store_dir=out / "stores", batch_size=BATCH // processes
    )
    trainer.fit(module, data)
    return trainer


def interrupted(out: Path, processes: int, **options: Any) -> Accumulating:
    """A fit that fails inside a group of micro-batches, and another one of the same module."""
    module = Accumulating(fails_at=4)
    with suppress(ArithmeticError):
        fit(out, processes, module, **options)
    module.fails_at = None
    fit(out, processes, module, **options)
    return module


def run(out: Path, devices: int) -> dict[str, Any]:
    """All fits. Weights, the reductions of each, and the gradients at each optimizer step."""
    clip = {"gradient_clip_val": 0.2}
    validated = {
        "limit_val_batches": 1,
        "val_check_interval": 4,
        "enable_checkpointing": True,
        "callbacks": [ModelCheckpoint(out / "saved", "{step}", save_top_k=-1)],
    }
    cases: dict[str, tuple[Callable[[], Accumulating], dict[str, Any], dict[str, Any]]] = {
        "plain": (Accumulating, {}, {}),
        "each": (Accumulating, {}, {"sync_each_micro_batch": True}),
        "clipped": (Accumulating, clip, {}),
        "by hand": (ByHand, {"accumulate_grad_batches": 1}, {}),
        "stopped": (lambda: Accumulating(stops_at=7), {}, {}),
        "validated": (Accumulating, validated, {"save_distributed_checkpoint": True}),
        "bf16": (Accumulating, {"precision": "bf16-mixed"}, {}),
        "narrow": (Accumulating, {"precision": "bf16-mixed"}, {"reduce_dtype": "bfloat16"}),
    }
    if devices == 4:
        cases = {"hybrid": (Accumulating, clip, {"replicate_size": 2})}
    found: dict[str, Any] = {}
    count = 0
    reduce_scatter = dist.reduce_scatter_single

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return reduce_scatter(*args, **kwargs)

    with patch.object(dist, "reduce_scatter_single", counting):
        for name, (make, trainer_options, options) in cases.items():
            count = 0
            module = make()
            fit(out, devices, module, trainer_options, **options)
            found[name] = {
                "weights": whole_weights(module),
                "reductions": count,
                "gradients": set(module.num_grads),
                "steps": len(module.num_grads),
                "micro-batches": len(module.losses),
                "rows": {len(rows) for rows in module.seen["train"]},
            }
        if devices < 4:
            module = interrupted(out, devices)
            found["interrupted"] = {"weights": whole_weights(module)}
    return found


ATOL = 2e-6
#: Three blocks, and what is around them.
UNITS = 4


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (found,) = launch(run, tmp_path_factory.mktemp("one"), processes=1, devices=1)
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(run, tmp_path_factory.mktemp("two"), processes=2, devices=2)


@pytest.mark.parametrize(
    ("case", "atol"),
    [
        ("plain", ATOL),
        ("each", ATOL),
        ("clipped", ATOL),
        ("by hand", ATOL),
        ("stopped", ATOL),
        ("validated", ATOL),
        ("interrupted", ATOL),
        # 8 bits of gradients, of weights that move by about 0.1.
        ("bf16", 5e-3),
        ("narrow", 5e-3),
    ],
)
def test_accumulated_steps_are_those_of_one_process(
    one: dict[str, Any], two: list[dict[str, Any]], case: str, atol: float
) -> None:
    assert len({number for rank in two for number in rank["plain"]["rows"]}) > 2
    for rank in two:
        torch.testing.assert_close(rank[case]["weights"], one[case]["weights"], rtol=0, atol=atol)
        for key in ("gradients", "steps"):
            assert rank[case].get(key) == one[case].get(key)
    if case in ("clipped", "by hand", "stopped"):
        assert not torch.allclose(one[case]["weights"], one["plain"]["weights"], rtol=0, atol=1e-3)


def test_gradients_are_reduced_once_a_step(two: list[dict[str, Any]]) -> None:
    for rank in two:
        for case in ("plain", "clipped", "by hand", "stopped", "validated", "bf16"):
            assert rank[case]["reductions"] == rank[case]["steps"] * UNITS, case
        # Sums of bfloat16 would lose digits.
        for case in ("each", "narrow"):
            assert rank[case]["reductions"] == rank[case]["micro-batches"] * UNITS


def test_copies_of_shards_accumulate_as_one_process(tmp_path: Path, one: dict[str, Any]) -> None:
    for rank in launch(run, tmp_path, processes=4, devices=4):
        found = rank["hybrid"]
        torch.testing.assert_close(found["weights"], one["clipped"]["weights"], rtol=0, atol=ATOL)
        assert found["reductions"] == found["steps"] * UNITS
