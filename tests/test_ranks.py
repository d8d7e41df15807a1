"""What processes compare, without starting any: the other rank's facts are put in."""

from typing import Any

import pytest
import torch.distributed as dist

from lightning_memmap.errors import RankMismatchError
from lightning_memmap.ranks import check_ranks_match


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [({"seed": 1, "store": "a"}, {"seed": 1}), ({"seed": 1}, {"seed": 1, "store": "a"})],
)
def test_fact_that_one_rank_alone_has_is_a_difference_on_both(
    monkeypatch: pytest.MonkeyPatch, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    def gather(ranks: list[Any], given: Any) -> None:
        ranks[:] = [given, ({name: str(value) for name, value in theirs.items()}, None)]

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    with pytest.raises(RankMismatchError, match=r"store: .*missing on rank"):
        check_ranks_match(ours)
