"""A comparison as a whole, of runs that never were: what one of them costs the others."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from rich.console import Console

from lightning_memmap.compare import command, runner
from lightning_memmap.compare.config import ComparisonOptions
from lightning_memmap.compare.folder import WEIGHTS
from lightning_memmap.compare.report import Report
from lightning_memmap.compare.run_files import (
    HAS_TRAINED,
    RankRecord,
    RunError,
    RunSpec,
    write_error,
)
from lightning_memmap.compare.runner import Comparison, run_in_processes
from tests.compare.reports import (
    DATA,
    ENVIRONMENT,
    MODEL,
    STEPS,
    check_rank,
    make_report,
    make_variant,
    timed_rank,
)
from tests.support.preloaded import python

#: Receives the spec of each run, and may raise.
Fault = Callable[[RunSpec], None]


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Fault], Report]:
    """Compares variants, whose runs a function may change or let fail."""
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"model": {"class_path": "M"}, "data": {"class_path": "D"}}))

    def compare(variants: str, fault: Fault) -> Report:
        def run(spec: RunSpec, timeout_s: float) -> list[RankRecord]:
            out = spec.write().parent
            if spec.kind == "check" and spec.reference is None:
                (out / WEIGHTS).touch()
            fault(spec)
            if spec.reference is not None and spec.kind == "check":
                assert Path(spec.reference).exists()
            if spec.kind == "timed":
                return [timed_rank()]
            digests = {"weight": "1"}
            return [
                check_rank(
                    parameters=["weight"],
                    initial=digests,
                    final=digests,
                    squared_distance=0.0,
                    num_separate_batches=2 if spec.variant == "memmap_dp" else 1,
                )
            ]

        monkeypatch.setattr(runner, "run_in_processes", run)
        model = {**MODEL, "batch_norms": ["BatchNorm1d"]}
        facts = {"environment": {**ENVIRONMENT}, "data": DATA, "model": model}
        monkeypatch.setattr(runner, "prepare", lambda *args: {**facts, "expected": [1] * STEPS})
        options = ComparisonOptions(str(config), variants, repeats=2, out=str(tmp_path / "out"))
        return Comparison(options, Console(quiet=True)).run()

    return compare


def test_single_device_is_the_reference_wherever_it_stands(
    compare: Callable[[str, Fault], Report],
) -> None:
    report = compare("ddp,auto,auto+ideal", lambda _: None)
    assert report.reference == "auto"
    assert [each.variant for each in report.variants] == ["ddp", "auto", "auto+ideal"]
    assert [each.parity and each.parity.holds for each in report.variants] == [True, True, None]
    assert report.exit_code == 0
    shares = [each.figures.get("no_load_share") for each in report.variants]
    assert shares == [None, [1, 1], [1, 1]]
    assert compare("ddp,memmap_superbatch", lambda _: None).reference == "ddp"


def test_batch_norm_in_replicas_is_told(compare: Callable[[str, Fault], Report]) -> None:
    auto, replicated = compare("auto,memmap_dp", lambda _: None).variants
    assert auto.parity is not None
    assert not auto.parity.notes
    assert replicated.parity is not None
    (note,) = replicated.parity.notes
    assert "BatchNorm1d: a step's rows are normalised in 2" in note


def test_failed_reference_is_replaced_and_leaves_no_weights(
    compare: Callable[[str, Fault], Report], tmp_path: Path
) -> None:
    files = list[list[str]]()

    def fault(spec: RunSpec) -> None:
        files.append([path.parts[-3] for path in tmp_path.glob(f"out/variants/*/*/{WEIGHTS}")])
        if spec.variant == "auto":
            raise OSError(28, "No space left on device")

    auto, ddp, superbatch = compare("auto,ddp,memmap_superbatch", fault).variants
    assert (auto.status, ddp.status, superbatch.status) == ("failed", "ok", "ok")
    assert "No space left" in auto.reason
    # In the three check runs; timed runs have none.
    assert files == [["auto"], ["ddp"], ["ddp"], [], [], [], []]


def test_run_that_fails_costs_no_other(compare: Callable[[str, Fault], Report]) -> None:
    def fault(spec: RunSpec) -> None:
        if spec.variant == "ddp" and spec.out.endswith("timed2"):
            raise OSError(28, "No space left on device")
        if spec.variant == "memmap_dp":
            raise RunError("this module is not supported", refused=True)

    report = compare("ddp,memmap_dp,auto", fault)
    assert [each.status for each in report.variants] == ["failed", "refused", "ok"]
    assert "No space left" in report.variants[0].reason
    # What it had measured before is kept.
    assert len(report.variants[0].figures["samples_per_s"]) == 1
    assert len(report.variants[2].figures["samples_per_s"]) == 2
    assert report.exit_code == 3


def test_interrupt_leaves_no_weights(
    compare: Callable[[str, Fault], Report], tmp_path: Path
) -> None:
    def fault(spec: RunSpec) -> None:
        if spec.variant == "ddp":
            assert [*tmp_path.glob(f"out/variants/*/*/{WEIGHTS}")]
            raise KeyboardInterrupt

    assert compare("auto,ddp", fault).interrupted
    assert not [*tmp_path.glob(f"out/variants/*/*/{WEIGHTS}")]


def test_report_that_cannot_be_written_is_still_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Done:
        def __init__(self, *args: object) -> None:
            (tmp_path / "report.json").mkdir()

        def run(self) -> Report:
            return make_report(make_variant("memmap_dp"))

    monkeypatch.setattr(command, "Comparison", Done)
    assert command.compare(["--config", "config.yaml", "--out", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert "report.json" in printed.err
    assert "memmap_dp" in printed.out
    assert "report.json" not in printed.out
    assert {path.name for path in tmp_path.iterdir()} == {"report.json", "report.html"}


# What is removed


REPORT_OF_OTHERS = '{"schema": "coverage", "lines": 12}'


def test_comparison_replaces_an_earlier_one(
    compare: Callable[[str, Fault], Report], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    compare("auto,ddp", lambda _: None).write(out / "report.json")
    (out / "notes.txt").write_text("mine")
    compare("auto", lambda _: None)
    assert (out / "notes.txt").read_text() == "mine"
    assert not (out / "report.json").exists()
    assert not (out / "variants/ddp/check").exists()
    assert (out / "variants/auto/check/spec.json").exists()


@pytest.mark.parametrize("with_report", [False, True])
@pytest.mark.parametrize(
    "name", ["variants/mine.pt", "variants/auto/check/mine.pt", "report.json", "report.html"]
)
def test_file_of_others_is_never_removed(
    compare: Callable[[str, Fault], Report], tmp_path: Path, name: str, with_report: bool
) -> None:
    out = tmp_path / "out"
    if with_report:
        compare("auto", lambda _: None).write(out / "report.json")
        if name.endswith("check/mine.pt"):
            (out / "variants/auto/check/spec.json").write_text("{}")
    path = out / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(REPORT_OF_OTHERS)
    with pytest.raises(ValueError, match=f"out='{out}'"):
        compare("auto", lambda _: None)
    assert path.read_text() == REPORT_OF_OTHERS


def test_folder_that_links_elsewhere_is_never_emptied(
    compare: Callable[[str, Fault], Report], tmp_path: Path
) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    compare("auto", lambda _: None)
    (out / "variants").rename(elsewhere)
    (out / "variants").symlink_to(elsewhere)
    with pytest.raises(ValueError, match="out="):
        compare("auto", lambda _: None)
    assert (elsewhere / "auto/check/spec.json").exists()


def make_spec(path: Path) -> RunSpec:
    return RunSpec(
        kind="timed", config={}, trainer={}, variant="auto", devices=1, global_batch=8,
        num_shards=24, warmup_steps=1, steps=2, transform_is_random=False,
        out=str(path / "run"),
    )  # fmt: skip


def children() -> set[int]:
    """Processes of this one. Others than a run's may be there, such as those of multiprocessing."""
    return {process.pid for process in psutil.Process().children(recursive=True)}


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, True])
def test_run_that_takes_too_long_is_ended_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    if hangs:
        (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(1000)")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    before = children()
    with pytest.raises(RunError, match=r"0\.3 s .*timeout_s") as error:
        run_in_processes(make_spec(tmp_path), 0.3)
    assert not error.value.refused
    assert children() <= before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("texts", "words", "refused"),
    [
        (['{"message": "the reason", "refused": true}', '{"message": "x"}'], "the reason", True),
        (['{"message": "hal', '{"message": "whole", "refused": false}'], "whole", False),
    ],
)
def test_first_process_that_fails_says_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    texts: list[str],
    words: str,
    refused: bool,
) -> None:
    monkeypatch.setattr("sys.executable", python())
    spec = make_spec(tmp_path)
    spec.write()
    for index, each in enumerate(texts):
        path = tmp_path / "run" / f"error-{index}.json"
        path.write_text(each)
        os.utime(path, (index, index))
    # It has no model, so that it fails at once.
    with pytest.raises(RunError, match=words) as error:
        run_in_processes(spec, 100.0)
    assert error.value.refused is refused


def test_error_is_refused_until_a_step_was_trained(tmp_path: Path) -> None:
    for refused in (True, False):
        write_error(tmp_path, ValueError("the reason"))
        (path,) = tmp_path.glob("error-*.json")
        content = json.loads(path.read_text())
        assert content == {"message": "ValueError: the reason", "refused": refused}
        (tmp_path / HAS_TRAINED).touch()


def test_process_without_a_record_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended:
        """A program that has ended, and left the record of rank 0 of 2."""

        returncode = 0

        def __init__(self, *_: Any, **__: Any) -> None:
            record = RankRecord(rank=0, world_size=2, data_rank=0, global_batch=8, losses=[])
            (tmp_path / "run" / "rank0.json").write_text(json.dumps(asdict(record)))

        def __enter__(self) -> "Ended":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def wait(self, timeout_s: float) -> None:
            pass

        def kill_group(self) -> None:
            pass

        def tail(self) -> list[str]:
            return ["its last line"]

    monkeypatch.setattr(runner, "LoggedProcess", Ended)
    with pytest.raises(RunError, match=r"\[0\].*its last line"):
        run_in_processes(make_spec(tmp_path), 100.0)
