"""Two reports side by side."""

import copy
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning_memmap.compare.against import compare_reports, judge_change
from lightning_memmap.compare.html import render_html

from lightning_memmap.compare import command, compare
from lightning_memmap.compare.report import Report, read_report
from tests.unit.compare.reports import make_arm, make_report


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ([100.0, 101.0, 104.0], [105.0, 106.0, 107.0], "better"),
        ([105.0, 106.0, 107.0], [100.0, 101.0, 104.0], "worse"),
        ([100.0, 101.0, 106.0], [105.0, 110.0, 111.0], "same"),  # The ranges overlap.
        ([100.0, 101.0, 106.0], [107.0, 107.0, 107.0], "same"),  # One is as wide as the change.
        ([100.0, 100.1, 100.2], [101.0, 101.1, 101.2], "same"),  # Too little to speak of.
        ([100.0, 101.0], [150.0, 151.0, 152.0], "unclear"),
        ([100.0], [101.0], "same"),
    ],
)
def test_change_beyond_the_noise_has_a_direction(
    old: list[float], new: list[float], verdict: str
) -> None:
    assert judge_change(old, new, more_is_better=True) == verdict
    turned = {"better": "worse", "worse": "better"}.get(verdict, verdict)
    assert judge_change(old, new, more_is_better=False) == turned


def write(path: Path, rates: tuple[float, ...], **values: object) -> str:
    make_report(make_arm("auto", rates), make_arm("ddp"), **values).write(path)
    return str(path)


def test_slower_arm_is_told_and_ends_with_its_own_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = write(tmp_path / "old.json", (1000.0, 1005.0, 1010.0))
    slow = write(tmp_path / "slow.json", (800.0, 805.0, 810.0))
    assert compare(["--against", old, "--report", slow]) == 4
    printed = capsys.readouterr().out
    assert "worse" in printed
    assert "-19.9%" in printed
    assert compare(["--against", slow, "--report", old]) == 0
    assert "better" in capsys.readouterr().out


def test_other_conditions_are_told() -> None:
    old = make_report(make_arm("auto"), make_arm("ddp"))
    settings = {**old.settings, "global_batch": 64}
    environment = {**old.environment, "packages": {"torch": "2.14.0"}}
    new = make_report(make_arm("auto"), make_arm("auto+ideal"), settings=settings,
                      environment=environment)  # fmt: skip
    found = compare_reports(old.to_json(), new.to_json(), "old.json")
    assert found.warnings == ("torch was 2.13.0 and is 2.14.0", "global_batch was 32 and is 64")
    assert (found.only_old, found.only_new) == (("ddp",), ("auto+ideal",))
    assert {change.verdict for change in found.changes} == {"same"}


def test_page_and_exit_code_tell_of_a_slower_arm() -> None:
    old = make_report(make_arm("auto", (1000.0, 1005.0, 1010.0)), scaling=())
    new = make_report(make_arm("auto", (500.0, 505.0, 510.0)), scaling=())
    difference = compare_reports(old.to_json(), new.to_json(), "old.json")
    report = replace(new, against=difference)
    assert report.exit_code == 4
    assert "Against old.json" in render_html(report)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--report", "x.json"], "--against"),
        (["--against", "nowhere.json"], "nowhere.json"),
        ([], "--config"),
    ],
)
def test_wrong_arguments_are_told(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(arguments) == 2
    assert words in capsys.readouterr().err


def changed(*path: str | int, to: Any) -> Callable[[dict[str, Any]], str]:
    """A report with another value somewhere."""

    def change(values: dict[str, Any]) -> str:
        place: Any = values
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to
        return json.dumps(values)

    return change


def without(name: str) -> Callable[[dict[str, Any]], str]:
    return lambda values: json.dumps({key: item for key, item in values.items() if key != name})


COST = ("arms", 0, "cost")


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda values: "[" * 200_000, "is no JSON file"),
        (lambda values: '{"schema": ' + "9" * 5000 + "}", "is no JSON file"),
        (lambda values: '{"schema": NaN}', "is no JSON file"),
        (lambda values: "\udcff", "is no JSON file"),
        (lambda values: "", "is no JSON file"),
        (lambda values: "[1, 2]", "is not the report of a comparison"),
        (without("schema"), "is not the report of a comparison"),
        (without("schema_version"), "schema version None"),
        (changed("schema_version", to=2), "schema version 2"),
        (without("arms"), "the report has no 'arms'"),
        (without("environment"), "the report has no 'environment'"),
        (changed("arms", to={}), "'arms' of the report is {}"),
        (changed("arms", 0, to=[]), "an item of 'arms' of the report is []"),
        (changed("arms", 0, "arm", to=["auto"]), "'arm' of an item of 'arms'"),
        (changed(*COST, to="cheap"), "'cost' of an item of 'arms'"),
        (changed(*COST, to={}), "has no 'samples_per_s'"),
        (changed(*COST, "own_bytes", "values", to=["1"]), "an item of 'values' of 'own_bytes'"),
        (changed(*COST, "own_bytes", "median", to=True), "'median' of 'own_bytes'"),
    ],
)
def test_malformed_report_is_one_error_before_anything_runs(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    write: Callable[[dict[str, Any]], str],
    words: str,
) -> None:
    path = tmp_path / "old.json"
    values = make_report(make_arm("auto")).to_json()
    path.write_text(write(values), encoding="utf-8", errors="surrogateescape")
    assert compare(["--config", "x.yaml", "--against", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {path}")
    assert words in told
    assert told.count("\n") == 1
    assert len(told) < 500


def test_what_is_no_file_is_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**27)
    for name in ("pipe", "nowhere", "loop", "large", "."):
        assert compare(["--config", "x.yaml", "--against", str(tmp_path / name)]) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: ")
        assert told.count("\n") == 1


def test_figure_that_is_not_known_is_not_compared() -> None:
    new = make_report(make_arm("auto")).to_json()
    old = copy.deepcopy(new)
    old["arms"][0]["cost"]["own_bytes"]["values"] = []
    old["arms"][0]["cost"]["first_batch_s"]["median"] = None
    found = compare_reports(old, new, "old.json")
    assert [change.measure for change in found.changes] == ["samples_per_s"]


class OneArm:
    """A comparison that has run."""

    def __init__(self, *args: object) -> None:
        pass

    def run(self) -> Report:
        return make_report(make_arm("auto"))


def test_comparison_is_kept_where_the_old_report_cannot_be_compared_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise KeyError("whatever was overlooked")

    monkeypatch.setattr(command, "Comparison", OneArm)
    monkeypatch.setattr(command, "compare_reports", fail)
    old = write(tmp_path / "old.json", (1000.0,))
    with pytest.raises(KeyError):
        compare(["--config", "x.yaml", "--against", old, "--out", str(tmp_path)])
    assert read_report(tmp_path / "report.json")["arms"][0]["arm"] == "auto"
