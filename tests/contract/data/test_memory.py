"""Memory of several processes on one machine: a store is mapped once by each and its pages are
shared, and a process reads the shards that are its own."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed.harness import launch
from tests.support.distributed.scenarios.memory import ROW_BYTES

pytestmark = pytest.mark.slow

ROWS, SHARDS, PROCESSES = 1024, 8, 2
STORE_BYTES = ROWS * ROW_BYTES
#: What the kernel maps with a page that is read: at most one huge page.
AROUND_BYTES = 2 * 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps and pagemap")
def test_ddp_processes_share_pages_and_read_their_own_shards_alone(tmp_path: Path) -> None:
    options = {"devices": PROCESSES, "rows": ROWS, "num_shards": SHARDS}
    ranks = launch("memory.train", tmp_path, processes=PROCESSES, **options)
    for rank, seen in enumerate(ranks):
        for residency in ("device", "mmap"):
            assert_own_shards(seen[residency], rank)
            assert_shared(seen[residency])


def assert_own_shards(seen: dict[str, Any], rank: int) -> None:
    """All pages of its own shards were read while it loaded or trained, and no others."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    present = seen["present"].view(SHARDS, -1)
    own = torch.arange(SHARDS) % PROCESSES == rank
    assert present[own].all()
    margin = AROUND_BYTES // page_bytes
    assert present.shape[1] > 3 * margin
    assert not present[~own][:, margin:-margin].any()


def assert_shared(seen: dict[str, Any]) -> None:
    """Once both processes have read all, each has half of one copy, in one mapping, unchanged."""
    assert len(seen["trained"]) == len(seen["read whole"]) == 1
    (mapping,) = seen["read whole"]
    assert mapping["Size"] == mapping["Rss"] == STORE_BYTES
    assert mapping["Pss"] == pytest.approx(STORE_BYTES / PROCESSES, rel=0.01)
    assert mapping["Private_Dirty"] == mapping["Anonymous"] == 0
