"""Rows of similar length together, through the data module."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_memmap import MemmapDataModule
from lightning_memmap.sampling import Bucketed
from lightning_memmap.store import Store, build_store
from tests.support.datasets import Ragged
from tests.support.models import set_up

ROWS, BATCH = 180, 12


def steps_of(path: Path, **options: Any) -> list[list[int]]:
    """The rows of each step of an epoch."""
    layout = {"sound": "pad", "ids": "jagged", "image": "list"}
    data = MemmapDataModule(
        Ragged(ROWS), store_dir=path, batch_size=BATCH, num_shards=2, layout=layout, **options
    )
    return [batch["row"].tolist() for batch in set_up(data, "fit").train_dataloader()]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return build_store(Ragged(ROWS), tmp_path_factory.mktemp("bucketed") / "s", progress=False)


def test_lengths_are_read_from_the_index(store: Store) -> None:
    rows = [Ragged(ROWS)[row] for row in range(ROWS)]
    assert store.lengths("sound").tolist() == [len(row["sound"]) for row in rows]
    assert store.lengths("text").tolist() == [len(row["text"].encode()) for row in rows]
    # Of two dimensions, their product.
    assert store.lengths("image").tolist() == [int(np.prod(row["image"].shape[:2])) for row in rows]
    with pytest.raises(ValueError, match="field 'row': all its rows have one length"):
        store.lengths("row")
    with pytest.raises(ValueError, match="field 'words': the store at"):
        store.lengths("words")


def test_batches_have_less_padding_than_shuffled_ones(tmp_path: Path, store: Store) -> None:
    lengths = store.lengths("sound")

    def padded_items(steps: list[list[int]]) -> int:
        return sum(len(rows) * int(lengths[rows].max()) for rows in steps)

    # With many shards, one has only few rows of a window.
    bucketed = padded_items(steps_of(tmp_path, sampler=Bucketed("sound", BATCH)))
    shuffled = padded_items(steps_of(tmp_path))
    assert shuffled - bucketed > 0.7 * (shuffled - lengths.sum())


@pytest.mark.parametrize(
    ("sampler", "options", "words"),
    [
        (Bucketed("row", 12), {}, "field 'row': all its rows have one length"),
        (Bucketed("noise", 12), {}, "field 'noise': the store at"),
        (Bucketed([1], 12), {}, r"lengths of shape \(1,\), and the dataset has 180 rows"),
        (Bucketed("sound", 12), {"shuffle": False}, "shuffle=False with sampler="),
    ],
)
def test_buckets_that_cannot_be_are_refused(
    tmp_path: Path, sampler: Bucketed, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        steps_of(tmp_path, sampler=sampler, **options)
