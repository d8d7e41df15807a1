"""A checkpoint from inside an epoch goes on with the next unseen row: on its own variant bit for
bit, and on other variants and other numbers of processes with the same sampler."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed.harness import expected_batches, launch, sorted_steps
from tests.support.distributed.scenarios import resume

ROWS = 151
GLOBAL_BATCH = 16
#: In the middle of the first epoch, at its end, and in the middle of the second: of 10 steps each.
STEPS = [3, 10, 13]

DDP = {"strategy": "ddp", "devices": 2, "batch_size": 8}
SUPERBATCH_DDP = {
    "strategy": "memmap_superbatch_ddp",
    "strategy_options": {"data_devices_per_process": 2},
    "devices": 4,
    "batch_size": 4,
}
SUPERBATCH = {"strategy": "memmap_superbatch", "devices": 2, "batch_size": 8}


def rest(num_done: int) -> list[list[list[int]]]:
    """The steps of each epoch that are left after so many."""
    left = []
    for epoch in range(resume.EPOCHS):
        steps = sorted_steps([expected_batches(ROWS, GLOBAL_BATCH, epoch)])
        left.append(steps[num_done:])
        num_done = max(0, num_done - len(steps))
    return left


def assert_goes_on(runs: list[dict[str, Any]], num_done: int) -> None:
    found = [sorted_steps([run["rows"][epoch] for run in runs]) for epoch in range(resume.EPOCHS)]
    assert found == rest(num_done)


# The resumed runs save nothing.
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize(("variant", "other"), [(DDP, SUPERBATCH_DDP), (SUPERBATCH_DDP, DDP)])
def test_resume_is_bitwise_on_one_variant_and_goes_on_with_the_rows_on_others(
    tmp_path: Path, variant: dict[str, Any], other: dict[str, Any]
) -> None:
    options = {"rows": ROWS, "variant": variant, "steps": STEPS, "others": [other]}
    ranks = launch("resume.save_and_resume", tmp_path, processes=2, **options)
    assert_goes_on([rank["whole"] for rank in ranks], 0)
    # An error inside of a step, which is done again.
    assert_goes_on([rank["interrupted"] for rank in ranks], STEPS[0])
    for rank in ranks:
        assert torch.equal(rank["interrupted"]["weights"], rank["whole"]["weights"])
    for step in STEPS:
        for index in range(2):
            assert_goes_on([rank["resumed"][step][index] for rank in ranks], step)
        for rank in ranks:
            assert torch.equal(rank["resumed"][step][0]["weights"], rank["whole"]["weights"])
        # On one process, in this one.
        alone = resume.fit(tmp_path, ROWS, **SUPERBATCH, checkpoint=f"step={step}.ckpt")
        assert_goes_on([alone], step)
        if variant is SUPERBATCH_DDP:
            # Stock ddp weighs processes, not rows, in the two short steps of an epoch.
            whole = ranks[0]["whole"]["weights"]
            torch.testing.assert_close(alone["weights"], whole, rtol=0, atol=2e-6)


def test_resume_between_accumulated_steps_is_bitwise(tmp_path: Path) -> None:
    variant = {**SUPERBATCH_DDP, "accumulate": 3}
    options = {"rows": ROWS, "variant": variant, "steps": [2, 5], "others": []}
    ranks = launch("resume.save_and_resume", tmp_path, processes=2, **options)
    # Of the ten steps of an epoch, the last one makes a group of its own.
    for step, num_done in ((2, 6), (5, 13)):
        assert_goes_on([rank["resumed"][step][0] for rank in ranks], num_done)
        for rank in ranks:
            assert torch.equal(rank["resumed"][step][0]["weights"], rank["whole"]["weights"])
