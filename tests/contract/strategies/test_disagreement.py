"""Ranks that differ are told so before the first step, all of them, and none waits for ever."""

import re
from pathlib import Path

from lightning_memmap.sampling.schedule import default_block
from tests.support.distributed.harness import launch


def test_ranks_that_differ_are_refused_on_every_rank(tmp_path: Path) -> None:
    ranks = launch("disagreement.refused", tmp_path, processes=2, devices=2)
    first, second = (rank["told"] for rank in ranks)
    assert first.keys() == second.keys()
    for case, words in {
        "seed": "seed: 0 on rank 0; 1 on rank 1",
        "batch_size and drop_last": (
            "batch_size: 4 on rank 0; 5 on rank 1 | drop_last: False on rank 0; True on rank 1"
        ),
        "shuffle_block": "shuffle_block: 2 on rank 0; 3 on rank 1",
        # Both would be right alone, and have another order.
        "residency": f"shuffle_block: None on rank 0; {default_block(24, 44)} on rank 1",
        "store": "the train store: 60 rows in 24 shards, content ",
        "store that may grow": "the train store: 60 rows in 24 shards, content ",
        "skip_steps": "skip_steps: ((0, 1),) on rank 0; ((1, 2),) on rank 1",
    }.items():
        for told in (first, second):
            assert told[case].startswith("RankMismatchError: "), case
            assert words in told[case], case
    for told in (first, second):
        assert told["missing store"].startswith("RankMismatchError: ")
        words = r"the train store: 60 rows in 24 shards, content \w+ on rank 0; missing on rank 1"
        assert re.search(words, told["missing store"])
    # Who failed says why, and the others are told who it was.
    assert second["dataset"].startswith("DatasetError: ")
    assert "rank 1: DatasetError: " in first["dataset"]
    # Both know by themselves that one row is too few for two.
    for told in (first, second):
        assert told["too few rows"].startswith("PlacementError: ")
        # 60 rows in steps of 8, the last of 12.
        assert told["global_step"] == "7"
