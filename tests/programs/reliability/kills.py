"""What the programs that kill trainings have in common: ranks, options, and their table."""

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from tests.programs.reliability.forks import Forked
from tests.programs.reliability.outcome import Fault, Outcome
from tests.support.processes import free_port

#: How long a rank may train on that has lost the other one.
PATIENCE_S = 30.0


def begin_training(
    train: Callable[..., Any], directory: Path, num_ranks: int, *arguments: Any
) -> list[Forked]:
    """Begin ``train(directory, num_ranks, *arguments)`` in a process for each rank."""
    port = free_port()
    return [
        Forked(_train_rank, train, rank, port, (directory, num_ranks, *arguments))
        for rank in range(num_ranks)
    ]


def _train_rank(train: Callable[..., Any], rank: int, port: int, arguments: Any) -> Any:
    _, num_ranks, *_ = arguments
    if num_ranks > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_PORT": port}
        names |= {"LOCAL_WORLD_SIZE": num_ranks, "GROUP_RANK": 0}
        os.environ |= {name: str(value) for name, value in names.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "kills"}
    torch.set_num_threads(1)
    return train(*arguments)


def end_training(ranks: list[Forked]) -> list[str]:
    """Wait for the ranks of a training that nobody kills, and return what each returned."""
    endings = [rank.end() for rank in ranks]
    assert all(ending.status == 0 and isinstance(ending.value, str) for ending in endings), endings
    return [ending.value for ending in endings]


def end_killed(ranks: list[Forked], outcome: Outcome) -> list[Any]:
    """Wait for the ranks of a training one of which was killed, and return how they ended."""
    endings = [rank.end(PATIENCE_S) for rank in ranks]
    for ending in endings:
        if ending.hung:
            outcome.add(Fault.HANG, f"it did not end after the kill\n{ending.output}")
    return endings


def run_program(
    name: str,
    description: str | None,
    titles: dict[str, str],
    run_case: Callable[[Path, int, dict[tuple[int, bool], Any]], tuple[str, Outcome]],
    reference: Callable[[Path, int, bool], Any] | None = None,
) -> int:
    """Run cases by number until there were enough kills, and print a row for each kind of victim.

    Args:
        name: The module that is run.
        description: Its docstring.
        titles: By victim, the first cell of its row.
        run_case: Runs the case of a number, and returns its victim and its outcome. The third
            argument is what trainings that nobody kills return, by number of ranks and variant.
        reference: Runs a training that nobody kills.

    Returns:
        1 if anything went wrong, else 0.
    """
    parser = argparse.ArgumentParser(f"python -m {name}", description=description)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="at most")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    options = parser.parse_args(sys.argv[1:])
    ends = monotonic() + 60 * options.minutes
    outcomes: dict[str, list[Outcome]] = {victim: [] for victim in titles}
    num_kills = 0
    number = options.first
    with tempfile.TemporaryDirectory(prefix="reliability-") as directory:
        scratch = Path(directory)
        kinds = product((1, 2), (False, True)) if reference is not None else ()
        expected = {kind: reference(scratch, *kind) for kind in kinds}  # type: ignore[misc]
        while num_kills < options.kills and monotonic() < ends:
            victim, outcome = run_case(scratch / str(number), number, expected)
            outcomes[victim].append(outcome)
            num_kills += outcome.notes["killed"]
            for fault, text in outcome.faults:
                print(f"case {number}: {fault.value}: {text}", flush=True)
            number += 1
    for victim, cases in outcomes.items():
        faults = Counter(fault for outcome in cases for fault, _ in outcome.faults)
        kills = sum(outcome.notes["killed"] for outcome in cases)
        seconds = sum(outcome.seconds for outcome in cases)
        cells = [titles[victim], f"{kills}", *(f"{faults[fault]}" for fault in Fault)]
        print(f"| {' | '.join(cells)} | {seconds:,.0f} |")
    return int(any(outcome.faults for cases in outcomes.values() for outcome in cases))
