"""The benchmark program for GPUs, on a machine without one, and its model of what they give."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.preloaded import python

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "tests" / "benchmarks" / "gpu.py"


def load_model() -> Any:
    """The module ``gpu_model`` beside the program."""
    spec = importlib.util.spec_from_file_location("gpu_model", PROGRAM.with_name("gpu_model.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look for their module.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python(), str(PROGRAM), *options],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            # Even if this machine has GPUs.
            "CUDA_VISIBLE_DEVICES": "",
        },
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_gpu_benchmark_without_gpu_fails_and_says_so() -> None:
    done = run()
    assert done.returncode != 0
    assert "there is no GPU here" in done.stderr
    assert not done.stdout


def test_gpu_benchmark_on_a_cpu_runs_and_says_that_it_measures_no_gpu() -> None:
    done = run("--device", "cpu", "--tiny")
    assert done.returncode == 0, done.stderr
    assert "nothing of a GPU" in done.stdout
    for line in ("150,528", "store to the device, disk", "device, 2 ahead", "host, 0 ahead"):
        assert line in done.stdout


def test_predictions_on_the_page_are_those_of_the_model() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert f"<!-- model -->\n{load_model().markdown()}\n<!-- end of model -->" in page


def test_model_is_bytes_over_bandwidths_and_launches() -> None:
    model = load_model()
    gpu = model.Gpu("one", memory=1e12, nvlink=1e11, pcie=1e10, bf16=1e15)
    share = model.COPY_SHARE
    # A row of two sectors is read at the rate of a copy; half of a sector is read in vain.
    assert model.fetch_rate(gpu, 256) == share * 1e12
    assert model.fetch_rate(gpu, 64) == share * 1e12 * 2 / 3
    assert model.load_rate(gpu, 1e9) == 1e9
    assert model.load_rate(gpu, 1e12) == share * 1e10
    assert model.send_s(gpu, 10**9, from_host=True) == 10 * model.send_s(
        gpu, 10**9, from_host=False
    )
    assert model.waiting_share(1.0, 1.0, 0) == 0.5
    assert model.waiting_share(1.0, 1.0, 1) == 0
    assert model.waiting_share(1.0, 3.0, 1) == 2 / 3
