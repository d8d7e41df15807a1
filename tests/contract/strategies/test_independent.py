"""Independent members in real processes: each as a lone run, and none harmed by another."""

import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from time import sleep
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_memmap import MemmapDataModule
from lightning_memmap.errors import MemberError
from lightning_memmap.sampling import KFold
from lightning_memmap.strategies import IndependentStrategy, MemberResults, read_results
from lightning_memmap.strategies.members.processes import MEMBER_VARIABLE
from tests.support.distributed.harness import ROOT, TIMEOUT_S, launch_any
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


def report_member(module: Regression, trainer: L.Trainer) -> dict[str, Any]:
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
    found = report_member(module, trainer)
    (metrics,) = trainer.test(module, make_data(out, members), ckpt_path="best", verbose=False)
    tested = listed(strategy.results)

    alone = out / f"alone_{member}"
    lone = Member(member)
    reference = make_trainer(alone, **options_of(alone))
    reference.fit(lone, make_data(out, members, member))
    expected = report_member(lone, reference)
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
        "resumed": report_member(again, resumed),
        "expected resumed": report_member(lone_again, lone_resumed),
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


def reports_of(out: Path, members: list[int]) -> dict[int, dict[str, Any]]:
    """What the members returned."""
    found = {member: torch.load(out / f"rank{member}.pt") for member in members}
    assert [found[member]["member"] for member in members] == members
    return found


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[str, Any]]]:
    out = tmp_path_factory.mktemp("beside")
    outcome = launch_any(beside_lone_runs, out, processes=3, members=3)
    assert outcome.codes == [0], outcome.report
    return out, reports_of(out, [0, 1, 2])


Beside = tuple[Path, dict[int, dict[str, Any]]]


def test_members_are_as_lone_runs_bit_for_bit(beside: Beside) -> None:
    _, members = beside
    for report in members.values():
        assert report["place"] == (1, 0, True)
        for found, expected in (
            (report["found"], report["expected"]),
            (report["resumed"], report["expected resumed"]),
        ):
            assert found["seen"] == expected["seen"]
            assert found["steps"] == expected["steps"]
            assert torch.equal(found["weights"], expected["weights"])
        assert report["found"]["metrics"] == report["expected"]["metrics"]
        assert not torch.equal(report["found"]["weights"], report["resumed"]["weights"])
    # Each has another size, and was stopped by its own validation.
    assert len({len(report["found"]["weights"]) for report in members.values()}) == 3


def test_first_member_has_the_results_of_all(beside: Beside) -> None:
    _, members = beside
    for stage in ("fitted", "tested"):
        results = members[0][stage]
        assert [result["member"] for result in results] == [0, 1, 2]
        assert [result["device"] for result in results] == ["cpu"] * 3
        for result in results:
            report = members[result["member"]]["found"]
            assert result["status"] == "done"
            assert result["steps"] == report["steps"]
            assert result["checkpoint"] == report["best"]
        assert members[1][stage] == members[2][stage] == []
    for result in members[0]["tested"]:
        assert result["metrics"] == members[result["member"]]["found"]["metrics"]


def test_members_that_fail_do_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = {"1": "raise", "2": "kill"}
    outcome = launch_any(failing, tmp_path, processes=4, members=4, ways=ways)
    assert outcome.codes == [0], outcome.report
    assert {path.name for path in tmp_path.glob("rank*.pt")} == {"rank0.pt", "rank3.pt"}
    report = reports_of(tmp_path, [0, 3])[0]
    for stage in ("fitted", "tested"):
        status = [result["status"] for result in report[stage]]
        assert status == ["done", "failed", "failed", "done"]
    errors = [result["error"] for result in report["fitted"]]
    assert errors == [None, "ValueError: no luck", "killed by SIGKILL", None]
    log = Path(report["fitted"][1]["output"]).read_text()
    assert "Traceback" in log
    assert "ValueError: no luck" in log
    for line in ("member 1: ValueError: no luck", "member 2: killed by SIGKILL"):
        assert line in outcome.report
    assert report["error"].startswith("fit: 2 of 4 members failed")
    assert "member 2: killed by SIGKILL (its output: " in report["error"]

    # The one that raised is trained again by itself, and stands with the others.
    monkeypatch.setenv(MEMBER_VARIABLE, "1")
    again = failing(tmp_path, 4, {})
    results = read_results(tmp_path, "test")
    assert [result.member for result in results.done] == [0, 1, 3]
    checkpoint = results.done[1].checkpoint
    assert checkpoint is not None
    saved = Regression.load_from_checkpoint(checkpoint, **weights_only(True))
    assert torch.equal(weights(saved), again["weights"])


def test_first_member_that_fails_ends_after_the_others(tmp_path: Path) -> None:
    ways = {"0": "raise", "2": "exit 3", "3": "exit 0"}
    outcome = launch_any(first_fails, tmp_path, processes=4, members=4, ways=ways)
    assert outcome.codes == [1], outcome.report
    printed = (tmp_path / "program0.log").read_text()
    assert "member 0: ValueError: no luck" in printed
    for code in (3, 0):
        assert f"exit code {code}: so be it" in printed
    # When the program has ended, so have all of its processes.
    reports_of(tmp_path, [1])
    results = read_results(tmp_path)
    assert [result.status for result in results.members] == ["failed", "done", "running", "running"]
    assert [result.epochs for result in results.members] == [1, 20, 0, 0]


def test_first_member_that_is_asked_to_stop_stops_the_others(tmp_path: Path) -> None:
    outcome = launch_any(stopped, tmp_path, processes=2)
    assert outcome.codes == [128 + signal.SIGTERM], outcome.report
    results = read_results(tmp_path)
    assert [result.status for result in results.members] == ["done", "failed"]
    assert str(results.failed[0].error).startswith("SIGTERMException")


TRAIN = """
import os, sys
import lightning as L
from lightning_memmap import MemmapDataModule
from lightning_memmap.strategies import IndependentStrategy
from tests.support.models import Points, Regression


def train():
    strategy = IndependentStrategy(num_members=2)
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, logger=False)
    data = MemmapDataModule(Points(20), store_dir=f"stores_{strategy.member}", batch_size=5)
    trainer.fit(Regression(), data)
    with open(f"arguments_{strategy.member}", "w") as file:
        file.write(" ".join(sys.argv[1:]))

"""
CHANGES_DIRECTORY = """
with open("config") as file:
    assert file.read() == "here"
os.mkdir("out") if IndependentStrategy().member == 0 else None
os.chdir("out")
train()
"""
WITH_HYDRA = """
import hydra
hydra.main(version_base=None)(lambda config: train())()
"""


@pytest.mark.parametrize("kind", ["changes directory", "hydra"])
def test_program_that_changes_its_directory_runs_again_where_it_began(
    tmp_path: Path, kind: str
) -> None:
    if kind == "hydra":
        pytest.importorskip("hydra")
    script = {"changes directory": CHANGES_DIRECTORY, "hydra": WITH_HYDRA}[kind]
    (tmp_path / "train.py").write_text(TRAIN + script)
    (tmp_path / "config").write_text("here")
    given = ["hydra.job.chdir=true", "hydra.run.dir='out'", "+lr=0.1"] if kind == "hydra" else ["a"]
    paths = os.environ.get("PYTHONPATH", "")
    done = subprocess.run(
        [sys.executable, "train.py", *given],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{paths}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    results = read_results(tmp_path / "out")
    assert [result.status for result in results.members] == ["done", "done"]
    for member in range(2):
        arguments = (tmp_path / "out" / f"arguments_{member}").read_text().split()
        assert arguments[: len(given)] == given
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "config", "out"}
