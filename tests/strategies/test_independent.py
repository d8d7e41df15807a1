"""One member of an independent run, in this process: as a lone run, and what is refused."""

import json
import re
import warnings
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import Precision

from lightning_memmap import MemmapDataModule
from lightning_memmap.errors import MemberError
from lightning_memmap.sampling import KFold
from lightning_memmap.strategies import IndependentStrategy, read_results
from lightning_memmap.strategies.members.processes import MEMBER_VARIABLE, MemberLauncher
from lightning_memmap.strategies.members.results import MemberResult, old_results
from tests.contract.strategies.cases import CASES
from tests.support.models import Points, Regression, make_trainer, weights
from tests.support.traces import changed_by_fit
from tests.support.versions import weights_only

pytestmark = pytest.mark.slow

FOLDS = 2
MEMBER = 1


def make_data(path: Path, **options: Any) -> MemmapDataModule:
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
    alone = options["strategy"] == "auto"
    with warnings.catch_warnings():
        # Some cases do something that Lightning warns of; here they are to be the same.
        warnings.simplefilter("ignore")
        trainer = make_trainer(
            path, **options, **CASES[case].options, callbacks=[*CASES[case].callbacks(path)]
        )
        module = CASES[case].make()
        trainer.fit(module, make_data(path, member=MEMBER if alone else None))
    return module, trainer


@pytest.mark.parametrize("case", CASES)
def test_member_is_as_lone_run_bit_for_bit(tmp_path: Path, member: int, case: str) -> None:
    found, trainer = fit(tmp_path / "a", case, strategy="memmap_independent", devices=FOLDS)
    expected, reference = fit(tmp_path / "b", case, strategy="auto")
    assert trainer.global_step == reference.global_step > 0
    assert trainer.current_epoch == reference.current_epoch
    assert found.seen == expected.seen
    assert found.dtypes == expected.dtypes
    assert torch.equal(weights(found), weights(expected))
    assert not torch.equal(weights(found).float(), weights(CASES[case].make()))


def test_member_evaluates_and_predicts_all_rows(tmp_path: Path, member: int) -> None:
    trainer = make_trainer(tmp_path, strategy="memmap_independent", devices=FOLDS)
    module, data = Regression(), make_data(tmp_path)
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
            trainer.fit(WithCallback(), make_data(tmp_path))
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
    trainer.fit(Regression(), make_data(tmp_path))
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    other = make_trainer(tmp_path, max_epochs=2)
    words = "32 rows .* 31 rows .* member"
    with pytest.raises(ValueError, match=words):
        other.fit(
            Regression(),
            make_data(tmp_path, member=0),
            ckpt_path=tmp_path / "saved.ckpt",
            **weights_only(True),
        )


def test_one_member_is_no_more_than_a_lone_run(tmp_path: Path) -> None:
    strategy = IndependentStrategy()
    trainer = make_trainer(tmp_path, strategy=strategy)
    module = Regression()
    trainer.fit(module, make_data(tmp_path, subset=None))
    assert (strategy.member, strategy.num_members) == (0, 1)
    assert strategy.results is not None
    (result,) = strategy.results.members
    assert result.status == "done"
    assert result.metrics["train_loss"] == trainer.callback_metrics["train_loss"].item()


def test_fit_leaves_nothing_but_the_folder_of_its_outputs(tmp_path: Path, member: int) -> None:
    left = []
    for options in ({}, {"strategy": "memmap_independent", "devices": FOLDS}):
        trainer = make_trainer(tmp_path, plugins=[Precision()], **options)
        left.append(changed_by_fit(trainer, Regression(), make_data(tmp_path, member=member)))
    assert left[1] - left[0] == {"trainer._default_root_dir"}


def test_failure_is_recorded_and_raised(tmp_path: Path, member: int) -> None:
    class Broken(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("[broken]")

    trainer = make_trainer(tmp_path, strategy="memmap_independent", devices=FOLDS)
    with pytest.raises(ValueError, match="broken"):
        trainer.fit(Broken(), make_data(tmp_path))
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


@pytest.mark.parametrize(
    ("options", "trainer", "words"),
    [
        ({"num_members": 0}, {}, "num_members=0"),
        ({"num_members": 2}, {"devices": 4}, "num_members=2 with Trainer(devices=4)"),
        ({}, {"devices": 2, "num_nodes": 2}, "num_nodes=2: memmap_independent"),
    ],
)
def test_members_that_cannot_be_are_refused(
    tmp_path: Path, options: dict[str, Any], trainer: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make_trainer(tmp_path, strategy=IndependentStrategy(**options), **trainer)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({MEMBER_VARIABLE: "two"}, "'two'"),
        ({MEMBER_VARIABLE: "2"}, "=2"),
        ({"LOCAL_RANK": "1"}, "strategy='memmap_independent'"),
        (
            {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"},
            "strategy='memmap_independent'",
        ),
    ],
)
def test_processes_that_cannot_be_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        make_trainer(tmp_path, strategy="memmap_independent", devices=2)


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
        remote.fit(Regression(), make_data(tmp_path))


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
        trainer.fit(Regression(), make_data(tmp_path, **({"subset": None} if alone else {})))
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
