"""Two reports side by side."""

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_memmap.compare import compare
from lightning_memmap.compare.against import compare_reports, judge_change
from lightning_memmap.compare.html import render_html
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
