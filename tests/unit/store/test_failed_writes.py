"""Writes that fail in the middle of a change of a store, at the system call."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_memmap.errors import StoreNotFoundError
from lightning_memmap.store import build_part, build_store, open_store, verify_store
from tests.unit.store.change_texts import GENERATION, NUM_ROWS, OPTIONS, Texts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace"),
]

WRITES = "write,writev,pwrite64,pwritev,pwritev2"


def run(way: str, directory: Path, inject: str, *files: Path) -> tuple[int, str]:
    """Change the store ``s`` while system calls about some files fail."""
    watched = [option for file in files for option in ("-P", str(file))]
    done = subprocess.run(
        ["strace", "-f", "-qq", "-o", "/dev/null", "--seccomp-bpf", *watched,
         "-e", f"inject={inject}", sys.executable, "-m", "tests.unit.store.change_texts",
         way, str(directory / "s")],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def begin(way: str, directory: Path) -> None:
    if way not in ("new", "stream"):
        build_store(Texts(1), directory / "s", **OPTIONS)
    if way == "finish":
        build_part(Texts(2), directory / "s", (0, 1), overwrite=True, **OPTIONS)


def editions(directory: Path) -> list[int] | None:
    """The edition of each row; None where there is no store."""
    try:
        store = open_store(directory / "s")
    except StoreNotFoundError:
        return None
    assert verify_store(directory / "s") == []
    found = [int(store[row]["t"][0]) for row in range(store.num_rows)]
    assert [store[row] for row in range(store.num_rows)] == [
        Texts(edition)[row % NUM_ROWS] for row, edition in enumerate(found)
    ]
    return found


def index_files(directory: Path) -> list[Path]:
    """The index in the generation that is made, or was begun by parts."""
    generations = {directory / "s" / GENERATION, *(directory / "s").glob("g-*")}
    return [generation / "t.index" for generation in generations]


@pytest.mark.parametrize("way", ["new", "overwrite", "stream", "append", "finish"])
def test_write_of_the_index_fails_and_the_store_is_as_it_was(tmp_path: Path, way: str) -> None:
    begin(way, tmp_path)
    before = editions(tmp_path)
    for number in range(1, 10):
        inject = f"{WRITES}:error=ENOSPC:when={number}"
        status, output = run(way, tmp_path, inject, *index_files(tmp_path))
        if status == 0:  # It takes fewer writes.
            break
        assert status == 3
        assert output.startswith(("OSError", "StoreError"))
        assert editions(tmp_path) == before
    assert number > 1
    expected = [1] * NUM_ROWS + [2] * NUM_ROWS if way == "append" else [2] * NUM_ROWS
    assert editions(tmp_path) == expected


def test_overwrite_that_fails_takes_no_more_disk(tmp_path: Path) -> None:
    begin("overwrite", tmp_path)
    before = {path for path in tmp_path.rglob("*") if path.stat().st_size}
    status, output = run(
        "overwrite", tmp_path, f"{WRITES}:error=ENOSPC:when=1+", *index_files(tmp_path)
    )
    assert status == 3
    assert "Make room" in output
    assert {path for path in tmp_path.rglob("*") if path.stat().st_size} == before
