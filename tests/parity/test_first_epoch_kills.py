"""Runs killed while their store is built: no half store, no wrong row, the same weights."""

import os
import random
import signal
import subprocess
from collections import Counter
from pathlib import Path
from time import monotonic, sleep

import psutil
import pytest
import torch
from torch import Tensor

from lightning_memmap.errors import StoreNotFoundError
from lightning_memmap.store import open_store, verify_store
from lightning_memmap.store.samples import probe_rows
from tests.parity.first_epoch_program import ROWS, train
from tests.preloaded import python

ROOT = Path(__file__).parents[2]
NUM_KILLS = 4


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    return train(tmp_path_factory.mktemp("first"), "first")


def start(path: Path) -> "subprocess.Popen[bytes]":
    with (path / "printed").open("ab") as printed:
        return subprocess.Popen(
            [python(), "-m", "tests.parity.first_epoch_program", str(path)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=printed,
            stderr=printed,
            start_new_session=True,
        )


def num_read(path: Path) -> int:
    return (path / "log").read_text().count("\n") if (path / "log").exists() else 0


def kill(program: "subprocess.Popen[bytes]", kind: str) -> None:
    """Kill a program, or one of its workers, and wait until it has ended with all of its own."""
    children = psutil.Process(program.pid).children(recursive=True)
    if kind == "worker":
        random.choice(children).kill() if children else program.kill()
    else:
        program.send_signal(signal.SIGINT if kind == "interrupt" else signal.SIGKILL)
    program.wait(60)
    psutil.wait_procs(children, 10)
    assert not [each for each in children if each.is_running() and each.status() != "zombie"]


@pytest.mark.parametrize("kind", ["program", "worker", "interrupt"])
@pytest.mark.parametrize("seed", range(4))
def test_run_that_is_killed_goes_on_as_if_it_was_not(
    tmp_path: Path, uninterrupted: Tensor, kind: str, seed: int
) -> None:
    moments = random.Random(seed)
    for _ in range(NUM_KILLS):
        program = start(tmp_path)
        target = num_read(tmp_path) + 16 + moments.randrange(ROWS // NUM_KILLS)
        deadline = monotonic() + 60
        while program.poll() is None and num_read(tmp_path) < target:
            assert monotonic() < deadline, (tmp_path / "printed").read_text()
            sleep(0.002)
        if program.poll() is None:
            kill(program, kind)
        try:
            assert len(open_store(tmp_path / "stores" / "train")) == ROWS
        except StoreNotFoundError:
            continue
        break
    program = start(tmp_path)
    assert program.wait(120) == 0, (tmp_path / "printed").read_text()
    assert torch.equal(torch.load(tmp_path / "weights.pt"), uninterrupted)
    assert verify_store(tmp_path / "stores" / "train") == []
    read = Counter(map(int, (tmp_path / "log").read_text().split()))
    others = {row: count for row, count in read.items() if row not in probe_rows(ROWS)}
    if kind == "interrupt":
        # All that was written is listed before the end.
        assert max(others.values()) == 1
    assert len(read) == ROWS
