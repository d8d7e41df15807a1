"""The row checks of the comparison with other libraries, without any of them."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import libraries
import pytest
import torch
from loader import CASES, Case, RandomRows
from other_loaders import LIBRARIES, Rows, Way
from torch import Tensor

LABELLED = Case(30, torch.uint8, (2, 3), 8, label=True)
PLAIN = Case(30, torch.float32, (5,), 8)


def epoch(case: Case, order: Tensor | None = None) -> Iterator[list[Tensor]]:
    """Batches of the case's rows, reversed or in another order."""
    rows = RandomRows(case).rows
    for chosen in (torch.arange(case.num_rows).flip(0) if order is None else order).split(8):
        yield [rows[chosen]] + [chosen % 10] * case.label


def expected(case: Case) -> Tensor:
    return libraries.expected_fingerprints(Rows(case, RandomRows(case)))


def changed(index: int, change: Callable[[Any], Any]) -> Iterator[list[Any]]:
    """A labelled epoch with one field changed in each batch."""
    for batch in epoch(LABELLED):
        batch[index] = change(batch[index])
        yield batch


def as_dict_or_tensor(fields: list[Tensor]) -> Any:
    """Names in another order than that of the fields, as some libraries sort them."""
    return {"label": fields[1], "rows": fields[0]} if len(fields) == 2 else fields[0]


@pytest.mark.parametrize("case", [LABELLED, PLAIN])
@pytest.mark.parametrize("held", [list, tuple, as_dict_or_tensor])
def test_check_epoch_shuffled_rows_pass(case: Case, held: Callable[[Any], Any]) -> None:
    libraries.check_epoch((held(batch) for batch in epoch(case)), case, expected(case))


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (torch.arange(30), "not shuffled"),
        (torch.arange(1, 30).flip(0), "29 rows, not each of 30"),
        (torch.tensor([5, *range(29, 0, -1)]), "30 rows, not each of 30"),
        (torch.arange(31).flip(0) % 30, "31 rows, not each of 30"),
    ],
    ids=["in order", "one missing", "one instead of another", "one twice"],
)
def test_check_epoch_wrong_rows_are_refused(order: Tensor, reason: str) -> None:
    with pytest.raises(libraries.WrongEpochError, match=reason):
        libraries.check_epoch(epoch(PLAIN, order), PLAIN, expected(PLAIN))


@pytest.mark.parametrize(
    ("batches", "reason"),
    [
        (lambda: changed(0, lambda rows: rows.long()), "torch.int64, .2, 3"),
        (lambda: changed(0, lambda rows: rows.flatten(1)), "torch.uint8, .6"),
        (lambda: changed(0, lambda rows: rows.flip(2)), "not each of 30"),
        (lambda: changed(1, lambda labels: labels.flip(0)), "not each of 30"),
        (lambda: changed(1, lambda labels: labels[1:]), "rows instead of 8"),
        (lambda: changed(1, lambda labels: labels.tolist()), "Tensor', 'list"),
        (lambda: iter([]), "0 rows"),
    ],
    ids=["dtype", "shape", "places of values", "labels", "lengths", "no tensor", "nothing"],
)
def test_check_epoch_wrong_batches_are_refused(
    batches: Callable[[], Iterator[Any]], reason: str
) -> None:
    with pytest.raises(libraries.WrongEpochError, match=reason):
        libraries.check_epoch(batches(), LABELLED, expected(LABELLED))


def test_worth_timing_skipped_rows_are_reported() -> None:
    case = PLAIN
    ways = [
        Way("whole", 0, list(epoch(case))),
        Way("cut", 0, list(epoch(case))[:-1]),
    ]
    lines = libraries.worth_timing(ways, case, expected(case), {}, "wall")
    assert next(lines) == "    cut, 0 workers: not timed, 24 rows, not each of 30 once"
    with pytest.raises(StopIteration) as end:
        next(lines)
    assert end.value.value == ways[:1]


def test_report_names_what_is_missing_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(rows: Rows, directory: Path) -> Iterator[Way]:
        raise OSError("no disk")

    def reads(rows: Rows, directory: Path) -> Iterator[Way]:
        yield Way("a list", 0, list(epoch(rows.case)))

    monkeypatch.setitem(CASES, "tiny", replace(LABELLED, num_rows=32))
    monkeypatch.setitem(LIBRARIES, "not-there", reads)
    monkeypatch.setitem(LIBRARIES, "torch", fails)
    monkeypatch.setitem(LIBRARIES, "numpy", reads)
    args = Namespace(library="not-there,torch,numpy", rounds=1, clock="wall")
    report = "\n".join(libraries.case_lines("tiny", args))
    assert "not-there: not installed" in report
    assert "not measured, OSError: no disk" in report
    assert "best as documented: numpy, a list, 0 workers; the loader is faster" in report
    assert "best by hand: nothing was measured" in report
