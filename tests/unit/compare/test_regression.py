"""Two reports side by side."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_memmap.compare import command, compare
from lightning_memmap.compare.page import render_html
from lightning_memmap.compare.report import Report, check_regression, read_report, verdict_on
from tests.unit.compare.reports import ENVIRONMENT, SETTINGS, make_report, make_variant


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
    assert verdict_on(old, new, more_is_better=True) == verdict
    turned = {"better": "worse", "worse": "better"}.get(verdict, verdict)
    assert verdict_on(old, new, more_is_better=False) == turned


def write(path: Path, rates: tuple[float, ...], **values: object) -> str:
    make_report(make_variant("auto", rates), make_variant("ddp"), **values).write(path)
    return str(path)


def test_slower_variant_is_told_and_ends_with_its_own_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = write(tmp_path / "old.json", (1000.0, 1005.0, 1010.0))
    slow = write(tmp_path / "slow.json", (800.0, 805.0, 810.0))
    assert compare(["--baseline", old, "--report", slow]) == 4
    printed = capsys.readouterr().out
    assert "worse" in printed
    assert "-19.9%" in printed
    assert compare(["--baseline", slow, "--report", old]) == 0
    assert "better" in capsys.readouterr().out


def test_other_conditions_are_told() -> None:
    old = make_report(make_variant("auto"), make_variant("ddp"))
    settings = {**SETTINGS, "global_batch": 64}
    environment = {**ENVIRONMENT, "packages": {"torch": "2.14.0"}}
    new = make_report(make_variant("auto"), make_variant("auto+ideal"), settings=settings,
                      environment=environment)  # fmt: skip
    found = check_regression(old, new, "old.json")
    assert found.warnings == [
        "only in the baseline: ddp",
        "only in the new report: auto+ideal",
        "not the same: torch was 2.13.0 and is 2.14.0",
        "not the same: global_batch was 32 and is 64",
    ]
    assert {change.verdict for change in found.changes} == {"same"}


def test_baseline_of_a_stranger_cannot_control_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "\x1b]0;title\x07"
    strange = make_report(replace(make_variant("auto"), variant=name))
    strange.write(tmp_path / "strange.json")
    new = write(tmp_path / "new.json", (1000.0,))
    assert compare(["--baseline", str(tmp_path / "strange.json"), "--report", new]) == 0
    printed = capsys.readouterr().out
    assert "only in the baseline: ?]0;title?" in printed
    assert name not in printed


def test_page_and_exit_code_tell_of_a_slower_variant() -> None:
    old = make_report(make_variant("auto", (1000.0, 1005.0, 1010.0)))
    new = make_report(make_variant("auto", (500.0, 505.0, 510.0)))
    regression = check_regression(old, new, "old.json")
    report = replace(new, regression=regression)
    assert report.exit_code == 4
    assert "Compared with old.json" in render_html(report)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--report", "x.json"], "--baseline"),
        (["--baseline", "nowhere.json"], "nowhere.json"),
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


FIGURES = ("variants", 0, "figures")


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda values: '{"x": ' + "[" * 200_000, "is no report"),
        (lambda values: '{"schema": "other"}', "is no report"),
        (changed("schema_version", to=1), "schema_version"),
        (without("environment"), "`environment`"),
        (changed(*FIGURES, "private_bytes", to=["cheap"]), "$.variants[0].figures"),
    ],
)
def test_malformed_report_is_one_error_before_anything_runs(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    write: Callable[[dict[str, Any]], str],
    words: str,
) -> None:
    path = tmp_path / "old.json"
    make_report(make_variant("auto")).write(path)
    values = json.loads(path.read_text())
    path.write_text(write(values), encoding="utf-8", errors="surrogateescape")
    assert compare(["--config", "x.yaml", "--baseline", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {path}")
    assert words in told
    assert told.count("\n") == 1
    assert len(told) < 500


class OneVariant:
    """A comparison that has run."""

    def __init__(self, *args: object) -> None:
        pass

    def run(self) -> Report:
        return make_report(make_variant("auto"))


def test_comparison_is_kept_where_the_old_report_cannot_be_compared_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise KeyError("whatever was overlooked")

    monkeypatch.setattr(command, "Comparison", OneVariant)
    monkeypatch.setattr(command, "check_regression", fail)
    old = write(tmp_path / "old.json", (1000.0,))
    with pytest.raises(KeyError):
        compare(["--config", "x.yaml", "--baseline", old, "--out", str(tmp_path)])
    assert read_report(tmp_path / "report.json").variants[0].variant == "auto"
