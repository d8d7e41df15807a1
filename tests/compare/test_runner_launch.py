"""Starting a run: what is said of one that does not end well, and that nothing of it is left."""

import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from lightning_memmap.compare.config import RunSpec, shared_config
from lightning_memmap.compare.measure import HAS_TRAINED
from lightning_memmap.compare.runner import RunError, run
from lightning_memmap.compare.worker import write_error

pytestmark = pytest.mark.slow


def make_spec(path: Path) -> RunSpec:
    return RunSpec(
        kind="timed", config={}, trainer={}, variant="auto", devices=1, global_batch=8,
        num_shards=24, warmup_steps=1, steps=2, transform_is_random=False,
        out=str(path / "run"),
    )  # fmt: skip


def children() -> set[int]:
    """Processes of this one. Others than a run's may be there, such as those of multiprocessing."""
    return {process.pid for process in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize("hangs", [False, True])
def test_run_that_takes_too_long_is_ended_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    if hangs:
        (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(1000)")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    before = children()
    with pytest.raises(RunError, match=r"0\.3 s .*timeout_s") as error:
        run(make_spec(tmp_path), 0.3)
    assert not error.value.refused
    assert children() <= before


@pytest.mark.parametrize(
    ("texts", "words", "refused"),
    [
        (['{"message": "the reason", "refused": true}', '{"message": "x"}'], "the reason", True),
        (['{"message": "hal', '{"message": "whole", "refused": false}'], "whole", False),
    ],
)
def test_first_process_that_fails_says_why(
    tmp_path: Path, texts: list[str], words: str, refused: bool
) -> None:
    spec = make_spec(tmp_path)
    spec.write()
    for index, each in enumerate(texts):
        path = tmp_path / "run" / f"error-{index}.json"
        path.write_text(each)
        os.utime(path, (index, index))
    # It has no model, so that it fails at once.
    with pytest.raises(RunError, match=words) as error:
        run(spec, 100.0)
    assert error.value.refused is refused


def test_error_is_refused_until_a_step_was_trained(tmp_path: Path) -> None:
    for refused in (True, False):
        write_error(tmp_path, ValueError("the reason"))
        (path,) = tmp_path.glob("error-*.json")
        content = json.loads(path.read_text())
        assert content == {"message": "ValueError: the reason", "refused": refused}
        (tmp_path / HAS_TRAINED).touch()


def shared(folder: Path, config: object) -> Any:
    """What variants share of a config."""
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return shared_config(str(file))


def test_shared_config_keeps_what_all_variants_can_have(tmp_path: Path) -> None:
    config = {
        "seed_everything": 5,
        "model": {"class_path": "a.B"},
        "data": {"class_path": "c.D"},
        "ckpt_path": None,
        "trainer": {"precision": "bf16-mixed", "strategy": "ddp", "callbacks": [], "devices": 4},
    }
    sections, trainer, left_out = shared(tmp_path, config)
    assert sections == {name: config[name] for name in ("seed_everything", "model", "data")}
    assert trainer == {"precision": "bf16-mixed"}
    assert left_out == ["trainer.strategy", "trainer.callbacks", "trainer.devices", "ckpt_path"]
    assert shared(tmp_path, {"fit": config})[0] == sections


@pytest.mark.parametrize("seed", [True, False, None])
def test_seed_that_is_no_number_becomes_one(tmp_path: Path, seed: bool | None) -> None:
    config = {"seed_everything": seed, "model": {"a": 1}, "data": {"b": 1}}
    assert shared(tmp_path, config)[0]["seed_everything"] == 0


@pytest.mark.parametrize("config", [None, [], {"model": {}}, {"model": {"class_path": "a.B"}}])
def test_config_without_model_or_data_is_refused(tmp_path: Path, config: object) -> None:
    with pytest.raises(ValueError, match="has no section"):
        shared(tmp_path, config)
