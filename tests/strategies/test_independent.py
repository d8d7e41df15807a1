"""Independent members, in real processes and in this one: each trains as a lone run."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import warnings
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn

from lightning_memmap import MemmapDataModule
from lightning_memmap._compat import independent
from lightning_memmap.errors import MemberError
from lightning_memmap.sampling import KFold
from lightning_memmap.strategies import IndependentStrategy, MemberResults, read_results
from lightning_memmap.strategies.members import processes
from lightning_memmap.strategies.members.processes import MEMBER_VARIABLE, MemberLauncher
from lightning_memmap.strategies.members.results import (
    MemberResult,
    old_results,
    result_path,
    write_result,
)
from tests.contract.strategies.cases import CASES
from tests.support.models import Points, Regression, make_trainer, weights
from tests.support.preloaded import python
from tests.support.processes import ROOT, TIMEOUT_S, launch_any
from tests.support.traces import changed_by_fit
from tests.support.versions import weights_only

pytestmark = [pytest.mark.slow]

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
    """Train a member and resume it, and train it again alone."""
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
    reference = make_trainer(alone, strategy="memmap_superbatch", **options_of(alone))
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
    lone_resumed = make_trainer(alone / "again", strategy="memmap_superbatch", max_epochs=8)
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
from lightning_memmap._compat import independent
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


def test_program_begins_where_it_imports_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert runpy.run_path(independent.__file__)["BEGAN_IN"] == str(tmp_path)


def test_program_that_changes_its_directory_runs_again_where_it_began(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN + CHANGES_DIRECTORY)
    (tmp_path / "config").write_text("here")
    paths = os.environ.get("PYTHONPATH", "")
    done = subprocess.run(
        [python(), "train.py", "argument"],
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
        assert arguments[0] == "argument"
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "config", "out"}


FOLDS = 2
MEMBER = 1


def one_member_data(path: Path, **options: Any) -> MemmapDataModule:
    """A data module of two folds, or one with a validation set where ``subset`` is None."""
    defaults: dict[str, Any] = {
        "train_dataset": Points(63),
        "test_dataset": Points(20, 100),
        "predict_dataset": Points(25, 200),
        "store_dir": path / "stores",
        "batch_size": 5,
        "subset": KFold(2, shuffle=False),
    }
    if options.get("subset", 2) is None:
        defaults["val_dataset"] = Points(10, 300)
    return MemmapDataModule(**{**defaults, **options})


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> int:
    """This process is that of a member other than the first: it starts no others."""
    monkeypatch.setenv(MEMBER_VARIABLE, str(MEMBER))
    return MEMBER


def fit(path: Path, case: str, **options: Any) -> tuple[Regression, L.Trainer]:
    alone = options["strategy"] != "memmap_independent"
    with warnings.catch_warnings():
        # Some cases do something that Lightning warns of; here they are to be the same.
        warnings.simplefilter("ignore")
        trainer = make_trainer(
            path, **options, **CASES[case].options, callbacks=[*CASES[case].callbacks(path)]
        )
        module = CASES[case].make()
        trainer.fit(module, one_member_data(path, member=MEMBER if alone else None))
    return module, trainer


#: A member runs the loops of a lone run. These read or write files, or act upon what is logged.
FITS = (
    *("plain", "accumulation", "max_steps", "overfit", "reload", "val_check_interval"),
    *("bfloat16", "manual", "two_optimizers", "plateau", "early_stopping", "best_checkpoint"),
)


@pytest.mark.parametrize("case", FITS)
def test_member_is_as_lone_run_bit_for_bit(tmp_path: Path, member: int, case: str) -> None:
    found, trainer = fit(tmp_path / "a", case, strategy="memmap_independent", devices=FOLDS)
    expected, reference = fit(tmp_path / "b", case, strategy=CASES[case].reference)
    assert trainer.global_step == reference.global_step > 0
    assert trainer.current_epoch == reference.current_epoch
    assert found.seen == expected.seen
    assert found.dtypes == expected.dtypes
    assert torch.equal(weights(found), weights(expected))
    assert not torch.equal(weights(found).float(), weights(CASES[case].make()))


def test_member_evaluates_and_predicts_all_rows(tmp_path: Path, member: int) -> None:
    trainer = make_trainer(tmp_path, strategy="memmap_independent", devices=FOLDS)
    module, data = Regression(), one_member_data(tmp_path)
    trainer.validate(module, data, verbose=False)
    assert [row for step in module.seen["val"] for row in step] == list(range(1, 63, 2))
    trainer.test(module, data, verbose=False)
    assert [row for step in module.seen["test"] for row in step] == list(range(100, 120))
    predictions = trainer.predict(module, data)
    assert predictions is not None
    rows = torch.cat([batch["row"] for batch in predictions])
    assert rows.tolist() == list(range(200, 225))
    for stage in ("validate", "test", "predict"):
        (result,) = read_results(tmp_path, stage).members
        assert (result.member, result.status) == (MEMBER, "done")
        assert 0 < result.seconds < 1000


def test_member_writes_below_its_own_folder(tmp_path: Path, member: int) -> None:
    class WithCallback(Regression):
        def configure_callbacks(self) -> Any:
            return [ModelCheckpoint(tmp_path / "mine", filename="own", monitor="val_loss")]

    for _ in range(2):
        trainer = make_trainer(
            tmp_path,
            strategy="memmap_independent",
            devices=FOLDS,
            logger=CSVLogger(tmp_path / "logs"),
            enable_checkpointing=True,
        )
        for _ in range(2):
            trainer.fit(WithCallback(), one_member_data(tmp_path))
    written = {
        str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.suffix != ".memmap"
    }
    folders = {path.split("/")[1] for path in written if path.count("/") and "stores" not in path}
    assert folders >= {"member_1"}
    results = sorted(folders - {"member_1"})
    assert len(results) == 4
    assert all(re.fullmatch(r"results-fit-[0-9]+\.json", name) for name in results)
    assert "mine/member_1/own.ckpt" in written
    for version in range(2):
        assert f"logs/member_1/lightning_logs/version_{version}/metrics.csv" in written


def test_checkpoint_of_another_fold_is_refused(tmp_path: Path, member: int) -> None:
    trainer = make_trainer(tmp_path, strategy="memmap_independent", devices=FOLDS)
    trainer.fit(Regression(), one_member_data(tmp_path))
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    other = make_trainer(tmp_path, max_epochs=2)
    words = "32 rows .* 31 rows .* member"
    with pytest.raises(ValueError, match=words):
        other.fit(
            Regression(),
            one_member_data(tmp_path, member=0),
            ckpt_path=tmp_path / "saved.ckpt",
            **weights_only(True),
        )


def test_one_member_is_no_more_than_a_lone_run(tmp_path: Path) -> None:
    strategy = IndependentStrategy()
    trainer = make_trainer(tmp_path, strategy=strategy)
    module = Regression()
    trainer.fit(module, one_member_data(tmp_path, subset=None))
    assert (strategy.member, strategy.num_members) == (0, 1)
    assert strategy.results is not None
    (result,) = strategy.results.members
    assert result.status == "done"
    assert result.metrics["train_loss"] == trainer.callback_metrics["train_loss"].item()


def test_fit_leaves_nothing_but_the_folder_of_its_outputs(tmp_path: Path, member: int) -> None:
    left = []
    for options in ({}, {"strategy": "memmap_independent", "devices": FOLDS}):
        trainer = make_trainer(tmp_path, plugins=[Precision()], **options)
        left.append(changed_by_fit(trainer, Regression(), one_member_data(tmp_path, member=member)))
    assert left[1] - left[0] == {"trainer._default_root_dir"}


def test_failure_is_recorded_and_raised(tmp_path: Path, member: int) -> None:
    class Broken(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("[broken]")

    trainer = make_trainer(tmp_path, strategy="memmap_independent", devices=FOLDS)
    with pytest.raises(ValueError, match="broken"):
        trainer.fit(Broken(), one_member_data(tmp_path))
    results = read_results(tmp_path)
    assert results.failed[0].error == "ValueError: [broken]"
    assert 0 < results.failed[0].seconds < 1000
    with pytest.raises(MemberError, match="fit: 1 of 1"):
        results.check()


# Devices


def test_members_take_the_devices_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for member in range(5):
        monkeypatch.setenv(MEMBER_VARIABLE, str(member))
        strategy = IndependentStrategy(num_members=5)
        strategy.parallel_devices = [torch.device("cuda", index) for index in range(2)]
        found.append(str(strategy.root_device))
    assert found == ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]


# Refusals


TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("options", "trainer", "variables", "words"),
    [
        ({"num_members": 0}, {}, {}, "num_members=0"),
        ({"num_members": 2}, {"devices": 4}, {}, "num_members=2 with Trainer(devices=4)"),
        ({}, {"num_nodes": 2}, {}, "num_nodes=2: memmap_independent"),
        ({}, {}, {MEMBER_VARIABLE: "two"}, "'two'"),
        ({}, {}, {MEMBER_VARIABLE: "2"}, "=2"),
        ({}, {}, {"LOCAL_RANK": "1"}, "strategy='memmap_independent'"),
        ({}, {}, TORCHRUN, "strategy='memmap_independent'"),
    ],
)
def test_members_that_cannot_be_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    trainer: dict[str, Any],
    variables: dict[str, str],
    words: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=re.escape(words)):
        make_trainer(
            tmp_path, **{"strategy": IndependentStrategy(**options), "devices": 2, **trainer}
        )


def test_notebook_trains_one_member_but_not_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = "lightning.pytorch.trainer.connectors.accelerator_connector"
    monkeypatch.setattr(f"{connector}._IS_INTERACTIVE", True)
    make_trainer(tmp_path, strategy="memmap_independent", devices=1)
    with pytest.raises(MisconfigurationException, match="'memmap_independent'"):
        make_trainer(tmp_path, strategy="memmap_independent", devices=2)
    monkeypatch.setenv(MEMBER_VARIABLE, "1")
    make_trainer(tmp_path, strategy="memmap_independent", devices=2)


def test_remote_directory_is_refused(tmp_path: Path, member: int) -> None:
    remote = make_trainer(
        Path(), strategy="memmap_independent", devices=2, default_root_dir="memory://x"
    )
    with pytest.raises(ValueError, match="default_root_dir='memory://x'"):
        remote.fit(Regression(), one_member_data(tmp_path))


# Files of others


@pytest.mark.parametrize(
    ("name", "member"), [("results-fit-1.json", None), ("results-fit-1.json", 1), ("output.log", 0)]
)
def test_file_of_others_is_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, member: int | None
) -> None:
    # Member 0 of two finds it before it starts the other; member 1, and one alone, by itself.
    monkeypatch.setattr(MemberLauncher, "_calls", Counter())
    if member:
        monkeypatch.setenv(MEMBER_VARIABLE, str(member))
    path = tmp_path / f"member_{0 if member is None else 1}" / name
    path.parent.mkdir()
    path.write_text("[1, 2]")
    alone = member is None
    trainer = make_trainer(tmp_path, strategy="memmap_independent", devices=1 if alone else FOLDS)
    with pytest.raises(ValueError, match=f"default_root_dir='{tmp_path}'"):
        trainer.fit(Regression(), one_member_data(tmp_path, **({"subset": None} if alone else {})))
    assert path.read_text() == "[1, 2]"


def test_old_results_leave_other_files_alone(tmp_path: Path) -> None:
    folder = tmp_path / "member_3"
    folder.mkdir()
    for name in ("results-mine.json", "results-fit-1.json", "notes.txt"):
        (folder / name).write_text("{}")
    result = MemberResult(3, "fit", 2, "done")
    (folder / "results-fit-2.json").write_text(json.dumps(asdict(result)))
    assert old_results(tmp_path, num_members=2) == [folder / "results-fit-2.json"]
    assert read_results(tmp_path).members == (result,)


def test_results_of_an_earlier_program_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[Path]()
    monkeypatch.setattr(processes, "LoggedProcess", lambda _, output, **__: started.append(output))
    monkeypatch.setattr(processes, "atexit", SimpleNamespace(register=lambda _: None))
    monkeypatch.setattr(MemberLauncher, "_others", {})
    monkeypatch.setattr(MemberLauncher, "_first_root", None)
    path = result_path(tmp_path, 1, "fit", 1)
    write_result(path, MemberResult(1, "fit", 1, "done"))
    launcher = MemberLauncher(0, 2, True)
    launcher.root = tmp_path
    launcher._start(tmp_path)
    assert not path.exists()
    assert len(started) == 1
