"""Lightning's ModelParallelStrategy, with nothing of this pack but the data: tensor parallel, and
tensor parallel with FSDP2 on a mesh of two dimensions."""

from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torchmetrics import MeanMetric

from lightning_memmap import MemmapDataModule
from tests.support.models import Points, Regression, make_trainer, weights
from tests.support.processes import global_batches, launch
from tests.support.versions import weights_only

EPOCHS, GLOBAL_BATCH = 2, 16
#: Of ten steps; they divide evenly. Lightning weighs processes, not rows.
ROWS = 160
#: Inside the second epoch.
RESUMED = 13


class Parallel(Regression):
    """Its first layer is divided by columns and its last by rows, over the tensor-parallel group;
    both are sharded over the data-parallel one."""

    def __init__(self) -> None:
        super().__init__()
        self.test_mean = MeanMetric()

    def configure_model(self) -> None:
        # One process has no mesh; and the second stage finds the module divided already.
        if self.device_mesh is None or isinstance(self.net[0].weight, DTensor):
            return
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
        if self.device_mesh["data_parallel"].size() > 1:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.seen.setdefault("test", []).append(batch["row"].tolist())
        self.test_mean.update(nn.functional.mse_loss(self.net(batch["x"]), batch["y"]))
        self.log("test_mean", self.test_mean)


def fit_and_resume(
    out: Path, name: str = "auto", data_parallel: int = 1, tensor_parallel: int = 1
) -> dict[str, Any]:
    """Train and test under a strategy of Lightning, and train once more from a step inside the
    second epoch. The weights are those of ``whole.ckpt`` and ``resumed.ckpt``."""

    def make(**options: Any) -> tuple[L.Trainer, MemmapDataModule]:
        strategy: Any = name
        if name == "fsdp":
            strategy = FSDPStrategy(auto_wrap_policy={nn.Linear}, state_dict_type="full")
        elif name == "model_parallel":
            strategy = ModelParallelStrategy(
                data_parallel_size=data_parallel,
                tensor_parallel_size=tensor_parallel,
                save_distributed_checkpoint=False,
            )
        data = MemmapDataModule(
            Points(ROWS),
            None,
            Points(ROWS, 1000),
            store_dir=out / "stores",
            batch_size=GLOBAL_BATCH // data_parallel,
        )
        devices = data_parallel * tensor_parallel
        options |= {"devices": devices, "max_epochs": EPOCHS, "limit_val_batches": 0}
        return make_trainer(out, strategy=strategy, **options), data

    saver = ModelCheckpoint(out / "saved", "{step}", every_n_train_steps=RESUMED)
    trainer, data = make(callbacks=[saver], enable_checkpointing=True)
    module = Parallel()
    trainer.fit(module, data)
    trainer.save_checkpoint(out / "whole.ckpt")
    first: Any = module.net[0].weight
    held = first.to_local() if isinstance(first, DTensor) else first
    shape = tuple(held.shape)
    (metrics,) = trainer.test(module, data, verbose=False)
    sampler = trainer.distributed_sampler_kwargs
    trainer, data = make()
    resumed = Parallel()
    checkpoint = out / "saved" / f"step={RESUMED}.ckpt"
    trainer.fit(resumed, data, ckpt_path=checkpoint, **weights_only(False))
    trainer.save_checkpoint(out / "resumed.ckpt")
    return {
        "seen": module.seen,
        "resumed": resumed.seen,
        "held": shape,
        "metrics": metrics,
        "sampler": sampler,
    }


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("one")
    return out, fit_and_resume(out)


@pytest.mark.parametrize(("data_size", "tensor_size"), [(1, 2), (2, 2)])
def test_groups_have_one_batch_and_train_as_one_process(
    tmp_path: Path, one: tuple[Path, dict[str, Any]], data_size: int, tensor_size: int
) -> None:
    check(tmp_path, one, "model_parallel", data_size, tensor_size)


def check(
    tmp_path: Path,
    one: tuple[Path, dict[str, Any]],
    name: str,
    data_size: int,
    tensor_size: int,
    accelerator: str | None = None,
) -> list[dict[str, Any]]:
    """Compare a run of several processes with that of one, whose files and report are given."""
    ranks = launch(
        fit_and_resume,
        tmp_path,
        processes=data_size * tensor_size,
        accelerator=accelerator,
        name=name,
        data_parallel=data_size,
        tensor_parallel=tensor_size,
    )
    if name == "model_parallel":
        # Sixteen columns are divided over the group, and their rows over the data-parallel ranks.
        shape = (16 // data_size // tensor_size, 8)
        assert [rank["held"] for rank in ranks] == [shape] * len(ranks)
    groups = [ranks[first : first + tensor_size] for first in range(0, len(ranks), tensor_size)]
    for number, group in enumerate(groups):
        for rank in group:
            assert rank["sampler"] == {"num_replicas": data_size, "rank": number}
            assert rank["seen"] == group[0]["seen"]
            assert rank["resumed"]["train"] == rank["seen"]["train"][RESUMED:]
    out, expected = one
    firsts = [group[0]["seen"] for group in groups]
    assert global_batches([seen["train"] for seen in firsts]) == expected["seen"]["train"]
    assert sorted(chain(*chain(*(seen["test"] for seen in firsts)))) == list(
        range(1000, 1000 + ROWS)
    )
    found = load(tmp_path / "whole.ckpt")
    assert torch.equal(load(tmp_path / "resumed.ckpt"), found)
    # float32 sums in another order, over 20 steps of Adam with a rate of 0.05.
    torch.testing.assert_close(found, load(out / "whole.ckpt"), rtol=0, atol=5e-6)
    assert not torch.allclose(found, weights(Parallel()), atol=1e-2)
    for rank in ranks:
        assert rank["metrics"] == pytest.approx(expected["metrics"], abs=1e-5)
    return ranks


def load(path: Path) -> torch.Tensor:
    """The weights of a checkpoint, in the plain module."""
    return weights(Parallel.load_from_checkpoint(path, map_location="cpu", **weights_only(True)))
