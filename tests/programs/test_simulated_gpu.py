"""The tests marked ``gpu``, and those of `tests.programs.simulated_gpu`, on simulated devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs.simulated_gpu.build import why_unavailable

pytestmark = pytest.mark.slow


ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 900


# On a torch with CUDA the same tests, marked gpu, run on the real devices. Without a compiler there
# is nothing to run them on. Anything else that goes wrong is a failure.
@pytest.mark.skipif(bool(why_unavailable()), reason=why_unavailable())
@pytest.mark.timeout(TIMEOUT_S)
def test_gpu_tests_pass_on_simulated_devices() -> None:
    # torch must be imported after the simulation is loaded: in another process.
    done = subprocess.run(
        [sys.executable, "-m", "tests.programs.simulated_gpu"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
