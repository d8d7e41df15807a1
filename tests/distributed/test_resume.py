"""A checkpoint from inside an epoch goes on with the next unseen row: on its own variant bit for
bit, and on other variants and other numbers of processes with the same sampler."""

from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_memmap.sampling import BatchSchedule
from tests.distributed.harness import launch
from tests.distributed.scenarios import resume
from tests.rows import make_sampler, pool_of

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


def epochs(window: int | None = None) -> list[list[list[int]]]:
    """The rows of each step of each epoch, sorted."""
    sampler, plan = make_sampler(ROWS, 24, 0, True, window), BatchSchedule(ROWS, GLOBAL_BATCH, 24)
    found = []
    for epoch in range(resume.EPOCHS):
        shards, offsets = sampler.at(epoch, range(ROWS))
        order = (offsets * 24 + shards).tolist()
        bounds = (plan.bounds(step) for step in range(len(plan)))
        found.append([sorted(order[first:last]) for first, last in bounds])
    return found


def steps_of(runs: list[dict[str, Any]], epoch: int) -> list[list[int]]:
    """The rows of each step over all ranks, sorted."""
    parts = [run["rows"][epoch] for run in runs]
    return [sorted(chain(*step)) for step in zip(*parts, strict=True)]


def rest(num_done: int) -> list[list[list[int]]]:
    """The steps of each epoch that are left after so many."""
    left = []
    for steps in epochs():
        left.append(steps[num_done:])
        num_done = max(0, num_done - len(steps))
    return left


def assert_goes_on(runs: list[dict[str, Any]], num_done: int) -> None:
    assert [steps_of(runs, epoch) for epoch in range(resume.EPOCHS)] == rest(num_done)


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


# The resumed runs save nothing.
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("variant", [DDP, SUPERBATCH_DDP])
def test_weighted_rows_of_several_processes_are_those_of_one_and_resume_bitwise(
    tmp_path: Path, variant: dict[str, Any]
) -> None:
    step = 25
    ranks = launch("resume.weighted", tmp_path, processes=2, rows=ROWS, variant=variant, step=step)
    order = resume.weighted_sampler(ROWS).make(
        pool_of(ROWS, 24), 0, SimpleNamespace(num_rows=ROWS, values=None)
    )
    plan = BatchSchedule(2 * ROWS, GLOBAL_BATCH, 24)
    for epoch in range(resume.EPOCHS):
        found = order.dataset_rows(epoch, range(2 * ROWS)).tolist()
        expected = [sorted(found[slice(*plan.bounds(k))]) for k in range(len(plan))]
        assert steps_of([rank["whole"] for rank in ranks], epoch) == expected
        left = expected[max(0, step - epoch * len(plan)) :]
        assert steps_of([rank["resumed"] for rank in ranks], epoch) == left
    for rank in ranks:
        assert torch.equal(rank["resumed"]["weights"], rank["whole"]["weights"])
    alone = resume.fit(
        tmp_path,
        ROWS,
        **SUPERBATCH,
        sampler=resume.weighted_sampler(ROWS),
        checkpoint=f"step={step}.ckpt",
    )
    assert steps_of([alone], 1) == steps_of([rank["resumed"] for rank in ranks], 1)


# The resumed run saves nothing.
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_stream_of_several_processes_trains_as_the_mapping_and_resumes_bitwise(
    tmp_path: Path,
) -> None:
    window, step = 2, 13
    options = {"rows": ROWS, "variant": DDP, "window": window, "step": step}
    ranks = launch("resume.stream_and_mapping", tmp_path, processes=2, **options)
    whole = epochs(window)
    for run in ("mapping", "stream"):
        found = [rank[run] for rank in ranks]
        assert [steps_of(found, epoch) for epoch in range(resume.EPOCHS)] == whole
    resumed = [rank["resumed"] for rank in ranks]
    assert [steps_of(resumed, epoch) for epoch in range(resume.EPOCHS)] == [
        [],
        whole[1][step - 10 :],
    ]
    mixed = [steps_of([rank["mixture of the mapping"] for rank in ranks], e) for e in range(2)]
    assert mixed[0] != mixed[1]
    # As many rows of 30 as of the others.
    assert sum(row < 30 for each in mixed[0] for row in each) == -(-ROWS // 2)
    assert steps_of([rank["mixture"] for rank in ranks], 1) == mixed[1][step - 10 :]
    for rank in ranks:
        weights = rank["mixture of the mapping"]["weights"]
        assert torch.equal(rank["mixture"]["weights"], weights)
    for rank in ranks:
        for run in ("stream", "resumed"):
            assert torch.equal(rank[run]["weights"], rank["mapping"]["weights"])
    tested = [sorted(chain(*step)) for step in zip(*(r["tested"] for r in ranks), strict=True)]
    assert list(chain(*tested)) == list(range(ROWS))
    # On one process and other devices, in this one: the same rows.
    alone = {**SUPERBATCH, "residency": "stream", "shuffle_window": window}
    runs = [resume.fit(tmp_path, ROWS, **alone, checkpoint=f"step={step}.ckpt")]
    assert [steps_of(runs, epoch) for epoch in range(resume.EPOCHS)] == [[], whole[1][step - 10 :]]
    windows = [rank["windows"] for rank in ranks]
    mapping = {**SUPERBATCH, "shuffle_window": window, "in_windows": True}
    runs = [resume.fit(tmp_path, ROWS, **mapping)]
    for epoch in range(resume.EPOCHS):
        steps = steps_of(windows, epoch)
        assert steps == steps_of(runs, epoch)
        firsts = [first for first, _, _ in chain(*steps)]
        assert sorted(firsts) == [
            i + j for i in range(0, ROWS, 40) for j in range(0, min(40, ROWS - i) - 2, 2)
        ]
    with pytest.raises(ValueError, match=r"shuffle_window=2, .* resume with shuffle_window=2"):
        resume.fit(tmp_path, ROWS, **SUPERBATCH, checkpoint=f"step={step}.ckpt")


def test_resume_between_accumulated_steps_is_bitwise(tmp_path: Path) -> None:
    variant = {**SUPERBATCH_DDP, "accumulate": 3}
    options = {"rows": ROWS, "variant": variant, "steps": [2, 5], "others": []}
    ranks = launch("resume.save_and_resume", tmp_path, processes=2, **options)
    # Of the ten steps of an epoch, the last one makes a group of its own.
    for step, num_done in ((2, 6), (5, 13)):
        assert_goes_on([rank["resumed"][step][0] for rank in ranks], num_done)
        for rank in ranks:
            assert torch.equal(rank["resumed"][step][0]["weights"], rank["whole"]["weights"])
