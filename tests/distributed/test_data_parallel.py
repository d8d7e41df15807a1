"""The data module under Lightning's own ddp: real processes, the same global batches."""

import os
import socket
import subprocess
import sys
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memmap.order import StepPlan, Stream

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240
GLOBAL_BATCH = 16


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def environment() -> dict[str, str]:
    ours = {key: value for key, value in os.environ.items() if not key.startswith("PL_")}
    return ours | {"PYTHONPATH": str(ROOT), "MASTER_PORT": str(free_port())}


def run_ranks(commands: list[list[str]], out: Path, world_size: int) -> list[dict[str, Any]]:
    """Start processes, wait for all, and read what each rank wrote."""
    env = environment()
    logs = [out / f"process{index}.log" for index in range(len(commands))]
    processes = []
    for command, log in zip(commands, logs, strict=True):
        with log.open("w") as file:
            processes.append(subprocess.Popen(command, stdout=file, stderr=file, env=env, cwd=ROOT))
    try:
        codes = [process.wait(TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    report = "\n".join(f"--- {log.name}\n{log.read_text()[-4000:]}" for log in logs)
    assert codes == [0] * len(commands), report
    ranks = [torch.load(out / f"rank{rank}.pt") for rank in range(world_size)]
    assert [rank["world_size"] for rank in ranks] == [world_size] * world_size
    return ranks


def script(out: Path, strategy: str, devices: int, size: int, rows: int, *more: str) -> list[str]:
    options = {
        "strategy": strategy,
        "devices": devices,
        "batch_size": GLOBAL_BATCH // size,
        "rows": rows,
        "test_rows": rows - 3,
        "out": out,
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    return ["-m", "tests.distributed.train", *flags, *more]


def global_batches(ranks: list[dict[str, Any]], stage: str) -> list[list[int]]:
    """The rows of each step over all ranks, in stream order: rank r of R has every R-th."""
    batches = []
    for parts in zip(*(rank["seen"][stage] for rank in ranks), strict=True):
        rounds = zip_longest(*parts)
        batches.append([row for rows in rounds for row in rows if row is not None])
    return batches


def expected_batches(rows: int, epochs: int) -> list[list[int]]:
    stream = Stream(rows, 24, 0, shuffle=True)
    plan = StepPlan(rows, GLOBAL_BATCH, 24)
    batches = []
    for epoch in range(epochs):
        shards, offsets = stream.at(epoch, range(rows))
        order = (offsets * 24 + shards).tolist()
        for step in range(len(plan)):
            first, last = plan.bounds(step)
            batches.append(order[first:last])
    return batches


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("one")
    command = [sys.executable, *script(out, "memmap_superbatch", 2, 2, 160)]
    return run_ranks([command], out, 1)[0]


@pytest.mark.parametrize("size", [2, 4])
def test_ddp_has_global_batches_and_weights_of_one_process(
    tmp_path: Path, one_process: dict[str, Any], size: int
) -> None:
    command = [sys.executable, *script(tmp_path, "ddp", size, size, 160)]
    ranks = run_ranks([command], tmp_path, size)
    assert global_batches(ranks, "train") == one_process["seen"]["train"]
    for rank in ranks:
        assert torch.equal(rank["weights"], ranks[0]["weights"])
        torch.testing.assert_close(rank["weights"], one_process["weights"], rtol=0, atol=2e-6)
        assert rank["test_mean"] == pytest.approx(one_process["test_mean"], abs=1e-6)


@pytest.mark.parametrize("rows", [151, 149])
def test_ddp_uneven_rows_each_row_once_and_equal_steps(tmp_path: Path, rows: int) -> None:
    command = [sys.executable, *script(tmp_path, "ddp", 2, 2, rows)]
    ranks = run_ranks([command], tmp_path, 2)
    # Where a step begins at an odd position, rank 1 has its first row: the sets are compared.
    found = [sorted(rows) for rows in global_batches(ranks, "train")]
    assert found == [sorted(rows) for rows in expected_batches(rows, 2)]
    steps = [[len(part) for part in rank["seen"]["train"]] for rank in ranks]
    assert len(steps[0]) == len(steps[1]) == len(expected_batches(rows, 2))
    assert min(chain(*steps)) >= 1
    tested = sorted(chain(*chain(*(rank["seen"]["test"] for rank in ranks))))
    assert tested == list(range(5000, 5000 + rows - 3))


def test_ddp_two_nodes_by_torchrun_has_global_batches_of_one_process(
    tmp_path: Path, one_process: dict[str, Any]
) -> None:
    port = free_port()
    commands = [
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
            "--nproc-per-node=1",
            f"--node-rank={node}",
            "--master-addr=127.0.0.1",
            f"--master-port={port}",
            *script(tmp_path, "ddp", 1, 2, 160, "--num_nodes=2"),
        ]
        for node in range(2)
    ]
    ranks = run_ranks(commands, tmp_path, 2)
    assert global_batches(ranks, "train") == one_process["seen"]["train"]
    torch.testing.assert_close(ranks[0]["weights"], one_process["weights"], rtol=0, atol=2e-6)
