"""The report: what it says, and what is written."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from lightning_memmap.compare.parity import Parity
from lightning_memmap.compare.report import Report, VariantResult
from tests.compare.reports import make_parity, make_report, make_variant

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


def test_docs_name_every_field_of_a_report() -> None:
    page = (Path(__file__).parents[2] / "docs" / "compare.md").read_text(encoding="utf-8")
    named = {each.name for kind in (Report, VariantResult, Parity) for each in fields(kind)}
    assert not [name for name in sorted(named) if f"`{name}`" not in page]
