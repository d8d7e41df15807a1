"""What members recorded: their table, and what is missing."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_memmap.strategies import MemberResult, MemberResults, read_results


def result(member: int, status: str = "done", **values: Any) -> MemberResult:
    return MemberResult(member, "fit", 1, status, **values)


def test_table_has_a_row_for_each_member_and_their_mean() -> None:
    results = MemberResults(
        "fit",
        (
            result(0, metrics={"loss": 1.0}),
            result(1, metrics={"loss": 2.0, "other": 5.0}),
            result(2, "failed", error="ValueError: [red]no"),
        ),
    )
    console = Console(width=200)
    with console.capture() as capture:
        console.print(results.table())
    lines = [line.split() for line in capture.get().splitlines() if line.strip()]
    assert lines[0] == ["Members:", "fit"]
    assert lines[1][-2:] == ["loss", "other"]
    assert [line[0] for line in lines[3:6]] == ["0", "1", "2"]
    assert lines[4][-2:] == ["2", "5"]
    assert lines[6:8] == [["mean", "1.5", "5"], ["std", "0.7071"]]
    assert lines[8] == ["member", "2:", "ValueError:", "[red]no"]
    assert [one.member for one in results.done] == [0, 1]


def test_results_that_are_not_there_are_missed(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="fit"):
        read_results(tmp_path)
