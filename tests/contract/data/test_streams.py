"""A user's loader that serves all rows in every process is noticed."""

from pathlib import Path

import pytest

from tests.support.distributed.harness import launch

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("strategy", ["memmap_superbatch_ddp", "memmap_fsdp2"])
def test_stream_with_the_same_rows_in_every_process_is_warned_of(
    tmp_path: Path, strategy: str
) -> None:
    ranks = [
        rank["found"] for rank in launch("streams.fit", tmp_path, processes=2, strategy=strategy)
    ]
    assert ranks[0][False][0] == ranks[1][False][0]
    assert ranks[0][True][0] != ranks[1][True][0]
    # The first rank says so once.
    assert [rank[False][1] for rank in ranks] == [1, 0]
    assert [rank[True][1] for rank in ranks] == [0, 0]
