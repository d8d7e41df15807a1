"""The data module under Lightning's own ddp: real processes, the same global batches."""

import json
import multiprocessing
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_memmap import MemmapDataModule
from tests.support.models import (
    Points,
    Regression,
    make_trainer,
    weights,
)
from tests.support.processes import (
    each_case,
    expected_batches,
    global_batches,
    launch,
    mean_losses,
    sorted_steps,
)
from tests.support.training import fit_and_test

GLOBAL_BATCH = 16


def fit_in_children(out: Path, strategy: str, devices: int, rows: int) -> dict[str, Any]:
    """Train where the Trainer starts the processes itself and brings the weights back."""
    data = MemmapDataModule(Points(rows), store_dir=out / "stores", batch_size=8)
    trainer = make_trainer(out, strategy=strategy, devices=devices, max_epochs=2)
    module = Noting(out)
    # Processes that are spawned have imported everything, as this one has.
    multiprocessing.set_executable(sys.executable)
    trainer.fit(module, data)
    return {"weights": weights(module), "num_steps": trainer.global_step}


class Noting(Regression):
    """Regression that leaves the rows of each rank in a file: the processes are gone afterwards."""

    def __init__(self, out: Path) -> None:
        super().__init__()
        self.out = out

    def on_train_end(self) -> None:
        (self.out / f"rows{self.global_rank}.json").write_text(json.dumps(self.seen["train"]))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("one")
    options = {"strategy": "memmap_superbatch", "devices": 2, "batch_size": 8, "rows": 160}
    return launch(fit_and_test, out, processes=1, **options)[0]


#: By name, fits of two processes.
IN_TWO_PROCESSES: dict[str, dict[str, Any]] = {
    "whole": {"rows": 160},
    # The last step of epoch 0, and two of epoch 1.
    "skipped": {"rows": 160, "skip_steps": [9, 13, 14]},
    "151 rows": {"rows": 151},
    "149 rows": {"rows": 149},
}


def fit_each(out: Path) -> dict[str, Any]:
    return {
        name: fit_and_test(out / name, "ddp", 2, GLOBAL_BATCH // 2, **options)
        for _, (name, options) in each_case(IN_TWO_PROCESSES.items())
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(fit_each, tmp_path_factory.mktemp("two"), processes=2)


def assert_as_one_process(ranks: list[dict[str, Any]], one_process: dict[str, Any]) -> None:
    assert global_batches([r["seen"]["train"] for r in ranks]) == one_process["seen"]["train"]
    expected = mean_losses([one_process])
    torch.testing.assert_close(mean_losses(ranks), expected, rtol=1e-6, atol=1e-6)
    for rank in ranks:
        assert torch.equal(rank["weights"], ranks[0]["weights"])
        torch.testing.assert_close(rank["weights"], one_process["weights"], rtol=0, atol=2e-6)
        assert rank["test_mean"] == pytest.approx(one_process["test_mean"], abs=1e-6)


def test_ddp_of_two_has_global_batches_and_weights_of_one_process(
    two: list[dict[str, Any]], one_process: dict[str, Any]
) -> None:
    assert_as_one_process([rank["whole"] for rank in two], one_process)


def test_ddp_of_four_has_global_batches_and_weights_of_one_process(
    tmp_path: Path, one_process: dict[str, Any]
) -> None:
    options = {"strategy": "ddp", "devices": 4, "batch_size": GLOBAL_BATCH // 4, "rows": 160}
    ranks = launch(fit_and_test, tmp_path, processes=4, **options)
    assert_as_one_process(ranks, one_process)


def test_ddp_leaves_out_the_steps_that_one_process_leaves_out(
    two: list[dict[str, Any]], one_process: dict[str, Any]
) -> None:
    ranks = [rank["skipped"] for rank in two]
    whole = one_process["seen"]["train"]
    skipped = IN_TWO_PROCESSES["skipped"]["skip_steps"]
    kept = [step for step in range(20) if step not in skipped]
    assert global_batches([r["seen"]["train"] for r in ranks]) == [whole[step] for step in kept]


@pytest.mark.parametrize("rows", [151, 149])
def test_ddp_uneven_rows_each_row_once_and_equal_steps(
    two: list[dict[str, Any]], rows: int
) -> None:
    ranks = [rank[f"{rows} rows"] for rank in two]
    # Where a step begins at an odd position, rank 1 has its first row: the sets are compared.
    expected = [*expected_batches(rows, GLOBAL_BATCH, 0), *expected_batches(rows, GLOBAL_BATCH, 1)]
    assert sorted_steps([r["seen"]["train"] for r in ranks]) == sorted_steps([expected])
    steps = [[len(part) for part in rank["seen"]["train"]] for rank in ranks]
    assert len(steps[0]) == len(steps[1]) == len(expected)
    assert min(chain(*steps)) >= 1
    tested = sorted(chain(*chain(*(rank["seen"]["test"] for rank in ranks))))
    assert tested == list(range(5000, 5000 + rows - 3))


def test_ddp_two_nodes_by_torchrun_has_global_batches_of_one_process(
    tmp_path: Path, one_process: dict[str, Any]
) -> None:
    options = {"strategy": "ddp", "devices": 1, "num_nodes": 2, "batch_size": 8, "rows": 160}
    ranks = launch(fit_and_test, tmp_path, processes=2, nodes=2, **options)
    assert global_batches([r["seen"]["train"] for r in ranks]) == one_process["seen"]["train"]
    torch.testing.assert_close(ranks[0]["weights"], one_process["weights"], rtol=0, atol=2e-6)


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_notebook"])
def test_processes_of_the_trainer_have_global_batches_and_weights_of_one_process(
    tmp_path: Path, one_process: dict[str, Any], strategy: str
) -> None:
    options = {"strategy": strategy, "devices": 2, "rows": 160}
    (result,) = launch(fit_in_children, tmp_path, processes=1, **options)
    seen = [json.loads((tmp_path / f"rows{rank}.json").read_text()) for rank in range(2)]
    assert global_batches(seen) == one_process["seen"]["train"]
    torch.testing.assert_close(result["weights"], one_process["weights"], rtol=0, atol=2e-6)
