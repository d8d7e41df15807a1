"""One-file checkpoints: whole or absent, wherever the process is killed."""

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from lightning_memmap.strategies import STRATEGIES
from lightning_memmap.strategies.common import checkpoints as checkpoints
from tests.support.models import make_trainer


class OwnIO(TorchCheckpointIO):
    """A user's own."""


def saved_in_a_child(trainer: Any, path: Path, value: float, spoil: Callable[[], None]) -> int:
    """Save a checkpoint in a process that goes wrong, and return its exit status."""
    if (child := os.fork()) == 0:
        try:
            spoil()
            trainer.strategy.checkpoint_io.save_checkpoint({"x": torch.full((4096,), value)}, path)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_torch_save() -> None:
    def save(checkpoint: Any, file: Any) -> None:
        file.write(b"half")
        file.flush()
        die()

    torch.save = save  # type: ignore[assignment]


def kill_in_copy_from_another_file_system() -> None:
    rename = os.rename

    def rename_beside(source: Any, target: Any, **options: Any) -> None:
        if os.path.dirname(source) != os.path.dirname(target):
            raise OSError(errno.EXDEV, "another file system")
        rename(source, target, **options)

    def copy(source: Any, target: Any, **_: Any) -> None:
        open(target, "wb").close()
        die()

    os.rename = rename_beside  # type: ignore[assignment]
    shutil.copyfile = copy  # type: ignore[assignment]


@pytest.mark.parametrize("name", [name for name, _, _ in STRATEGIES])
@pytest.mark.parametrize("spoil", [kill_in_torch_save, kill_in_copy_from_another_file_system])
def test_checkpoint_of_every_strategy_is_whole_where_its_process_is_killed(
    tmp_path: Path, name: str, spoil: Callable[[], None]
) -> None:
    trainer = make_trainer(tmp_path, strategy=name, devices=2)
    path = tmp_path / "last.ckpt"
    trainer.strategy.checkpoint_io.save_checkpoint({"x": torch.full((4096,), 1.0)}, path)
    status = saved_in_a_child(trainer, path, 2.0, spoil)
    # Nothing is copied, so that it isn't killed there.
    expected = 1.0 if status else 2.0
    assert torch.equal(torch.load(path)["x"], torch.full((4096,), expected))
    # What is left of the first attempt is used by the next.
    trainer.strategy.checkpoint_io.save_checkpoint({"x": torch.full((4096,), 3.0)}, path)
    assert torch.load(path)["x"][0] == 3.0
    assert [*tmp_path.iterdir()] == [path]


def test_error_leaves_the_old_checkpoint_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    io, path = checkpoints.ReplacingCheckpointIO(), tmp_path / "last.ckpt"
    io.save_checkpoint({"x": 1}, path)

    def fail(checkpoint: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="no space"):
        io.save_checkpoint({"x": 2}, path)
    assert torch.load(path) == {"x": 1}
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_file_replaces_a_checkpoint_in_a_folder_and_no_other_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(checkpoints, "_exchange", lambda *_: False)
    io = checkpoints.ReplacingCheckpointIO()
    path, foreign = tmp_path / "last.ckpt", tmp_path / "foreign"
    path.mkdir()
    (path / "meta.pt").touch()
    io.save_checkpoint({"x": 1}, path)
    assert torch.load(path) == {"x": 1}
    foreign.mkdir()
    (foreign / "notes").touch()
    with pytest.raises(IsADirectoryError):
        io.save_checkpoint({"x": 1}, foreign)
    assert {each.name for each in tmp_path.iterdir()} == {"last.ckpt", "foreign"}
    io.remove_checkpoint(path)
    assert not path.exists()


def test_io_of_the_user_is_kept(tmp_path: Path) -> None:
    own = OwnIO()
    trainer = make_trainer(tmp_path, strategy="memmap_superbatch", plugins=[own])
    assert trainer.strategy.checkpoint_io is own
    wrapper = AsyncCheckpointIO()
    trainer = make_trainer(tmp_path, strategy="memmap_superbatch", plugins=[wrapper])
    assert trainer.strategy.checkpoint_io is wrapper
    assert type(wrapper.checkpoint_io) is checkpoints.ReplacingCheckpointIO
    assert type(AsyncCheckpointIO(own).checkpoint_io) is OwnIO


def test_checkpoint_at_a_url_is_written_there(tmp_path: Path) -> None:
    io = checkpoints.ReplacingCheckpointIO()
    io.save_checkpoint({"x": 1}, "memory://checkpoints/last.ckpt")
    assert io.load_checkpoint("memory://checkpoints/last.ckpt") == {"x": 1}
    assert not [*tmp_path.iterdir()]
