"""The tests marked ``gpu``, and those of `tests.simulated_gpu`, on simulated devices."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.simulated_gpu.__main__ import marked_files
from tests.simulated_gpu.build import why_unavailable

ROOT = Path(__file__).resolve().parents[1]
#: What runs in `tests.distributed.test_simulated_gpu`, beside this.
SEVERAL = str(ROOT / "tests" / "simulated_gpu" / "test_processes.py")
TIMEOUT_S = 900
# On a torch with CUDA the same tests, marked gpu, run on the real devices. Without a compiler there
# is nothing to run them on. Anything else that goes wrong is a failure.
needs_simulation = pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable())


def run_on_simulated_devices(files: Iterable[str]) -> None:
    """Run tests marked ``gpu``."""
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
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@needs_simulation
@pytest.mark.timeout(TIMEOUT_S)
def test_gpu_tests_pass_on_simulated_devices() -> None:
    run_on_simulated_devices(file for file in marked_files() if file != SEVERAL)
