"""Stores in directories that this user may not write to, or that others write to as well."""

import errno
import json
import os
import resource
import shutil
import signal
import tempfile
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memmap.sampling.rows import Shards
from lightning_memmap.store import build_store, open_store, verify_store
from lightning_memmap.store.checksums import CHUNK_BYTES
from lightning_memmap.store.manifest import MANIFEST
from tests.support.datasets import Numbered, holds
from tests.support.store.layout import files_of
from tests.support.store.signing import sign_manifest

pytestmark = pytest.mark.slow


OLD, NEW = Numbered(100, 1), Numbered(100, 2)
OWNER, OTHER = 65533, 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that other users can reach, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def build(path: Path, dataset: Any = NEW, **options: Any) -> Any:
    return build_store(dataset, path, num_shards=3, progress=False, **options)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Whole stores by the version of their dataset, to be copied."""
    directory = tmp_path_factory.mktemp("pristine")
    return {data.version: build(directory / str(data.version), data).path for data in (OLD, NEW)}


def run_as(user: int, action: Callable[[], Any]) -> list[str]:
    """Act as another user, in a process of its own. Where this user is not root, as this one: then
    only the modes of files and directories stand in the way.

    Returns:
        The name of the error's class and its text, ``["done"]`` where there was none.
    """
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(60)
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            os.umask(0o022)
            action()
            outcome = ["done"]
        except BaseException as error:
            outcome = [type(error).__name__, str(error)]
        finally:
            os.write(theirs, json.dumps(outcome).encode())
            os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as file:
        data = file.read()
    assert os.waitpid(pid, 0)[1] == 0, "it hung"
    outcome = json.loads(data)
    assert isinstance(outcome, list)
    return outcome


def everything(directory: Path) -> dict[str, tuple[int, int, int]]:
    """What lies below a directory: mode, owner and time of the last change."""
    states = {str(path): path.lstat() for path in [directory, *directory.rglob("*")]}
    return {
        path: (state.st_mode, state.st_uid, state.st_mtime_ns) for path, state in states.items()
    }


def lock_out(directory: Path, mode: int = 0o555) -> None:
    for path in [directory, *directory.rglob("*")]:
        if path.is_dir():
            path.chmod(mode)


# Who may not write


@pytest.fixture
def locked_out(shared: Path, pristine: dict[int, Path]) -> Iterator[Path]:
    """A store whose directory can only be read."""
    shutil.copytree(pristine[NEW.version], shared / "s")
    lock_out(shared)
    yield shared / "s"
    lock_out(shared, 0o755)


def test_build_of_a_store_that_may_only_be_read_uses_it_and_writes_nothing(
    locked_out: Path,
) -> None:
    before = everything(locked_out.parent)

    def use() -> None:
        assert holds(build(locked_out), NEW)
        assert holds(open_store(locked_out), NEW)
        assert verify_store(locked_out) == []

    assert run_as(OTHER, use) == ["done"]
    assert everything(locked_out.parent) == before


def test_build_of_another_dataset_over_a_store_that_may_only_be_read_is_refused(
    locked_out: Path,
) -> None:
    before = everything(locked_out.parent)
    name, text = run_as(OTHER, lambda: build(locked_out, OLD))
    assert name == "DatasetError"
    assert "row 0 of the dataset differs" in text
    name, text = run_as(OTHER, lambda: build(locked_out, OLD, overwrite=True))
    assert name == "StoreError"
    assert "cannot be locked" in text
    assert "choose another directory" in text
    name, _ = run_as(OTHER, lambda: build(locked_out.with_name("new")))
    assert name == "StoreError"
    assert everything(locked_out.parent) == before


@pytest.mark.parametrize("name", ["s", f"s/{MANIFEST}", "x.memmap"])
def test_open_what_may_not_be_read_says_so(
    shared: Path, pristine: dict[int, Path], name: str
) -> None:
    shutil.copytree(pristine[NEW.version], shared / "s")
    place = files_of(shared / "s") / name if name.endswith(".memmap") else shared / name
    place.chmod(0)
    try:
        for action in (lambda: open_store(shared / "s"), lambda: build(shared / "s")):
            kind, text = run_as(OTHER, action)
            assert kind == "StoreError"
            assert "ermission denied" in text
            assert "right to read it" in text
    finally:
        place.chmod(0o755)


# Who writes to the same directory


@needs_root
def test_two_users_of_one_directory_build_in_turn(shared: Path) -> None:
    shared.chmod(0o1777)
    assert run_as(OWNER, lambda: build(shared / "s")) == ["done"]
    # The other user's lock can be used, and the other user's store read, but not replaced.
    assert run_as(OTHER, lambda: build(shared / "s")) == ["done"]
    assert run_as(OTHER, lambda: build(shared / "t")) == ["done"]
    kind, text = run_as(OTHER, lambda: build(shared / "s", OLD, overwrite=True))
    assert kind == "StoreError"
    assert f"{shared / 's'} cannot be locked" in text
    assert run_as(OWNER, lambda: build(shared / "s", OLD, overwrite=True)) == ["done"]
    assert holds(open_store(shared / "s"), OLD)


@pytest.fixture
def outside(tmp_path: Path, pristine: dict[int, Path]) -> Path:
    """A store that something planted leads to."""
    return Path(shutil.copytree(pristine[OLD.version], tmp_path / "outside"))


@pytest.mark.parametrize(
    "plant",
    [Path.symlink_to, pytest.param(lambda path, at: shutil.copytree(at, path), marks=needs_root)],
)
def test_what_others_have_planted_in_a_directory_is_neither_followed_nor_removed(
    shared: Path, outside: Path, plant: Callable[[Path, Path], Any]
) -> None:
    path = shared / "s"
    path.mkdir()
    path.chmod(0o1777)
    planted = path / "g-0123456789abcdef"
    plant(planted, outside)
    # Neither this user's nor that of the owner of the directory.
    os.chown(path, OTHER, OTHER)
    os.chown(planted, OWNER, OWNER, follow_symlinks=False)
    before = everything(planted), everything(outside)
    for action in (lambda: build(path), lambda: build(path, OLD, overwrite=True)):
        assert run_as(OTHER, action) == ["done"]
    assert holds(open_store(path), OLD)
    assert (everything(planted), everything(outside)) == before


@pytest.mark.parametrize(
    "plant",
    [
        Path.symlink_to,
        lambda path, at: path.symlink_to(at.with_name("nowhere")),
        lambda path, at: os.mkfifo(path),
    ],
    ids=["link", "dangling link", "pipe"],
)
def test_lock_that_others_have_planted_is_refused_and_not_followed(
    shared: Path, outside: Path, plant: Callable[[Path, Path], Any]
) -> None:
    path = shared / "s"
    path.mkdir()
    os.chown(path, *(OTHER, OTHER) if os.geteuid() == 0 else (-1, -1))
    plant(path / ".lock", outside)
    before = everything(shared), everything(outside)
    kind, text = run_as(OTHER, lambda: build(path))
    assert kind == "StoreError"
    assert str(path / ".lock") in text
    assert (everything(shared), everything(outside)) == before
    assert not (outside.parent / "nowhere").exists()


# What the system refuses


def test_open_beyond_the_address_space_says_so(shared: Path, pristine: dict[int, Path]) -> None:
    shutil.copytree(pristine[NEW.version], shared / "s")
    row_bytes = {"x": 32, "label": 8}

    def grow(body: dict[str, Any]) -> None:
        body["num_rows"] = 2**32
        sizes = Shards(2**32, body["num_shards"]).sizes
        for name, num_bytes in row_bytes.items():
            num_chunks = int((-(-sizes * num_bytes // CHUNK_BYTES)).sum())
            body["checksums"][name] = b64encode(bytes(8 * num_chunks)).decode()

    sign_manifest(shared / "s", grow)
    for name, num_bytes in row_bytes.items():
        os.truncate(files_of(shared / "s") / f"{name}.memmap", 2**32 * num_bytes)

    def open_limited() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (2**36, 2**36))
        open_store(shared / "s")

    kind, text = run_as(OTHER, open_limited)
    assert kind == "StoreError"
    assert "x.memmap cannot be mapped" in text
    assert "ulimit -v" in text


def test_rows_beyond_the_size_of_a_file_say_so_and_are_built_on(shared: Path) -> None:
    shared.chmod(0o777)
    rows = [torch.full((row % 7 * 20,), row) for row in range(500)]

    def build_limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, resource.RLIM_INFINITY))
        build(shared / "s", rows)

    kind, text = run_as(OTHER, build_limited)
    assert kind == "OSError"
    assert f"[Errno {errno.EFBIG}] File too large: rows cannot be written" in text
    assert f"'{shared / 's'}'" in text
    assert run_as(OTHER, lambda: build(shared / "s", rows)) == ["done"]
    assert [found.tolist() for found in open_store(shared / "s")] == [row.tolist() for row in rows]
