"""The program for the day a GPU is at hand, with tiny sizes."""

import json
import shutil
from pathlib import Path

import pytest

from tests.support.preloaded import run

ROOT = Path(__file__).resolve().parents[3]
#: The others of its file are run beside this one.
TESTS = "tests/loading/test_gpu.py::test_staging_brings_all_rows"

pytestmark = pytest.mark.gpu


def test_one_command_runs_everything_and_writes_both_files(tmp_path: Path) -> None:
    page = Path(shutil.copy(ROOT / "docs" / "tested.md", tmp_path))
    answer = tmp_path / "gpu.json"
    done = run(
        ROOT / "tests" / "programs" / "benchmarks" / "gpu.py",
        *("--all", "--tiny"),
        *("--tests", TESTS, "--variants", "auto,memmap_superbatch"),
        *("--json", answer, "--write", page),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(answer.read_text())
    assert report["tests"].pop("passed")
    assert not any(report["tests"].values())
    figures = report["figures"]
    assert report["compare"] == {"auto": "ok", "memmap_superbatch": "ok"}
    assert list(figures) == ["compare", "fetch", "load", "wait", "resnet"]
    for rows in figures.values():
        assert rows
        for values in rows.values():
            assert all(values.values())
    written = page.read_text()
    assert "nothing of a GPU" in written
    assert "| device, 2 ahead |" in written
    assert "Nothing was measured" not in written
