"""The report: what it says, and what is written."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

from lightning_memmap.compare.figures import TABLES
from lightning_memmap.compare.report import Report, render_html
from tests.compare.reports import MODEL, make_parity, make_report, make_variant

WRONG = make_parity(holds=False, problems=["losses differ"])


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, 0),
        ({"parity": WRONG}, 1),
        ({"status": "failed", "figures": {}}, 3),
        ({"status": "failed", "parity": WRONG}, 1),
        ({"status": "refused", "parity": None, "figures": {}}, 0),
        ({"status": "pending"}, 3),
    ],
)
def test_exit_code_says_whether_parity_holds(changes: dict[str, Any], code: int) -> None:
    report = make_report(make_variant("auto"), replace(make_variant("ddp"), **changes))
    assert report.exit_code == code
    assert replace(report, interrupted=True).exit_code == 130


def test_report_is_written_as_json_without_nan(tmp_path: Path) -> None:
    report = make_report(
        make_variant("auto", check_losses=[float("nan"), 1.0]), make_variant("ddp")
    )
    report.write(tmp_path / "report.json")
    values = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert values["variants"][0]["check_losses"] == [None, 1.0]
    assert values["variants"][1]["figures"]["samples_per_s"] == pytest.approx([1000.0, 1100.0])
    assert values["variants"][1]["figures"]["state_bytes"] == [16000]
    assert (values["parity_holds"], values["exit_code"]) == (True, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


REPORT = make_report(
    make_variant("memmap_superbatch", (900.0, 950.0)),
    make_variant("auto"),
    make_variant("auto+workers2", (500.0, 700.0)),
    make_variant("auto+ideal", (1200.0, 1210.0)),
    make_variant("ddp"),
    make_variant("fsdp", (), status="refused", reason="needs GPUs", parity=None),
)


def with_problem() -> Report:
    parity = make_parity(holds=False, problems=("weights differ by 2.0e-01; 1e-03 is allowed",))
    return make_report(make_variant("auto"), make_variant("ddp", parity=parity))


def test_page_has_parity_before_speed_and_every_variant() -> None:
    page = render_html(REPORT)
    assert page.index("<h2>Parity with auto</h2>") < page.index("<h2>Speed: the median")
    for variant in REPORT.variants:
        assert f"<td>{variant.variant}</td>" in page
    for title in ("Losses of the check runs", *TABLES.values()):
        assert (f"<h2>{title}" in page) == (title != TABLES["devices"])
    # The losses of the first and the last step of the check runs.
    assert page.count("<td>1</td>") == page.count("<td>0.1</td>") == 5
    assert "needs GPUs" in page


def test_difference_is_marked_before_anything_else() -> None:
    page = render_html(with_problem())
    assert "Parity does not hold: ddp" in page
    assert page.index('class="bad">ddp: weights differ by 2.0e-01') < page.index("<h2>")


def test_names_are_no_markup() -> None:
    hostile = '<script>alert("x")</script>'
    variant = make_variant("auto", status="failed", reason=hostile)
    page = render_html(
        make_report(variant, command=hostile, model={**MODEL, "model_class": hostile})
    )
    assert "<script" not in page
    assert page.count(str(escape(hostile))) == 3


@pytest.mark.parametrize("variants", [(), (make_variant("auto", (), status="pending"),)])
def test_page_of_an_interrupted_report_is_a_page(variants: Any) -> None:
    report = make_report(*variants, interrupted=True)
    assert "Interrupted" in render_html(report)
