"""The benchmark program for GPUs, on a machine without one."""

import subprocess
from pathlib import Path

import pytest

from tests.preloaded import run

pytestmark = pytest.mark.slow


ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "tests" / "benchmarks" / "gpu.py"


def measure(*options: str) -> "subprocess.CompletedProcess[str]":
    # Even if this machine has GPUs.
    return run(PROGRAM, *options, CUDA_VISIBLE_DEVICES="")


def test_gpu_benchmark_without_gpu_fails_and_says_so() -> None:
    done = measure()
    assert done.returncode != 0
    assert "there is no GPU here" in done.stderr
    assert not done.stdout


def test_gpu_benchmark_on_a_cpu_runs_and_says_that_it_measures_no_gpu() -> None:
    done = measure("--device", "cpu", "--tiny")
    assert done.returncode == 0, done.stderr
    assert "nothing of a GPU" in done.stdout
    for line in ("150,528", "store to the device, disk", "device, 2 ahead", "host, 0 ahead"):
        assert line in done.stdout
