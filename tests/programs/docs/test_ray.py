"""Tasks of Ray write the parts of a store; and the guide to Ray Train: its own code runs in two
workers, with `ddp` and with super-batches."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from lightning_memmap import MemmapDataModule, build_store, open_store
from lightning_memmap.store.manifest import Manifest
from tests.programs.docs.ray_programs import BATCH_SIZE, EPOCHS, NUM_ROWS, PARTS_ROWS, Observed
from tests.support.datasets import Numbered, holds
from tests.support.models import Points, make_trainer
from tests.support.preloaded import python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # Ray takes its time to start.
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ray")
    program = [python(), "-m", "tests.programs.docs.ray_programs", str(path)]
    environment = {
        **os.environ,
        "HOME": str(path),
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "RAY_AUTH_MODE": "disabled",
    }
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return path


def test_parts_by_tasks_make_the_store(folder: Path, tmp_path: Path) -> None:
    assert holds(open_store(folder / "parts"), Numbered(PARTS_ROWS))
    build_store(Numbered(PARTS_ROWS), tmp_path / "one", fingerprint="numbered", progress=False)
    found, expected = Manifest.read(folder / "parts"), Manifest.read(tmp_path / "one")
    assert found.content == expected.content


def test_guide_trains_in_two_workers_as_one_process_does(folder: Path, tmp_path: Path) -> None:
    for name, num_devices in (("ddp", 2), ("superbatch", 4)):
        workers = [torch.load(folder / name / f"{rank}.pt") for rank in (0, 1)]
        (first, weights), (second, other_weights) = workers
        one = Observed(tmp_path)
        data = MemmapDataModule(
            Points(NUM_ROWS), store_dir=tmp_path / "store", batch_size=BATCH_SIZE * num_devices
        )
        make_trainer(tmp_path, max_epochs=EPOCHS).fit(one, data)
        # Each worker has its share of the rows of every step.
        for rows, other_rows, expected in zip(first, second, one.seen["train"], strict=True):
            assert sorted(rows + other_rows) == sorted(expected)
            assert abs(len(rows) - len(other_rows)) <= num_devices // 2
        for parameter, value in one.net.state_dict().items():
            assert torch.equal(weights[parameter], other_weights[parameter])
            torch.testing.assert_close(weights[parameter], value, rtol=0, atol=2e-6)
