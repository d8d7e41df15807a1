"""``lightning-memmap doctor``: what it looks at, what it finds, and that it leaves nothing."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from lightning_memmap.cli import main
from lightning_memmap.commands import doctor as module
from lightning_memmap.commands.doctor import (
    Finding,
    file_system,
)


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {finding.what: finding for finding in findings}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["doctor", *arguments])
        return end.value.code, *capsys.readouterr()

    return run


def test_doctor_on_a_good_folder_succeeds_and_leaves_nothing(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    code, out, _ = run(str(tmp_path))
    assert code == 0, out
    for words in ("GPUs", "host memory", str(tmp_path), "atomic rename"):
        assert words in out
    assert not list(tmp_path.iterdir())


def test_doctor_of_a_missing_folder_is_refused(run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "stores").mkdir()
    code, out, error = run(str(tmp_path / "store"))
    assert (code, out) == (2, "")
    words = (
        f"{tmp_path / 'store'} is not there; did you mean '{tmp_path / 'stores'}'?: name a folder"
    )
    assert words in error
    assert [path.name for path in tmp_path.iterdir()] == ["stores"]


def test_doctor_of_a_folder_without_write_access_says_what_works_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**options: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module.tempfile, "TemporaryDirectory", refuse)
    found = by_name(file_system(tmp_path))
    assert found["writing"].state == "limited"
    assert "Permission denied" in found["writing"].text
    assert "stores in it can be read" in found["writing"].text


@pytest.mark.parametrize(
    ("what", "owner", "name", "state"),
    [
        ("atomic rename", os, "replace", "bad"),
        ("claiming space", os, "posix_fallocate", "limited"),
        ("direct reads", os, "preadv", "limited"),
        ("memory mapping", os, "pwrite", "bad"),
    ],
)
def test_doctor_tells_what_a_file_system_cannot_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, owner: Any, name: str, state: str
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(owner, name, fail)
    found = by_name(file_system(tmp_path))
    assert found[what].state == state
    assert "Operation not supported" in found[what].text
    others = {other.what for other in found.values() if other.state != "ok"}
    assert others == {what}


def test_doctor_notices_locks_that_do_not_exclude(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoLock(FileLock):
        def acquire(self, *args: Any, **options: Any) -> Any:
            return self

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *args: Any) -> None:
            pass

    monkeypatch.setattr(module, "FileLock", NoLock)
    found = by_name(file_system(tmp_path))["file locks"]
    assert found.state == "bad"
    assert "two holders at once" in found.text
