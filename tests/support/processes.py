"""Calls functions in real processes, waits for all, and reads what each rank returned.

A function stands beside the test that calls it. `in_processes` makes a test of which each process
runs the body; `launch` calls a function of ``(out, **options)`` and returns the dictionary of each
rank. Either way, the processes are started by the Trainer, which runs the program again for each
device, or by ``torchrun``, one for each node, and have imported torch already.
"""

import fcntl
import functools
import os
import pickle
import signal
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from time import monotonic, sleep
from typing import Any, TypeVar

import torch

from lightning_memmap.sampling.schedule import BatchSchedule
from tests.support.models import ACCELERATOR_VARIABLE
from tests.support.preloaded import python
from tests.support.rows import make_sampler, order_rows

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240
Case = TypeVar("Case")


@dataclass(frozen=True)
class Outcome:
    """How the programs that a test started ended.

    Args:
        codes: Exit codes of the programs.
        report: What each program printed, its end.
    """

    codes: list[int]
    report: str


def in_processes(processes: int, **launching: Any) -> Callable[[Callable[..., None]], Any]:
    """Make a test of which each process runs the body, with the values of its fixtures.

    Args:
        processes: As for `launch`. The body must create Trainers for this number.
        launching: Other options of `launch`.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(tmp_path: Path, **fixtures: Any) -> None:
            launch(body, tmp_path, processes=processes, **launching, **fixtures)

        return test

    return decorate


def launch(
    function: Callable[..., Any],
    out: Path,
    *,
    processes: int,
    nodes: int = 0,
    timeout_s: float = TIMEOUT_S,
    accelerator: str | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Call a function in several processes, and return what each rank returned, by rank.

    Args:
        function: A function of a module, which each process imports.
        out: Empty directory for logs and results.
        processes: Processes over all nodes. The function must create Trainers for this number.
        nodes: 0 lets the Trainer start the processes. Otherwise as many ``torchrun`` do.
        timeout_s: After this long all are killed and the test fails.
        accelerator: Of the Trainers of `tests.support.models.make_trainer`; by default as here.
        options: Passed to the function; they are pickled.
    """
    outcome = launch_any(
        function,
        out,
        processes=processes,
        nodes=nodes,
        timeout_s=timeout_s,
        accelerator=accelerator,
        **options,
    )
    assert outcome.codes == [0] * len(outcome.codes), outcome.report
    # Of a run that quietly was one process, the files of the other ranks are missing.
    ranks: list[dict[str, Any]] = [
        torch.load(out / f"rank{rank}.pt", map_location="cpu") for rank in range(processes)
    ]
    assert [rank["world_size"] for rank in ranks] == [processes] * processes
    return ranks


def launch_any(
    function: Callable[..., Any],
    out: Path,
    *,
    processes: int,
    nodes: int = 0,
    timeout_s: float = TIMEOUT_S,
    accelerator: str | None = None,
    to_the_last: bool = False,
    **options: Any,
) -> Outcome:
    """Call a function that may fail; see `launch`.

    Args:
        to_the_last: Wait also for the processes that the programs have started, which may live
            longer. Otherwise they are killed.
    """
    name = f"{function.__module__}:{function.__qualname__}"
    (out / "options.pickle").write_bytes(pickle.dumps(options))
    program = ["-m", "tests.support.process", name, str(out)]
    port = free_port()
    if nodes:
        launcher = [
            *(python(), "-m", "torch.distributed.run"),
            *(f"--nnodes={nodes}", f"--nproc-per-node={processes // nodes}"),
            *("--master-addr=127.0.0.1", f"--master-port={port}"),
        ]
        commands = [[*launcher, f"--node-rank={node}", *program] for node in range(nodes)]
    else:
        commands = [[python(), *program]]
    ours = {key: value for key, value in os.environ.items() if not key.startswith("PL_")}
    env = ours | {"PYTHONPATH": str(ROOT), "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    if accelerator is not None:
        env[ACCELERATOR_VARIABLE] = accelerator
    logs = [out / f"program{index}.log" for index in range(len(commands))]
    started = monotonic()
    programs = []
    for command, log in zip(commands, logs, strict=True):
        with log.open("w") as file:
            # Held by every process that prints to it.
            fcntl.flock(file, fcntl.LOCK_SH)
            # Sessions of their own: the processes that a program starts end with it.
            programs.append(
                subprocess.Popen(
                    command, stdout=file, stderr=file, env=env, cwd=ROOT, start_new_session=True
                )
            )
    try:
        codes = [program.wait(timeout_s) for program in programs]
        while to_the_last and any(_is_printed_to(log) for log in logs):
            assert monotonic() - started < timeout_s, f"processes are left\n{_report(logs)}"
            sleep(0.05)
    except subprocess.TimeoutExpired:
        # torchrun gives its workers sessions of their own, and ends them when it is asked to end.
        for running in programs:
            running.terminate()
        for running in programs:
            running.wait(60)
        raise AssertionError(f"not done after {timeout_s} s\n{_report(logs)}") from None
    finally:
        for running in programs:
            _kill_session(running)
    return Outcome(codes, _report(logs))


def _is_printed_to(log: Path) -> bool:
    with log.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _kill_session(program: "subprocess.Popen[bytes]") -> None:
    try:
        os.killpg(program.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    program.wait()


def _report(logs: list[Path]) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text()[-6000:]}" for log in logs)


def each_case(cases: Iterable[Case]) -> Iterator[tuple[int, Case]]:
    """Number the cases that the processes of one test go through, and print each: the last one in
    the log of a test that fails is the one that failed."""
    for number, case in enumerate(cases):
        print(f"case {number}: {case}", flush=True)
        yield number, case


def free_port() -> int:
    """A port of this machine that nobody listened at a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def mean_losses(ranks: list[dict[str, Any]]) -> torch.Tensor:
    """The mean loss over the rows of each step, from the mean losses of the ranks.

    Args:
        ranks: What each rank returned: its ``losses``, and the rows that it has ``seen``.
    """
    losses = torch.tensor([rank["losses"] for rank in ranks], dtype=torch.float64)
    rows = torch.tensor([[len(step) for step in rank["seen"]["train"]] for rank in ranks])
    return (losses * rows).sum(0) / rows.sum(0)


def expected_batches(rows: int, global_batch: int, epoch: int, seed: int = 0) -> list[list[int]]:
    """The rows of each step of an epoch of a data module in 24 shards."""
    order = order_rows(make_sampler(rows, 24, seed, shuffle=True), epoch, 0, rows)
    plan = BatchSchedule(rows, global_batch, 24)
    return [order[slice(*plan.bounds(step))] for step in range(len(plan))]


def sorted_steps(ranks: list[list[list[Any]]]) -> list[list[Any]]:
    """The rows of each step over all ranks, sorted: of each rank, those of its steps are given."""
    return [sorted(chain(*parts)) for parts in zip(*ranks, strict=True)]


def global_batches(ranks: list[list[list[int]]]) -> list[list[int]]:
    """The rows of each step over all data-parallel ranks, in stream order where the step begins
    with rank 0: rank r of R has every R-th row.

    Args:
        ranks: By data-parallel rank, the rows of each of its steps. All have as many steps.
    """
    batches = []
    for parts in zip(*ranks, strict=True):
        rounds = zip_longest(*parts)
        batches.append([row for rows in rounds for row in rows if row is not None])
    return batches
