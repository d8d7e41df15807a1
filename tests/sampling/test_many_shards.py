"""Many shards: batches that have rows of some of them only are still well shuffled."""

import numpy as np
import pytest

from lightning_memmap.sampling import ShuffledSampler
from lightning_memmap.sampling.rows import default_shards, divisors
from tests.support.rows import pool_of

ROWS, EPOCHS = 24_000, 100


@pytest.mark.parametrize(("num_rows", "expected"), [(1, 24), (19_999, 24), (20_000, 192)])
def test_number_of_shards_follows_from_the_rows(num_rows: int, expected: int) -> None:
    assert default_shards(num_rows) == expected


def test_usual_clusters_have_one_order() -> None:
    counts = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96}
    assert counts <= {*divisors(192)}


def batches(batch: int, num_shards: int | None) -> np.ndarray:
    """The rows of all full batches of some epochs; without shards, of true shuffles."""
    found = []
    for epoch in range(EPOCHS):
        if num_shards is None:
            order = np.random.default_rng(epoch).permutation(ROWS)
        else:
            sampler = ShuffledSampler(pool_of(ROWS, num_shards), 5)
            order = sampler.dataset_rows(epoch, range(ROWS))
        found.append(order[: ROWS // batch * batch].reshape(-1, batch))
    return np.concatenate(found)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [8, 32, 100, 256])
def test_rows_of_a_sorted_dataset_are_mixed_in_a_batch_as_in_a_true_shuffle(batch: int) -> None:
    num_shards = default_shards(ROWS)
    ours, true = batches(batch, num_shards), batches(batch, None)
    for width in (ROWS // 10, ROWS // 100):
        # Pairs of rows of a batch that are of one class, if a dataset is sorted by class.
        pairs = []
        for found in (ours, true):
            classes = (found // width).astype(np.int16)
            same = [(classes[:, s:] == classes[:, :-s]).sum() for s in range(1, batch)]
            pairs.append(int(sum(same)))
        # A shard has `width / C` rows of a class, rounded up or down: at most so many pairs more.
        assert 0.97 < pairs[0] / pairs[1] < 1.01 + (num_shards / width / 2) ** 2
    # And as to means of batches: as much as in a true shuffle, or less.
    assert ours.mean(axis=1).std() <= 1.02 * true.mean(axis=1).std()


def test_a_row_meets_about_as_many_others_as_its_shards_have() -> None:
    batch = 32
    ours, true = (batches(batch, count) for count in (192, None))
    row = 17
    met = [len(np.unique(found[(found == row).any(axis=1)])) - 1 for found in (ours, true)]
    draws = EPOCHS * (batch - 1)
    # 3,100 draws of 4,000 rows, those of 32 of 192 shards, and of 24,000.
    expected = [size * (1 - (1 - 1 / size) ** draws) for size in (ROWS * batch / 192, ROWS)]
    assert met == pytest.approx(expected, rel=0.05)
    # In batches of as many rows as there are shards, it meets any.
    whole = batches(192, 192)
    assert len(np.unique(whole[(whole == row).any(axis=1)])) > 0.5 * ROWS
