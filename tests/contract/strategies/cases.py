"""The contract of all strategies: which strategies there are, and which fits each must support.

From these tables come the tests of one process (`test_contract`), of several
(`test_contract_in_processes`) and of members (`tests.strategies.test_independent`). A new strategy
joins with an entry in `CONTRACTS`; a test fails until it has one.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_memmap import MemmapDataModule
from lightning_memmap.strategies import STRATEGIES
from tests.support.models import (
    ACCELERATOR_VARIABLE,
    Manual,
    Plateau,
    Players,
    Points,
    Regression,
    Scheduled,
    SeveralLosses,
    Sgd,
    TwoOptimizers,
    make_trainer,
)

DEVICES = 2
GLOBAL_BATCH = 10
#: Seven steps of an epoch: five of 10 rows, and the last two, of 7 and 6.
TRAIN = Points(63)
#: Two steps of 10; and of 25 rows, one of 10 and two that share the others.
VAL, TEST = Points(20, 100), Points(25, 200)

#: The reference: Lightning's own strategy on one device, with the whole global batch.
REFERENCE = "auto"


@dataclass(frozen=True)
class Contract:
    """How a strategy runs on two devices.

    Args:
        strategy: The registered name.
        runs_in: One process, several processes, or one process per member.
        options: Arguments of the strategy; without any, the Trainer is given the name.
        data: Arguments of the data module.
        num_batches: Batches that a global batch is divided into: one per data device.
        calls_per_step: How often a process calls the module's ``training_step`` in a step.
    """

    strategy: str
    runs_in: Literal["one", "several", "members"]
    options: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    num_batches: int = DEVICES
    calls_per_step: int = 1

    def make_strategy(self) -> Any:
        """What the Trainer is given."""
        return self.make_class()(**self.options) if self.options else self.strategy

    def trainer_options(self) -> dict[str, Any]:
        """The strategy and its two devices, for which a single GPU may stand twice."""
        if os.environ.get(ACCELERATOR_VARIABLE) == "gpu" and torch.cuda.device_count() < DEVICES:
            named = {"data_devices": ["cuda:0"] * DEVICES, **self.options}
            return {"strategy": self.make_class()(**named)}
        return {"strategy": self.make_strategy(), "devices": DEVICES}

    def make_class(self) -> Any:
        """The class of the strategy."""
        return {name: made for name, made, _ in STRATEGIES}[self.strategy]


CONTRACTS = {
    "memmap_superbatch": Contract("memmap_superbatch", "one"),
    # With prefetched steps, which on a CPU are not the default.
    "memmap_superbatch+prefetch": Contract("memmap_superbatch", "one", data={"prefetch": 3}),
    "memmap_dp": Contract("memmap_dp", "one", calls_per_step=DEVICES),
    "memmap_model_parallel": Contract("memmap_model_parallel", "one"),
    # DDP must know that an optimizer may freeze the parameters of another.
    "memmap_superbatch_ddp": Contract(
        "memmap_superbatch_ddp",
        "several",
        {"data_devices_per_process": 1, "find_unused_parameters": True},
    ),
    "memmap_fsdp2": Contract("memmap_fsdp2", "several"),
    # Each process has a layer, and both have the whole batch.
    "memmap_pipeline": Contract("memmap_pipeline", "several", num_batches=1),
    "memmap_independent": Contract("memmap_independent", "members"),
}


def contracts_in(runs_in: str) -> list[str]:
    """The keys of the contracts that run in one process, in several, or in one per member."""
    return [key for key, contract in CONTRACTS.items() if contract.runs_in == runs_in]


@dataclass(frozen=True)
class Case:
    """A fit that must end as on one device.

    Args:
        make: Makes the module.
        options: Options of the Trainer.
        callbacks: Makes the callbacks, given a directory.
        atol: How far the weights of several processes may be from those of one device.
        reference: The strategy on one device. Lightning's own divides the losses of the last group
            of accumulated steps by their full number; ours is checked against plain PyTorch.
        in_several: Whether strategies of several processes must support it: ``each`` of them; or
            ``one`` for all, since it differs in what the Trainer's loops do, which are the same
            for all; or ``none``.
    """

    make: Callable[[], Regression] = Regression
    options: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[Path], Sequence[L.Callback]] = lambda out: ()
    # float32 sums in another order, over at most 35 steps of Adam with a rate of 0.05.
    atol: float = 5e-6
    reference: str = REFERENCE
    in_several: Literal["each", "one", "none"] = "each"

    def trainer_options(self, key: str) -> dict[str, Any]:
        """Return the options of the Trainer that runs this under a contract or the reference."""
        return {**self.options, **({"strategy": self.reference} if key == REFERENCE else {})}


CASES = {
    "plain": Case(options={"max_epochs": 2}),
    "accumulation": Case(
        options={"accumulate_grad_batches": 3, "max_epochs": 2}, reference="memmap_superbatch"
    ),
    "accumulation_even": Case(
        options={"accumulate_grad_batches": 2}, reference="memmap_superbatch", in_several="one"
    ),
    "clip_norm": Case(Sgd, {"gradient_clip_val": 0.05}),
    "clip_value": Case(
        Sgd, {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}, atol=1e-6
    ),
    "max_steps": Case(options={"max_steps": 9, "max_epochs": 3}),
    "limit_batches": Case(options={"limit_train_batches": 3, "max_epochs": 2}, in_several="one"),
    "limit_fraction": Case(options={"limit_train_batches": 0.5, "max_epochs": 2}, in_several="one"),
    "overfit": Case(options={"overfit_batches": 2, "max_epochs": 2}, in_several="one"),
    "fast_dev_run": Case(options={"fast_dev_run": 3}, in_several="one"),
    "fast_dev_run_once": Case(options={"fast_dev_run": True}, in_several="one"),
    "reload": Case(options={"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3}),
    "val_check_interval": Case(
        options={"val_check_interval": 2, "max_epochs": 2}, in_several="one"
    ),
    "val_check_fraction": Case(options={"val_check_interval": 0.5}, in_several="one"),
    "no_sanity_check": Case(options={"num_sanity_val_steps": 0}, in_several="one"),
    "no_inference_mode": Case(options={"inference_mode": False}, in_several="one"),
    "float64": Case(options={"precision": "64-true"}, atol=1e-12),
    # Each process rounds its own mean: 8 bits of a gradient that moves weights by about 0.1.
    "bfloat16": Case(Sgd, {"precision": "bf16-mixed"}, atol=2e-3),
    # Weights of 8 bits are rounded differently with each order of additions.
    "bfloat16_weights": Case(options={"precision": "bf16-true"}, in_several="none"),
    "manual": Case(Manual, {"max_epochs": 2}),
    "two_optimizers": Case(TwoOptimizers, {"max_epochs": 2}),
    "several_losses": Case(SeveralLosses, {"max_epochs": 2}),
    "players": Case(Players, {"max_epochs": 2}),
    "scheduler": Case(Scheduled, {"max_epochs": 2}),
    "plateau": Case(Plateau, {"max_epochs": 2}),
    "early_stopping": Case(
        options={"max_epochs": 10},
        callbacks=lambda out: [EarlyStopping("val_loss", min_delta=1e9, patience=2)],
        in_several="one",
    ),
    "best_checkpoint": Case(
        options={"max_epochs": 4, "enable_checkpointing": True},
        callbacks=lambda out: [
            ModelCheckpoint(out / "best", monitor="val_loss", mode="max", filename="{epoch}")
        ],
    ),
}


def cases_in_several(key: str) -> list[str]:
    """The cases that a strategy of several processes must support; for the reference, all that
    any of them must."""
    kinds = ["each"] if key in contracts_in("several")[1:] else ["each", "one"]
    return [name for name, case in CASES.items() if case.in_several in kinds]


def make_run(key: str, path: Path, **options: Any) -> tuple[L.Trainer, MemmapDataModule]:
    """Make a Trainer and its data.

    Args:
        key: A key of `CONTRACTS`, or `REFERENCE`.
        path: Directory of the stores, which all runs there share.
        options: Options of the Trainer.
    """
    if key == REFERENCE:
        return make_trainer(path, **options), make_data(path, GLOBAL_BATCH)
    contract = CONTRACTS[key]
    trainer = make_trainer(path, **contract.trainer_options(), **options)
    return trainer, make_data(path, GLOBAL_BATCH // contract.num_batches, **contract.data)


def make_data(path: Path, batch_size: int, **options: Any) -> MemmapDataModule:
    """The data of all contracts, with a batch size per data device."""
    datasets = TRAIN, VAL, TEST, TEST
    return MemmapDataModule(*datasets, store_dir=path / "stores", batch_size=batch_size, **options)
