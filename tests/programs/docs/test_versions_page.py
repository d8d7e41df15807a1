"""The page of versions is what its program writes from its records."""

import importlib.machinery
import importlib.util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


def load_matrix() -> Any:
    loader = importlib.machinery.SourceFileLoader("matrix", str(ROOT / ".ci/matrix"))
    loader.set_data = lambda *_, **__: None  # type: ignore[method-assign]
    spec = importlib.util.spec_from_loader("matrix", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_page_of_versions_is_written_from_the_records() -> None:
    matrix = load_matrix()
    assert matrix.START + matrix.table(matrix.read_records()) + matrix.END in matrix.PAGE.read_text(
        encoding="utf-8"
    )


def test_page_counts_what_passed_and_names_what_failed(tmp_path: Path) -> None:
    matrix = load_matrix()
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="good"/>'
        '<testcase classname="a" name="bad"><failure/></testcase><testcase classname="a" name="no">'
        '<skipped message="needs a CUDA device"/></testcase><testcase classname="" name="a.file">'
        "<skipped message=\"collection skipped\">('a/file.py', 3, 'Skipped: no library')</skipped>"
        "</testcase></testsuite></testsuites>"
    )
    record = {"cell": "2.9.1/2.5.6/3.10", "date": "2026-11-28", **matrix.count(report)}
    record["versions"] = {"torch": "2.9.1", "lightning": "2.5.6", "python": "3.10.13"}
    assert record["failed"] == ["a::bad"]
    assert record["skipped"] == {"needs a CUDA device": 1, "no library": 1}
    (line,) = (line for line in matrix.table([record]).splitlines() if line.startswith("| 2.9.1"))
    assert line.split(" | ")[-4:] == ["1", "2", "1", "2026-11-28 |"]
