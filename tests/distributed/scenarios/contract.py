"""What every strategy of several processes must do for Lightning: one run of each kind.

A new name joins when it stands in `lightning_memmap.strategies.STRATEGIES` and its class is one of
Lightning's parallel strategies. Where it needs arguments to be two processes, or divides the rows
in another way, it has an entry in `ARMS`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_memmap import MemmapDataModule
from lightning_memmap.callbacks import PredictionTable
from tests.distributed.scenarios.training import make_strategy
from tests.models import (
    Manual,
    Plateau,
    Points,
    Regression,
    Scheduled,
    Sgd,
    TwoOptimizers,
    make_trainer,
)

PROCESSES = 2
GLOBAL_BATCH = 10
#: Seven steps of an epoch: five of 10 rows, and the last two, of 7 and 6.
TRAIN = Points(63)
#: Two steps of 10; and of 25 rows, one of 10 and two that share the others.
VAL, TEST = Points(20, 100), Points(25, 200)


@dataclass(frozen=True)
class Arm:
    """How a strategy is two processes on two devices.

    Args:
        options: Arguments of the strategy.
        data_parallel_size: Processes that a global batch is divided over.
    """

    options: dict[str, Any] = field(default_factory=dict)
    data_parallel_size: int = PROCESSES


ARMS = {
    # DDP must be told that an optimizer may freeze the parameters of another.
    "memmap_superbatch_ddp": Arm(
        {"data_devices_per_process": 1, "find_unused_parameters": True},
    ),
    # Each process has a layer, and both have the whole batch.
    "memmap_pipeline": Arm(data_parallel_size=1),
}


def arm_of(name: str) -> Arm:
    """The arm of a name; without an entry, the strategy with no arguments."""
    return ARMS.get(name, Arm())


@dataclass(frozen=True)
class Case:
    """A fit that ends as on one process.

    Args:
        make: Makes the module.
        options: Of the Trainer.
        callbacks: Makes the callbacks, given a directory.
        atol: How far weights may be from those of one process.
    """

    make: Callable[[], Regression] = Regression
    options: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[Path], Sequence[L.Callback]] = lambda out: ()
    # float32 sums in another order, over at most 35 steps of Adam with a rate of 0.05.
    atol: float = 5e-6


CASES = {
    "plain": Case(options={"max_epochs": 2}),
    "accumulation": Case(options={"accumulate_grad_batches": 3, "max_epochs": 2}),
    "clip_norm": Case(Sgd, {"gradient_clip_val": 0.05}),
    "clip_value": Case(
        Sgd, {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}, atol=1e-6
    ),
    "max_steps": Case(options={"max_steps": 9, "max_epochs": 3}),
    "limit_batches": Case(options={"limit_train_batches": 3, "max_epochs": 2}),
    "overfit": Case(options={"overfit_batches": 2, "max_epochs": 2}),
    "fast_dev_run": Case(options={"fast_dev_run": 3}),
    "reload": Case(options={"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2}),
    "val_check_interval": Case(options={"val_check_interval": 2, "max_epochs": 2}),
    "float64": Case(options={"precision": "64-true"}, atol=1e-12),
    # Each process rounds its own mean: 8 bits of a gradient that moves weights by about 0.1.
    "bfloat16": Case(Sgd, {"precision": "bf16-mixed"}, atol=2e-3),
    "manual": Case(Manual, {"max_epochs": 2}),
    "two_optimizers": Case(TwoOptimizers, {"max_epochs": 2}),
    "scheduler": Case(Scheduled),
    "plateau": Case(Plateau, {"max_epochs": 2}),
    "early_stopping": Case(
        options={"max_epochs": 10},
        callbacks=lambda out: [EarlyStopping("val_loss", min_delta=1e9, patience=2)],
    ),
    "best_checkpoint": Case(
        options={"max_epochs": 4, "enable_checkpointing": True},
        callbacks=lambda out: [
            ModelCheckpoint(out / "best", monitor="val_loss", mode="max", filename="{epoch}")
        ],
    ),
}

#: Optimizer steps after which a run of two epochs is resumed: inside the first epoch, before the
#: uneven step that ends it, at its end, and inside the second.
RESUMED = (3, 6, 7, 10)


def make_data(out: Path, batch_size: int) -> MemmapDataModule:
    return MemmapDataModule(TRAIN, VAL, TEST, TEST, store_dir=out / "stores", batch_size=batch_size)


class Evaluated(Regression):
    """Regression whose losses are metrics, which count each row over all processes.

    Lightning's own mean of a logged loss is wrong where processes have differing numbers of rows:
    it rounds their mean down.
    """

    def __init__(self) -> None:
        super().__init__()
        self.means = nn.ModuleDict({"val": MeanMetric(), "test": MeanMetric()})

    def step(self, batch: dict[str, Tensor], stage: str) -> Tensor:
        self.seen.setdefault(stage, []).append(batch["row"].tolist())
        errors = (self(batch["x"]) - batch["y"]).square()
        self.means[stage].update(errors)
        self.log(f"{stage}_loss", self.means[stage])
        return errors.mean()


class Runs:
    """Makes Trainers and data, and tells what came of a run.

    Args:
        out: Directory of the stores and checkpoints.
        name: The strategy, or ``auto`` for the reference: one process with the whole batch.
    """

    def __init__(self, out: Path, name: str) -> None:
        self.out = out
        self._name = name

    def make(self, **options: Any) -> tuple[L.Trainer, MemmapDataModule]:
        if self._name == "auto":
            return make_trainer(self.out, **options), make_data(self.out, GLOBAL_BATCH)
        arm = arm_of(self._name)
        strategy = make_strategy(self._name, arm.options or None)
        trainer = make_trainer(self.out, strategy=strategy, devices=PROCESSES, **options)
        return trainer, make_data(self.out, GLOBAL_BATCH // arm.data_parallel_size)

    def fit(self, case: Case, save: str, checkpoint: Path | None = None) -> dict[str, Any]:
        """Fit, and save the weights as a checkpoint ``<save>.ckpt``."""
        trainer, data = self.make(**case.options, callbacks=[*case.callbacks(self.out)])
        module = case.make()
        found = set()
        module.net[0].register_forward_hook(lambda _, args, output: found.add(output.dtype))
        trainer.fit(module, data, ckpt_path=checkpoint, weights_only=checkpoint and True)
        # What a callback decided by a metric must not differ between processes.
        best: Any = getattr(trainer.checkpoint_callback, "best_model_path", "")
        trainer.save_checkpoint(self.out / f"{save}.ckpt")
        return {
            "seen": module.seen,
            "steps": trainer.global_step,
            "epoch": trainer.current_epoch,
            "best": Path(best).name,
            "val_loss": float(trainer.callback_metrics.get("val_loss", 0)),
            "dtypes": found,
            "sharding": trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1},
        }


def run(out: Path, name: str, others: str | None = None) -> dict[str, Any]:
    """All that is asked of a strategy.

    Args:
        out: Directory of the stores and checkpoints.
        name: The strategy, or ``auto`` for the reference.
        others: Directory of the reference, from whose checkpoint a run goes on.
    """
    runs = Runs(out, name)
    found: dict[str, Any] = {case: runs.fit(CASES[case], case) for case in CASES}
    saver = ModelCheckpoint(out / "saved", "{step}", every_n_train_steps=1, save_top_k=-1)
    whole = Case(
        Scheduled, {"max_epochs": 2, "enable_checkpointing": True}, callbacks=lambda _: [saver]
    )
    resumed = Case(Scheduled, {"max_epochs": 2})
    found["whole"] = runs.fit(whole, "whole")
    for step in RESUMED:
        checkpoint = out / "saved" / f"step={step}.ckpt"
        found[f"resumed {step}"] = runs.fit(resumed, f"resumed {step}", checkpoint)
    if others is not None:
        checkpoint = Path(others) / "saved" / "step=3.ckpt"
        found["taken over"] = runs.fit(resumed, "taken over", checkpoint)
    trainer, data = runs.make()
    module = Evaluated()
    (validated,) = trainer.validate(module, data, verbose=False)
    (tested,) = trainer.test(
        module, data, ckpt_path=out / "plain.ckpt", weights_only=True, verbose=False
    )
    trainer.callbacks.append(PredictionTable(out / "table"))
    predictions = trainer.predict(Regression(), data) or []
    found["evaluation"] = {
        "metrics": {**validated, **tested},
        "seen": module.seen,
        "predicted": {
            key: torch.cat([batch[key] for batch in predictions]) for key in ("row", "y")
        },
        "sharding": trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1},
    }
    return found
