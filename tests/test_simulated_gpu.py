"""The tests marked ``gpu``, and those of `tests.simulated_gpu`, on simulated devices."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.simulated_gpu.__main__ import UNAVAILABLE, marked_files

ROOT = Path(__file__).resolve().parents[1]
#: What runs in `tests.distributed.test_simulated_gpu`, beside this.
SEVERAL = str(ROOT / "tests" / "simulated_gpu" / "test_processes.py")
TIMEOUT_S = 900


def run_on_simulated_devices(files: Iterable[str]) -> None:
    """Run tests marked ``gpu``; skip where devices cannot be simulated."""
    # torch must be imported after the simulation is loaded: in another process.
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulated_gpu", *files],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode == UNAVAILABLE:
        # On a torch with CUDA the same tests, marked gpu, run on the real devices. Anything else
        # that goes wrong fails this test.
        pytest.skip(f"GPUs cannot be simulated here: {done.stdout.strip()}")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.timeout(TIMEOUT_S)
def test_gpu_tests_pass_on_simulated_devices() -> None:
    run_on_simulated_devices(file for file in marked_files() if file != SEVERAL)
