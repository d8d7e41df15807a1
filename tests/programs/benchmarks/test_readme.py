"""The figures of the README are those of a report."""

import shutil
from pathlib import Path

import pytest
from readme import END, README, START, figures, write_figures

from tests.compare.reports import ENVIRONMENT, make_parity, make_report, make_variant

PLAIN = make_variant("auto+workers0", (900.0, 1100.0))
WORKERS = make_variant("auto+workers2", (2000.0, 2000.0))
FLAGSHIP = make_variant("memmap_superbatch", (4600.0, 4800.0))
IDEAL = make_variant("memmap_superbatch+ideal", (5000.0, 5000.0))


def test_figures_compare_with_the_best_loader_and_the_ideal_one() -> None:
    first, _, _, _, *rows = figures(make_report(PLAIN, WORKERS, FLAGSHIP, IDEAL))
    assert first.startswith("**2.4 times as fast as the best DataLoader, and at 94% of the no-load")
    assert "2 cores of a processor, without a GPU" in first
    assert first.endswith("in 10 steps of 32 rows, medians of 2 runs (lowest..highest):")
    assert [row.split("`")[1] for row in rows] == [
        "memmap_superbatch+ideal",
        "memmap_superbatch",
        "auto+workers2",
        "auto+workers0",
    ]
    assert rows[1].endswith("| 4,700 (4,600..4,800) | 2.35 | 0.94 |")
    assert rows[3].endswith("| 1,000 (900..1,100) | 0.50 |  |")


def test_figures_compare_several_processes_with_their_own_loader_alone() -> None:
    two = make_variant("ddp", (5400.0,))
    found = list(figures(make_report(WORKERS, FLAGSHIP, IDEAL, two)))
    assert found[0].startswith("**2.4 times as fast as the best DataLoader")
    assert found[4].endswith("| 5,400 |  |  |")
    theirs = make_variant("ddp+workers2", (2700.0,))
    found = list(figures(make_report(WORKERS, FLAGSHIP, IDEAL, two, theirs)))
    assert found[0].startswith("**2.4 times as fast as the best DataLoader")
    assert found[4].endswith("| 5,400 | 2.00 |  |")


def test_figures_do_not_claim_to_be_faster_than_ideal() -> None:
    lucky = make_variant("memmap_superbatch", (5100.0, 5100.0))
    first, *_, last = figures(make_report(PLAIN, WORKERS, lucky, IDEAL))
    assert first.startswith("**2.5 times as fast as the best DataLoader, and at its upper bound**")
    assert "noise" in last


def test_figures_say_how_near_the_weights_are() -> None:
    exact = make_parity(weight_difference=0.0, loss_difference=0.0)
    variants = [make_variant(each.variant, (10.0,), parity=exact) for each in (PLAIN, FLAGSHIP)]
    assert "the same weights, bit for bit" in next(figures(make_report(*variants, IDEAL)))
    assert "weights within 2e-07" in next(figures(make_report(PLAIN, FLAGSHIP, IDEAL)))


def test_figures_of_an_incomplete_comparison_are_refused() -> None:
    with pytest.raises(ValueError, match="the report has memmap_superbatch, auto"):
        list(figures(make_report(PLAIN, FLAGSHIP)))
    wrong = make_variant("memmap_superbatch", parity=make_parity(holds=False))
    with pytest.raises(ValueError, match="exit code 1"):
        list(figures(make_report(PLAIN, wrong, IDEAL)))


def test_figures_replace_only_what_is_between_the_comments(tmp_path: Path) -> None:
    report, readme = tmp_path / "report.json", tmp_path / "README.md"
    make_report(PLAIN, WORKERS, FLAGSHIP, IDEAL).write(report)
    readme.write_text(f"before\n{START}old\n{END}after\n")
    write_figures(str(report), str(readme))
    lines = readme.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "old" not in lines
    write_figures(str(report), str(readme))
    assert readme.read_text().splitlines() == lines
    readme.write_text("nothing\n")
    with pytest.raises(ValueError, match="has no lines <!-- figures -->"):
        write_figures(str(report), str(readme))


def test_readme_has_a_place_for_figures(tmp_path: Path) -> None:
    report, readme = tmp_path / "report.json", tmp_path / "README.md"
    make_report(PLAIN, WORKERS, FLAGSHIP, IDEAL).write(report)
    shutil.copy(README, readme)
    write_figures(str(report), str(readme))
    shown = readme.read_text().partition(START)[2].partition(END)[0]
    assert shown.startswith("**2.4 times as fast")
    assert readme.read_text().partition(END)[2] == README.read_text().partition(END)[2]


def test_figures_of_a_busy_machine_are_refused() -> None:
    busy = {**ENVIRONMENT, "load_before": 9.5}
    with pytest.raises(ValueError, match=r"a load of 9\.5 on 2 cores"):
        list(figures(make_report(PLAIN, FLAGSHIP, IDEAL, environment=busy)))
