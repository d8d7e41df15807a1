"""Dropout masks differ between ranks and replicas, and a resumed fit draws the same again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from lightning_memmap import MemmapDataModule
from lightning_memmap.callbacks import StepSeeder
from tests.support.models import IS_SIMULATED, Points, SaveAt, make_trainer, whole_parameters
from tests.support.processes import each_case, launch
from tests.support.training import make_strategy

STEPS, STOP = 6, 2


class Dropping(L.LightningModule):
    """A network with dropout, which notes the masks that it has drawn in training."""

    def __init__(self, is_tensor_parallel: bool = False) -> None:
        super().__init__()
        self.is_tensor_parallel = is_tensor_parallel
        layers = nn.Linear(8, 16), nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 1)
        self.net = nn.Sequential(*layers)
        #: By epoch and batch.
        self.masks: dict[tuple[int, int], list[Tensor]] = {}
        self.net[2].register_forward_hook(self._note)

    def _note(self, module: Any, args: Any, output: Tensor) -> None:
        if module.training and torch.is_grad_enabled():
            loop = self._trainer.fit_loop
            step = loop.epoch_progress.current.processed, loop.epoch_loop.batch_idx
            self.masks.setdefault(step, []).append(output.detach() != 0)

    def configure_model(self) -> None:
        if not self.is_tensor_parallel or isinstance(self.net[0].weight, DTensor):
            return
        plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def stages(self) -> list[nn.Module]:
        return [self.net[:3], self.net[3]]

    def loss(self, output: Tensor, batch: dict[str, Any]) -> Tensor:
        return nn.functional.mse_loss(output, batch["y"])

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return self.loss(self(batch["x"]), batch)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        # Random numbers in between change nothing.
        torch.rand(3)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def stop(path: Path) -> SaveAt:
    """Save a checkpoint inside the second epoch, and stop."""
    return SaveAt(STEPS + STOP + 1, path, ends_run=True)


def run(
    out: Path, strategy: str, devices: int, strategy_options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train once from beginning to end, and once with an interruption."""
    path = out / "some.ckpt"
    results: list[dict[str, Any]] = []
    for extra, resumed in ([], None), ([stop(path)], None), ([], path):
        torch.manual_seed(3)
        callbacks: list[Callback] = [*extra]
        chosen: Any = strategy
        if strategy == "model_parallel":
            chosen = ModelParallelStrategy(
                **(strategy_options or {}), save_distributed_checkpoint=False
            )
            callbacks.append(StepSeeder())
        elif strategy_options is not None:
            chosen = make_strategy(strategy, strategy_options)
        trainer = make_trainer(
            out, strategy=chosen, devices=devices, max_epochs=2, callbacks=callbacks
        )
        module = Dropping(strategy == "model_parallel")
        # The numbers that a program has drawn before the fit change nothing.
        torch.rand(len(results))
        points = Points(STEPS * 8 * (strategy_options or {}).get("data_parallel_size", devices))
        data = MemmapDataModule(points, points, store_dir=out / "stores", batch_size=8)
        trainer.fit(module, data, ckpt_path=resumed)
        # A pipeline runs its first batch once more before, to see the shapes of its outputs.
        num = min(map(len, module.masks.values()))
        masks = {step: found[-num:] for step, found in module.masks.items()}
        results.append({"weights": whole_parameters(module), "masks": masks})
    return {"whole": results[0], "resumed": results[2]}


def check_resumed(result: dict[str, Any]) -> None:
    """Compare the masks and weights of a resumed fit with those of a whole one, bit for bit."""
    whole, resumed = result["whole"], result["resumed"]
    assert len(whole["masks"]) == 2 * STEPS
    assert {*resumed["masks"]} == {(1, step) for step in range(STOP + 1, STEPS)}
    for step, masks in resumed["masks"].items():
        assert are_equal(masks, whole["masks"][step])
    assert whole["weights"]
    for name, value in whole["weights"].items():
        assert torch.equal(resumed["weights"][name], value)


def are_equal(masks: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(masks) == len(others) and all(map(torch.equal, masks, others))


def check_all_differ(sequences: Sequence[Sequence[torch.Tensor]]) -> None:
    """Check that no two masks of a list are equal, in all steps and replicas."""
    masks = [mask for sequence in sequences for mask in sequence]
    for index, mask in enumerate(masks):
        assert 0.3 < mask.float().mean() < 0.7
        assert not any(torch.equal(mask, other) for other in masks[:index])


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("memmap_superbatch", 2), ("memmap_dp", 2), ("memmap_independent", 1)],
)
def test_masks_of_one_process(tmp_path: Path, strategy: str, devices: int) -> None:
    result = run(tmp_path, strategy, devices)
    check_resumed(result)
    masks = result["whole"]["masks"].values()
    assert {len(replicas) for replicas in masks} == {devices if strategy == "memmap_dp" else 1}
    check_all_differ([*masks])


class Compiled(L.LightningModule):
    """Notes its losses, which only its masks change, because nothing else does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 1))
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch["x"]), batch["y"])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accelerator", "options"),
    [
        ("cpu", {"backend": "aot_eager"}),
        # A CUDA graph reads the seed when it is replayed.
        pytest.param(
            "gpu",
            {"mode": "reduce-overhead"},
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
                pytest.mark.skipif(IS_SIMULATED, reason="nothing is compiled for simulated GPUs"),
            ],
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`")
def test_masks_of_a_compiled_module_differ_and_are_resumed(
    tmp_path: Path, accelerator: str, options: dict[str, str]
) -> None:
    path = tmp_path / "some.ckpt"
    data = MemmapDataModule(
        [Points(1)[0]] * (STEPS * 8), store_dir=tmp_path / "stores", batch_size=8
    )
    losses: list[list[float]] = []
    for callbacks, resumed in ([], None), ([stop(path)], None), ([], path):
        torch.manual_seed(3)
        module = Compiled()
        trainer = make_trainer(
            tmp_path,
            accelerator=accelerator,
            strategy="memmap_superbatch",
            devices=1,
            max_epochs=2,
            callbacks=callbacks,
        )
        compiled: Any = torch.compile(module, **options)
        trainer.fit(compiled, data, ckpt_path=resumed)
        losses.append(module.losses)
    assert len({*losses[0]}) == 2 * STEPS
    assert losses[2] == losses[0][STEPS + STOP + 1 :]


#: By name, the options of strategies of two processes.
IN_TWO_PROCESSES: dict[str, dict[str, Any] | None] = {
    "memmap_superbatch_ddp": None,
    "memmap_fsdp2": None,
    "memmap_pipeline": {"data_parallel_size": 2},
}


def run_each(out: Path) -> dict[str, Any]:
    """Train under each strategy of two processes."""
    return {
        name: run(out / name, name, 2, options)
        for _, (name, options) in each_case(IN_TWO_PROCESSES.items())
    }


def test_masks_of_two_ranks_differ(tmp_path: Path) -> None:
    ranks = launch(run_each, tmp_path, processes=2)
    for name in IN_TWO_PROCESSES:
        results = [rank[name] for rank in ranks]
        for result in results:
            check_resumed(result)
        check_all_differ([masks for r in results for masks in r["whole"]["masks"].values()])


def test_masks_are_equal_within_a_tensor_parallel_group(tmp_path: Path) -> None:
    ranks = launch(
        run,
        tmp_path,
        processes=4,
        strategy="model_parallel",
        devices=4,
        strategy_options={"data_parallel_size": 2, "tensor_parallel_size": 2},
    )
    for rank in ranks:
        check_resumed(rank)
    for first, second in (ranks[:2], ranks[2:]):
        for step, masks in first["whole"]["masks"].items():
            assert are_equal(masks, second["whole"]["masks"][step])
    groups = ranks[0], ranks[2]
    check_all_differ([masks for rank in groups for masks in rank["whole"]["masks"].values()])
