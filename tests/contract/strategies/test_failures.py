"""A process that dies ends all the others; one that would wait for them says so instead."""

from pathlib import Path

import pytest

from tests.support.distributed.harness import launch_any

#: Processes take about 10 s to start on a machine that does other things as well. What would
#: hang, hangs for the 30 minutes after which gloo gives up.
SOON_S = 120


# The first rank is the process that was started by hand, and has started the other one.
@pytest.mark.parametrize(
    ("strategy", "rank"), [("ddp", 0), ("memmap_superbatch_ddp", 1), ("memmap_pipeline", 1)]
)
def test_rank_that_dies_in_training_ends_all_processes(
    tmp_path: Path, strategy: str, rank: int
) -> None:
    outcome = launch_any(
        "failing.die",
        tmp_path,
        processes=2,
        timeout_s=SOON_S,
        to_the_last=True,
        rank=rank,
        strategy=strategy,
    )
    assert (tmp_path / "died").exists()
    assert 0 not in outcome.codes
    assert rank != 0 or outcome.codes == [-9]
    assert "Connection closed by peer" in outcome.report or "reset by peer" in outcome.report


# Without torchrun, rank 0 has started the other process, and ends it before it can report.
@pytest.mark.parametrize(("rank", "nodes"), [(1, 0), (0, 1), (1, 1)])
def test_rank_tells_the_others_why_it_failed(tmp_path: Path, rank: int, nodes: int) -> None:
    strategy = "memmap_pipeline" if nodes else "memmap_superbatch_ddp"
    outcome = launch_any(
        "failing.fail",
        tmp_path,
        processes=2,
        nodes=nodes,
        timeout_s=SOON_S,
        to_the_last=not nodes,
        rank=rank,
        strategy=strategy,
    )
    assert 0 not in outcome.codes
    failed, other = ((tmp_path / f"error{each}").read_text() for each in (rank, 1 - rank))
    assert "row 77" in failed
    assert "rank" not in failed
    assert f"rank {rank}: KeyError: 'row 77'" in other
    assert other.startswith("RuntimeError")


@pytest.mark.parametrize("strategy", ["memmap_superbatch", "memmap_dp"])
def test_one_process_after_two_is_refused_until_their_group_is_left(
    tmp_path: Path, strategy: str
) -> None:
    outcome = launch_any(
        "failing.go_on_alone", tmp_path, processes=2, timeout_s=SOON_S, strategy=strategy
    )
    assert outcome.codes == [0], outcome.report
    for rank in range(2):
        refusal = (tmp_path / f"refused {strategy} {rank}").read_text()
        assert f"strategy='{strategy}'" in refusal
        assert "destroy_process_group()" in refusal
        refusal = (tmp_path / f"refused memmap_superbatch_ddp {rank}").read_text()
        assert refusal.startswith("1 processes (devices x num_nodes)")
        assert "destroy_process_group()" in refusal
    assert (tmp_path / "rank0.pt").exists()
