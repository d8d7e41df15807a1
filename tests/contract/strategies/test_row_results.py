"""`RowResults` under each strategy: the value of each row is the one of its last step."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed.harness import launch
from tests.support.distributed.scenarios import row_results
from tests.support.models import Points, Regression

NUM_ROWS = 61
#: Strategies of two processes, by name of the case.
IN_PROCESSES = {
    "memmap_superbatch_ddp": "memmap_superbatch_ddp",
    "ddp": "ddp",
    "ddp weighted": "ddp",
    "memmap_fsdp2": "memmap_fsdp2",
}


def assert_complete(results: dict[str, Any]) -> None:
    """Check the results of a training with constant weights, row by row."""
    points = Points(NUM_ROWS)
    module = Regression()
    train = results["train"]
    val = results["val"]
    expected = dict(results["last"])
    seen = [row for row, is_seen in enumerate(train["seen"]) if is_seen]
    held_out = [row for row, is_seen in enumerate(val["seen"]) if is_seen]
    assert seen == [*expected]
    assert not {*seen} & {*held_out}
    assert len(held_out) == 15
    assert [train["step"][row] for row in seen] == [*expected.values()]
    for table, rows in ((train, seen), (val, held_out)):
        assert {*table["epoch"]} == {1}
        assert len(table["row"]) == NUM_ROWS
        for row in rows:
            loss = (module(points.x[row]) - points.y[row]).square().item()
            assert table["row"][row] == row
            assert table["x"][row] == points.x[row].tolist()
            assert table["row_loss"][row] == pytest.approx(loss, rel=1e-5, abs=1e-7)
        for row in {*range(NUM_ROWS)} - {*rows}:
            assert torch.tensor(table["x"][row]).isnan().all()
            assert table["step"][row] == 0


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["memmap_superbatch", "memmap_dp"])
def test_row_results_in_one_process_equal_rows_computed_alone(
    tmp_path: Path, strategy: str, devices: int
) -> None:
    results = row_results.under(tmp_path, strategy, devices)
    assert len(results["last"]) == NUM_ROWS - 15
    assert_complete(results)


@pytest.mark.parametrize(
    "options",
    [
        {"weighted": True},
        {"accumulate_grad_batches": 3},
        {"precision": "bf16-mixed"},
        {"limit_train_batches": 3},
    ],
    ids=lambda options: "-".join(options),
)
def test_row_results_with_options_have_the_last_value(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    results = row_results.under(tmp_path, "memmap_superbatch", 2, **options)
    if "precision" in options:
        losses = results["train"].pop("row_loss")
        results["train"]["row_loss"] = results["val"]["row_loss"] = _losses()
        seen = torch.tensor(results["train"]["seen"])
        torch.testing.assert_close(
            torch.tensor(losses)[seen], torch.tensor(_losses())[seen], rtol=0.1, atol=0.05
        )
    assert_complete(results)


def _losses() -> list[float]:
    points = Points(NUM_ROWS)
    losses: list[float] = (Regression()(points.x) - points.y).square().flatten().tolist()
    return losses


def test_row_results_of_two_processes_equal_rows_computed_alone(tmp_path: Path) -> None:
    ranks = launch("row_results.several", tmp_path, processes=2, strategies=IN_PROCESSES, devices=2)
    for rank in ranks:
        for name in IN_PROCESSES:
            assert_complete(rank[name])
    # A row that is drawn twice has the same value as in one process.
    alone = row_results.under(tmp_path, "memmap_superbatch", 2, "alone", weighted=True)
    assert ranks[0]["ddp weighted"]["train"]["step"] == alone["train"]["step"]


def test_row_results_of_other_fields_on_a_rank_are_an_error_on_all(tmp_path: Path) -> None:
    ranks = launch("row_results.disagreeing", tmp_path, processes=2)
    assert ranks[0]["error"] == "StoreError"
    assert "step int32" in ranks[0]["text"]
    assert ranks[1]["error"] == "RankMismatchError"


def test_two_processes_train_from_the_results_of_both(tmp_path: Path) -> None:
    alone = row_results.from_own_results(tmp_path / "alone", "memmap_superbatch", 2)
    ranks = launch("row_results.from_own_results", tmp_path, processes=2, strategy="ddp", devices=2)
    assert ranks[0]["steps"] == ranks[1]["steps"] == alone["steps"]
    assert sorted(chain(*alone["steps"][:8])) == [*range(NUM_ROWS)]
    assert sorted(chain(*alone["steps"][8:16])) != [*range(NUM_ROWS)]
