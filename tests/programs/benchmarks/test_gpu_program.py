"""The benchmark program for GPUs, on a machine without one."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.preloaded import run

pytestmark = pytest.mark.slow


ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "tests" / "programs" / "benchmarks" / "gpu.py"


def measure(*options: str) -> "subprocess.CompletedProcess[str]":
    # Even if this machine has GPUs.
    return run(PROGRAM, *options, CUDA_VISIBLE_DEVICES="")


def test_gpu_benchmark_without_gpu_fails_and_says_so() -> None:
    done = measure()
    assert done.returncode != 0
    assert "there is no GPU here" in done.stderr
    assert not done.stdout


def test_gpu_benchmark_on_a_cpu_runs_and_says_that_it_measures_no_gpu(tmp_path: Path) -> None:
    answer = tmp_path / "figures.json"
    figures = ("--only", "fetch,load,wait,resnet", "--json", str(answer))
    done = measure("--device", "cpu", "--tiny", *figures)
    assert done.returncode == 0, done.stderr
    assert "nothing of a GPU" in done.stdout
    for line in ("150,528", "store to the device, disk", "device, 2 ahead", "host, 0 ahead"):
        assert line in done.stdout
    report = json.loads(answer.read_text())
    assert "ResNet-50" in report["network"] or "resnet50" in report["network"]
    rows = report["figures"]["resnet"]
    assert len(rows) == 5
    for values in rows.values():
        assert len(values["images/s"]) == 2
        assert all(rate > 0 for rate in values["images/s"])


def test_plain_resnet_is_the_network_that_people_know() -> None:
    program = ROOT / "tests" / "programs" / "benchmarks" / "gpu_resnet.py"
    text = "import gpu_resnet; net = gpu_resnet.plain_resnet50(); print(net)"
    code = f"import sys; sys.path.insert(0, {str(program.parent)!r}); {text}"
    code += "; print(sum(each.numel() for each in net.parameters()))"
    done = run("-c", code, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    # As torchvision's and timm's.
    assert done.stdout.splitlines()[-1] == "25557032"
