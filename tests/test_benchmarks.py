"""The benchmark program for GPUs, on a machine without one."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.preloaded import python

pytestmark = pytest.mark.slow


ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "tests" / "benchmarks" / "gpu.py"


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
