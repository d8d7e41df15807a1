"""What holds for every order: the same positions in any division, served by their shards."""

import pickle

from hypothesis import given
from hypothesis import strategies as st

from lightning_memmap.sampling import Sampler
from tests.rows import at
from tests.unit.sampling import test_bucketed, test_weighted
from tests.unit.sampling.test_mixture_windows import by_batch, mixtures
from tests.unit.sampling.test_sampler import samplers

num_shards = st.integers(1, 12)
weighted = st.builds(
    test_weighted.made,
    test_weighted.weights(),
    num_shards,
    num_samples=st.integers(1, 150),
)
bucketed = st.builds(
    test_bucketed.made,
    test_bucketed.some_lengths,
    num_shards,
    st.integers(1, 20),
    num_buckets=st.integers(1, 5),
)


@given(st.data(), samplers() | weighted | bucketed | mixtures() | by_batch(), st.integers(0, 5))
def test_positions_are_served_by_their_shards_in_any_division(
    data: st.DataObject, sampler: Sampler, epoch: int
) -> None:
    count, shards = sampler.num_positions, sampler.num_shards
    whole = sampler.dataset_rows(epoch, range(count)).tolist()
    step = data.draw(st.sampled_from([n for n in range(1, shards + 1) if shards % n == 0]))
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    # As a process that has these shards alone finds them, in a sampler of its own.
    again = pickle.loads(pickle.dumps(sampler))
    homes, offsets = at(again, epoch, range(start, stop, step))
    assert homes.tolist() == [position % shards for position in range(start, stop, step)]
    assert ((offsets >= 0) & (offsets < again.pool.sizes[homes])).all()
    assert (
        again.pool.dataset_rows(again.pool.starts[homes] + offsets).tolist()
        == whole[start:stop:step]
    )
    for shard in range(shards):
        mine = set(sampler.pool.shard_dataset_rows(shard).tolist())
        assert set(whole[shard::shards]) <= mine
