"""Rows of similar length together, through the data module: the same under every division."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_memmap import MemmapDataModule
from lightning_memmap.sampling import Bucketed, Weighted
from lightning_memmap.store import Store, build_store
from tests.support.datasets import Ragged
from tests.support.models import Sounds, make_trainer

ROWS, GLOBAL_BATCH = 180, 12
LAYOUT = {"sound": "pad", "ids": "jagged", "image": "list"}


def make_data(path: Path, sampler: Any = None, **options: Any) -> MemmapDataModule:
    defaults: dict[str, Any] = {"batch_size": GLOBAL_BATCH, "layout": LAYOUT}
    return MemmapDataModule(
        Ragged(ROWS),
        store_dir=path / "stores",
        sampler=sampler or Bucketed("sound", GLOBAL_BATCH, num_buckets=5),
        **{**defaults, **options},
    )


def fit(path: Path, devices: int, **options: Any) -> Sounds:
    module = Sounds()
    trainer = make_trainer(
        path, strategy="memmap_superbatch", devices=devices, max_epochs=2, limit_val_batches=0
    )
    data = make_data(path, batch_size=GLOBAL_BATCH // devices, **options)
    trainer.fit(module, data)
    return module


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
    options: dict[str, Any] = {"num_shards": 2}
    bucketed = fit(tmp_path, 1, sampler=Bucketed("sound", GLOBAL_BATCH), **options)
    shuffled = fit(tmp_path, 1, sampler=Weighted(np.ones(ROWS)), **options)
    unpadded = 2 * lengths.sum()
    saved = padded_items(shuffled.seen) - padded_items(bucketed.seen)
    assert saved > 0.7 * (padded_items(shuffled.seen) - unpadded)


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
        fit(tmp_path, 1, sampler=sampler, **options)
