"""Windows, mixtures, records, images, buckets, combined loaders: two processes train as one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed.harness import launch, sorted_steps
from tests.support.distributed.scenarios import orders

#: Inside an epoch of every case. Under max_size_cycle, the shorter set has begun again.
SAVE_AT = 6
VARIANTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "memmap_superbatch_ddp": {
        "strategy": "memmap_superbatch_ddp",
        "strategy_options": {"data_devices_per_process": 1},
    },
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By case, the run on two data devices of one process."""
    out = tmp_path_factory.mktemp("one")
    (rank,) = launch(
        "orders.fit_all",
        out,
        processes=1,
        strategy="memmap_superbatch",
        devices=2,
        save_at=SAVE_AT,
    )
    return rank


# The resumed runs save nothing.
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_processes_train_and_resume_as_one(
    tmp_path: Path, one_process: dict[str, Any], variant: str
) -> None:
    options = {**VARIANTS[variant], "devices": 2, "save_at": SAVE_AT}
    ranks = launch("orders.fit_all", tmp_path, processes=2, **options)
    for case in orders.CASES:
        alone = one_process[case]["whole"]
        whole, resumed = ([rank[case][run] for rank in ranks] for run in ("whole", "resumed"))
        expected = sorted_steps([alone["seen"]])
        assert all(run["seen"][0] for run in whole), case
        assert sorted_steps([run["seen"] for run in whole]) == expected, case
        assert sorted_steps([run["seen"] for run in resumed]) == expected[SAVE_AT:], case
        first, second = expected[: len(expected) // 2], expected[len(expected) // 2 :]
        assert first != second, case
        for one, other in zip(whole, resumed, strict=True):
            assert torch.equal(one["weights"], other["weights"]), case
            # float32 sums in another order, over some 60 steps of Adam.
            torch.testing.assert_close(one["weights"], alone["weights"], rtol=0, atol=5e-6)


@pytest.mark.parametrize("case", orders.CASES)
def test_one_process_resumes_bitwise(one_process: dict[str, Any], case: str) -> None:
    whole, resumed = one_process[case]["whole"], one_process[case]["resumed"]
    assert resumed["seen"] == whole["seen"][SAVE_AT:]
    assert torch.equal(resumed["weights"], whole["weights"])


def test_stream_has_the_rows_and_weights_of_the_mapping(one_process: dict[str, Any]) -> None:
    stream, mapping = (one_process[f"points {name}"]["whole"] for name in ("streamed", "in blocks"))
    assert stream["seen"] == mapping["seen"]
    assert torch.equal(stream["weights"], mapping["weights"])
