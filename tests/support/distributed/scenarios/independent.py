"""Members that train by themselves: beside lone runs, resumed, and failing in several ways."""

import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from time import sleep
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_memmap import MemmapDataModule
from lightning_memmap.errors import MemberError
from lightning_memmap.sampling import KFold
from lightning_memmap.strategies import IndependentStrategy, MemberResults, read_results
from tests.support.models import Points, Regression, make_trainer, weights
from tests.support.versions import weights_only

ROWS = 63
TEST_ROWS = 20


class Member(Regression):
    """A network of the member's own size, with dropout."""

    def __init__(self, member: int) -> None:
        super().__init__()
        L.seed_everything(100 + member, verbose=False)
        width = 16 + 4 * member
        self.net = nn.Sequential(
            nn.Linear(8, width), nn.Tanh(), nn.Dropout(0.1), nn.Linear(width, 1)
        )


def make_data(out: Path, folds: int, member: int | None = None) -> MemmapDataModule:
    return MemmapDataModule(
        Points(ROWS),
        test_dataset=Points(TEST_ROWS, 200),
        store_dir=out / "stores",
        batch_size=5,
        subset=None if folds is None else KFold(folds, shuffle=False),
        member=member,
    )


def options_of(out: Path) -> dict[str, Any]:
    return {
        "max_epochs": 6,
        "logger": CSVLogger(out / "logs"),
        "enable_checkpointing": True,
        "log_every_n_steps": 1,
        "default_root_dir": out,
        "callbacks": [
            ModelCheckpoint(out / "saved", monitor="val_loss", filename="best", save_last=True),
            EarlyStopping("val_loss", patience=1),
        ],
    }


def report(module: Regression, trainer: L.Trainer) -> dict[str, Any]:
    return {
        "seen": module.seen,
        "weights": weights(module),
        "steps": trainer.global_step,
        "best": getattr(trainer.checkpoint_callback, "best_model_path", ""),
    }


def listed(results: MemberResults | None) -> list[dict[str, Any]]:
    return [] if results is None else [asdict(result) for result in results.members]


def beside_lone_runs(out: Path, members: int) -> dict[str, Any]:
    """Train a member and resume it, and train it again under the Trainer's own strategy."""
    strategy = IndependentStrategy(num_members=members)
    member = strategy.member
    module = Member(member)
    trainer = make_trainer(out, **{**options_of(out), "strategy": strategy, "devices": 2})
    trainer.fit(module, make_data(out, members))
    fitted = listed(strategy.results)
    found = report(module, trainer)
    (metrics,) = trainer.test(module, make_data(out, members), ckpt_path="best", verbose=False)
    tested = listed(strategy.results)

    alone = out / f"alone_{member}"
    lone = Member(member)
    reference = make_trainer(alone, **options_of(alone))
    reference.fit(lone, make_data(out, members, member))
    expected = report(lone, reference)
    (lone_metrics,) = reference.test(
        lone, make_data(out, members, member), ckpt_path="best", verbose=False
    )

    # Another Trainer of the program, resumed from each member's own checkpoint.
    again = Member(member)
    resumed = make_trainer(
        out / "again", strategy=IndependentStrategy(num_members=members), devices=2, max_epochs=8
    )
    resumed.fit(
        again,
        make_data(out, members),
        ckpt_path=str(out / "saved" / "member_{member}" / "last.ckpt"),
        **weights_only(True),
    )
    lone_again = Member(member)
    lone_resumed = make_trainer(alone / "again", max_epochs=8)
    lone_resumed.fit(
        lone_again,
        make_data(out, members, member),
        ckpt_path=alone / "saved" / "last.ckpt",
        **weights_only(True),
    )
    return {
        "member": member,
        "place": (trainer.world_size, trainer.global_rank, trainer.is_global_zero),
        "fitted": fitted,
        "tested": tested,
        "found": {**found, "metrics": metrics},
        "expected": {**expected, "metrics": lone_metrics},
        "resumed": report(again, resumed),
        "expected resumed": report(lone_again, lone_resumed),
    }


class Unlucky(Regression):
    """Fails in its second epoch, each member its own way.

    Args:
        ways: By member, how it fails.
        member: The member.
    """

    def __init__(self, ways: dict[str, str], member: int) -> None:
        super().__init__()
        self.way = ways.get(str(member))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if self.current_epoch == 1:
            if self.way == "raise":
                raise ValueError("no luck")
            if self.way == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.way in ("exit 0", "exit 3"):
                print("so be it")
                sys.stdout.flush()
                os._exit(int(self.way[-1]))
        return super().training_step(batch, batch_idx)


def failing(out: Path, members: int, ways: dict[str, str]) -> dict[str, Any]:
    """Train where some members fail; then do it again where that is an error of the first."""
    strategy = IndependentStrategy(raise_on_failure=False)
    module = Unlucky(ways, strategy.member)
    trainer = make_trainer(
        out, strategy=strategy, devices=members, max_epochs=2, enable_checkpointing=True
    )
    trainer.fit(module, make_data(out, members))
    fitted = listed(strategy.results)
    trainer.test(module, make_data(out, members), verbose=False)
    tested = listed(strategy.results)
    if strategy.member == 3:
        # One stage less than the others: nobody waits for it.
        return {"member": 3, "weights": weights(module)}
    strict = make_trainer(out / "strict", strategy=IndependentStrategy(), devices=members)
    error = None
    try:
        strict.fit(Regression(), make_data(out, members))
    except MemberError as caught:
        error = str(caught)
    return {
        "member": strategy.member,
        "weights": weights(module),
        "fitted": fitted,
        "tested": tested,
        "error": error,
    }


def first_fails(out: Path, members: int, ways: dict[str, str]) -> dict[str, Any]:
    """Train where the first member may raise an error, before the others have done much."""
    strategy = IndependentStrategy()
    trainer = make_trainer(out, strategy=strategy, devices=members, max_epochs=20)
    module = Unlucky(ways, strategy.member)
    trainer.fit(module, make_data(out, members))
    return {"member": strategy.member, "weights": weights(module)}


class AskParentToStop(L.Callback):
    """Once the first member waits for this one, asks its process to stop."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.asked = False

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self.asked and read_results(self.out).members[0].status == "done":
            # It waits a moment after it has recorded that.
            sleep(1)
            os.kill(int((self.out / "first.pid").read_text()), signal.SIGTERM)
            self.asked = True


def stopped(out: Path) -> dict[str, Any]:
    """Train two members, of which the second one would never end."""
    strategy = IndependentStrategy()
    first = strategy.member == 0
    if first:
        (out / "first.pid").write_text(str(os.getpid()))
    trainer = make_trainer(
        out,
        strategy=strategy,
        devices=2,
        max_epochs=1 if first else -1,
        callbacks=[] if first else [AskParentToStop(out)],
    )
    trainer.fit(Regression(), make_data(out, 2))
    return {"member": strategy.member}
