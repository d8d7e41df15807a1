"""A user's loader that serves all rows in every process is noticed."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from tests.support.models import Points, Regression, make_trainer
from tests.support.processes import launch

pytestmark = pytest.mark.slow


class Stream(IterableDataset[dict[str, Any]]):
    """All rows in every process, or those of its own.

    Args:
        is_divided: Whether each process has rows of its own.
    """

    def __init__(self, is_divided: bool) -> None:
        self.is_divided = is_divided

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rank, size = (dist.get_rank(), dist.get_world_size()) if self.is_divided else (0, 1)
        points = Points(48)
        for row in range(rank, len(points), size):
            yield points[row]


def fit(out: Path, strategy: str) -> dict[str, Any]:
    """Train on a stream that is divided, and on one that isn't, and tell what was warned of."""
    found = {}
    for is_divided in (True, False):
        trainer = make_trainer(out, strategy=strategy, devices=2, limit_train_batches=3)
        loader = DataLoader(Stream(is_divided), batch_size=4)
        module = Regression()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module, loader)
        words = [str(each.message) for each in caught]
        num_warned = sum("train_dataloaders: " in text for text in words)
        found[is_divided] = module.seen["train"], num_warned
    return {"found": found, "world_size": dist.get_world_size()}


@pytest.mark.parametrize("strategy", ["memmap_superbatch_ddp", "memmap_fsdp2"])
def test_stream_with_the_same_rows_in_every_process_is_warned_of(
    tmp_path: Path, strategy: str
) -> None:
    ranks = [rank["found"] for rank in launch(fit, tmp_path, processes=2, strategy=strategy)]
    assert ranks[0][False][0] == ranks[1][False][0]
    assert ranks[0][True][0] != ranks[1][True][0]
    # The first rank says so once.
    assert [rank[False][1] for rank in ranks] == [1, 0]
    assert [rank[True][1] for rank in ranks] == [0, 0]
