"""A process that dies ends all the others, soon and with a message."""

from pathlib import Path

import pytest

from tests.distributed.harness import launch_any

DIE = "failing.die"
#: Processes take about 10 s to start on a machine that does other things as well. What would
#: hang, hangs for the 30 minutes after which gloo gives up.
SOON_S = 120


# Which process notices first that its peer is gone, and how, is a matter of chance.
@pytest.mark.parametrize(
    ("options", "killed"),
    [
        # The process that was started by hand and has started the other one.
        ({"rank": 0, "devices": 2}, -9),
        # A process of the other node, which the agent of its node reports.
        ({"rank": 1, "nodes": 2, "devices": 1, "num_nodes": 2}, 1),
    ],
    ids=["first of one node", "second of two nodes"],
)
def test_ddp_rank_dies_in_training_ends_all_processes(
    tmp_path: Path, options: dict[str, int], killed: int
) -> None:
    outcome = launch_any(DIE, tmp_path, processes=2, timeout_s=SOON_S, to_the_last=True, **options)
    assert (tmp_path / "died").exists()
    assert killed in outcome.codes
    assert 0 not in outcome.codes
    assert "Connection closed by peer" in outcome.report or "reset by peer" in outcome.report
