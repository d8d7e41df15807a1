"""Super-batches inside each process and DDP between them: as one process, tails included."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed.harness import launch, mean_losses, sorted_steps

FIT = "training.fit_and_test"
#: The last two steps of an epoch have 12 and 11 rows, which neither 2 nor 4 processes divide.
ROWS = 151


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("one")
    options = {"strategy": "memmap_superbatch", "devices": 4, "batch_size": 4, "rows": ROWS}
    return launch(FIT, out, processes=1, **options)[0]


def assert_as_one_process(ranks: list[dict[str, Any]], one_process: dict[str, Any]) -> None:
    found = sorted_steps([rank["seen"]["train"] for rank in ranks])
    assert found == sorted_steps([one_process["seen"]["train"]])
    tested = sorted(chain(*chain(*(rank["seen"]["test"] for rank in ranks))))
    assert tested == list(range(5000, 5000 + ROWS - 3))
    expected = mean_losses([one_process])
    torch.testing.assert_close(mean_losses(ranks), expected, rtol=1e-6, atol=1e-6)
    for rank in ranks:
        assert torch.equal(rank["weights"], ranks[0]["weights"])
        # float32 sums in another order, over 20 steps of Adam.
        torch.testing.assert_close(rank["weights"], one_process["weights"], rtol=0, atol=2e-6)
        assert rank["test_mean"] == pytest.approx(one_process["test_mean"], abs=1e-6)


@pytest.mark.parametrize(("processes", "group", "prefetch"), [(2, 2, 3), (4, 1, None)])
def test_groups_of_devices_are_processes_and_train_as_one(
    tmp_path: Path, one_process: dict[str, Any], processes: int, group: int, prefetch: int | None
) -> None:
    options = {
        "strategy": "memmap_superbatch_ddp",
        "strategy_options": {"data_devices_per_process": group},
        "prefetch": prefetch,
        "devices": 4,
        "batch_size": 4,
        "rows": ROWS,
    }
    assert_as_one_process(launch(FIT, tmp_path, processes=processes, **options), one_process)


def test_two_nodes_by_torchrun_train_as_one(tmp_path: Path, one_process: dict[str, Any]) -> None:
    options = {
        "strategy": "memmap_superbatch_ddp",
        "strategy_options": {"data_devices_per_process": 2},
        "num_nodes": 2,
        "devices": 2,
        "batch_size": 4,
        "rows": ROWS,
    }
    ranks = launch(FIT, tmp_path, processes=2, nodes=2, **options)
    assert_as_one_process(ranks, one_process)


WRAPPED = "training.fit_wrapped"
BY_TWO = {"strategy": "memmap_superbatch_ddp"}


@pytest.mark.parametrize("kind", ["read ahead", "iterator", "paired, whole steps"])
def test_weight_of_uneven_steps_travels_with_their_batches(tmp_path: Path, kind: str) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    options = {"kind": kind, "strategy": "memmap_superbatch"}
    (expected,) = launch(WRAPPED, tmp_path / "one", processes=1, **options)
    for rank in launch(WRAPPED, tmp_path / "two", processes=2, kind=kind, **BY_TWO):
        torch.testing.assert_close(rank["weights"], expected["weights"], rtol=0, atol=2e-6)


def test_batches_of_other_weights_in_one_step_are_refused(tmp_path: Path) -> None:
    for rank in launch(WRAPPED, tmp_path, processes=2, kind="paired", **BY_TWO):
        assert "drop_last=True" in rank["error"]


def test_buffers_of_all_dtypes_are_those_of_the_first_process_in_each_step(tmp_path: Path) -> None:
    for rank in launch("training.count_up", tmp_path, processes=2, devices=2, **BY_TWO):
        assert min(rank["counts"]) == max(rank["counts"]) > 0


def test_parameters_that_a_step_does_not_use_are_told_with_the_strategy(tmp_path: Path) -> None:
    for rank in launch("training.leave_parameters_out", tmp_path, processes=2, **BY_TWO):
        assert "SuperBatchDDPStrategy(find_unused_parameters=True)" in rank["error"]


@pytest.mark.parametrize("toggles", [False, True], ids=["logs", "toggles optimizers"])
def test_compiled_module_trains_and_logs_as_it_is(tmp_path: Path, toggles: bool) -> None:
    options = {"rows": ROWS, "toggles": toggles}
    for rank in launch("training.fit_compiled", tmp_path, processes=2, **options):
        compiled, plain = rank["compiled"], rank["plain"]
        torch.testing.assert_close(compiled["weights"], plain["weights"], rtol=0, atol=1e-12)
        assert compiled["logged"] == pytest.approx(plain["logged"], abs=1e-6)
        assert compiled["logged"].keys() >= {"train_loss"}
        assert not compiled["left"]
