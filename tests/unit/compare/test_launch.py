"""Starting a run: what is said of one that does not end well, and that nothing of it is left."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from lightning_memmap.compare.config import RunSpec, shared_config
from lightning_memmap.compare.runner import RunError, launch, run
from lightning_memmap.compare.worker import write_error

pytestmark = pytest.mark.slow


def make_spec(path: Path) -> RunSpec:
    return RunSpec(
        kind="timed", config={}, trainer={}, variant="auto", devices=1, global_batch=8,
        warmup_steps=1, steps=2, transform_is_random=False,
        out=str(path / "run"),
    )  # fmt: skip


def children() -> set[int]:
    """Processes of this one. Others than a run's may be there, such as those of multiprocessing."""
    return {process.pid for process in psutil.Process().children(recursive=True)}


def ignore(steps: int) -> None:
    pass


def test_run_that_takes_too_long_is_ended_and_says_so(tmp_path: Path) -> None:
    before = children()
    with pytest.raises(RunError, match=r"not finished after 0\.3 s") as error:
        run(make_spec(tmp_path), 0.3, ignore)
    assert not error.value.refused
    assert children() <= before


def test_errors_that_two_processes_wrote_over_each_other_cost_the_run_and_no_more(
    tmp_path: Path,
) -> None:
    spec = make_spec(tmp_path)
    spec.write()
    (tmp_path / "run" / "error.json").write_bytes(b'{"message": "short"}nger than the other"}')
    # It has no model, so that it fails at once.
    with pytest.raises(RunError, match="exit code 1"):
        run(spec, 100.0, ignore)


def test_first_process_that_fails_says_why(tmp_path: Path) -> None:
    write_error(tmp_path, ValueError("the reason"))
    write_error(tmp_path, RuntimeError("a connection was closed, " * 20))
    found = json.loads((tmp_path / "error.json").read_text())
    assert found == {"message": "ValueError: the reason", "refused": True}


def test_interrupt_ends_the_run(tmp_path: Path) -> None:
    def interrupt(steps: int) -> None:
        raise KeyboardInterrupt

    before = children()
    with pytest.raises(KeyboardInterrupt):
        run(make_spec(tmp_path), 60.0, interrupt)
    assert children() <= before


def test_run_that_was_started_ahead_waits_for_its_spec_and_ends_with_its_parent(
    tmp_path: Path,
) -> None:
    started = launch(tmp_path / "run")
    assert not started.ends_within(0.1)
    with pytest.raises(RunError, match="required: model"):
        run(make_spec(tmp_path), 100.0, ignore, started)
    # It has no parent of this number.
    command = [sys.executable, "-m", "lightning_memmap.compare.worker", str(tmp_path / "x"), "0"]
    assert subprocess.run(command, timeout=100, check=False).returncode == 0


def test_shared_config_keeps_what_all_arms_can_have() -> None:
    config = {
        "seed_everything": 5,
        "model": {"class_path": "a.B"},
        "data": {"class_path": "c.D"},
        "ckpt_path": None,
        "trainer": {"precision": "bf16-mixed", "strategy": "ddp", "callbacks": [], "devices": 4},
    }
    sections, trainer, left_out = shared_config(config)
    assert sections == {name: config[name] for name in ("seed_everything", "model", "data")}
    assert trainer == {"precision": "bf16-mixed"}
    assert left_out == ["trainer.strategy", "trainer.callbacks", "trainer.devices", "ckpt_path"]
    assert shared_config({"fit": config})[0] == sections


@pytest.mark.parametrize("seed", [True, False, None])
def test_seed_that_is_no_number_becomes_one(seed: bool | None) -> None:
    config = {"seed_everything": seed, "model": {"a": 1}, "data": {"b": 1}}
    assert shared_config(config)[0]["seed_everything"] == 0


@pytest.mark.parametrize("config", [None, [], {"model": {}}, {"model": {"class_path": "a.B"}}])
def test_config_without_model_or_data_is_refused(config: object) -> None:
    with pytest.raises(ValueError, match="has no section"):
        shared_config(config)
