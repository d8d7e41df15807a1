"""``lightning-memmap doctor``: what it looks at, what it finds, and that it leaves nothing."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_memmap.cli import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["doctor", *map(str, arguments)])
        return end.value.code, *capsys.readouterr()

    return run


def test_doctor_on_a_good_folder_succeeds_and_leaves_nothing(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    code, out, _ = run(tmp_path)
    assert code == 0, out
    for words in ("GPUs", "host memory", str(tmp_path), "built, verified and read"):
        assert words in out
    assert not list(tmp_path.iterdir())


def test_doctor_of_a_missing_folder_names_the_nearest(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "stores").mkdir()
    code, out, error = run(tmp_path / "store")
    assert (code, out) == (2, "")
    assert str(tmp_path / "store") in error
    assert f"did you mean '{tmp_path / 'stores'}'?" in error
    assert [path.name for path in tmp_path.iterdir()] == ["stores"]


@pytest.mark.parametrize(("name", "text"), [("mkdir", "denied"), ("replace", "not supported")])
def test_doctor_tells_what_a_file_system_cannot_do(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise OSError(95, text)

    monkeypatch.setattr(os, name, fail)
    code, out, error = run(tmp_path)
    monkeypatch.undo()
    assert code == 1
    assert "host memory" in out
    assert f"stores cannot be built in {tmp_path}" in error
    assert text in error
    assert not list(tmp_path.iterdir())
