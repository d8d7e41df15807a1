"""What holds for every order: the same positions in any division, served by their shards."""

import json
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memmap.sampling import (
    DrawnSampler,
    KFold,
    Sampler,
    SequentialSampler,
    ShuffledSampler,
    Subset,
)
from tests.sampling import test_bucketed, test_weighted
from tests.sampling.test_mixture import by_batch, mixtures
from tests.sampling.test_sampler import samplers
from tests.support.rows import at, pool_of

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


# Arguments


@dataclass(frozen=True)
class FirstRows(DrawnSampler):
    """Draws the first rows of each shard, as many as there are positions."""

    def draw(self, epoch: int, shard: int) -> Any:
        return np.arange(self.positions_per_shard[shard]) % self.pool.sizes[shard]


@dataclass(frozen=True)
class Backwards(DrawnSampler):
    """All rows once, in an order of its own."""

    def arrange(self, epoch: int, shard: int, offsets: Any) -> Any:
        return np.sort(offsets)[::-1]


class Stages(threading.local):
    """Where a thread waits while it fills a table in; None: nowhere."""

    wait: Callable[[str], None] | None = None


STAGES = Stages()


@dataclass(frozen=True)
class Waiting(Backwards):
    """Lets a test stop a thread while it computes the table."""

    def draw(self, epoch: int, shard: int) -> Any:
        if STAGES.wait is not None:
            STAGES.wait("draw")
        return super().draw(epoch, shard)

    def arrange(self, epoch: int, shard: int, offsets: Any) -> Any:
        if STAGES.wait is not None:
            STAGES.wait("arrange")
        return super().arrange(epoch, shard, offsets)


def test_thread_that_computes_a_table_again_changes_nothing_that_is_read() -> None:
    order, expected = (Waiting(pool_of(48, 1)) for _ in range(2))
    reached = {stage: threading.Event() for stage in ("draw", "arrange")}
    released = {stage: threading.Event() for stage in ("draw", "arrange")}

    def wait(stage: str) -> None:
        reached[stage].set()
        assert released[stage].wait(20)

    def other() -> Any:
        STAGES.wait = wait
        return order.dataset_rows(0, range(48)).tolist()

    rows = expected.dataset_rows(0, range(48)).tolist()
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(other)
        assert reached["draw"].wait(20)
        assert order.dataset_rows(0, range(48)).tolist() == rows
        released["draw"].set()
        assert reached["arrange"].wait(20)
        found = order.dataset_rows(0, range(48)).tolist()
        released["arrange"].set()
        assert found == rows == done.result(20)


@pytest.mark.parametrize("num_samples", [96, 479, 481, 960])
def test_order_that_draws_nothing_has_as_many_positions_as_rows(num_samples: int) -> None:
    pool = pool_of(480, 24)
    with pytest.raises(ValueError, match=r"Backwards\.draw"):
        Backwards(pool, num_samples=num_samples).dataset_rows(0, range(num_samples))
    for kind in (ShuffledSampler, SequentialSampler):
        with pytest.raises(TypeError, match="num_samples"):
            kind(pool, num_samples=num_samples)  # type: ignore[call-arg]
    found = Backwards(pool, num_samples=480).dataset_rows(1, range(480))
    assert sorted(found.tolist()) == list(range(480))
    drawn = FirstRows(pool, num_samples=num_samples).dataset_rows(0, range(num_samples))
    assert {*drawn.tolist()} == {*range(min(480, num_samples))}


@pytest.mark.parametrize("kind", [ShuffledSampler, SequentialSampler, FirstRows])
@pytest.mark.parametrize("name", ["seed", "shuffle_block"])
@pytest.mark.parametrize("value", [-1, 2**63, 1.5, "1", True])
def test_argument_of_an_order_is_checked(kind: Any, name: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{name}={value!r}"):
        kind(pool_of(480, 24), **{name: value})


def test_integers_of_numpy_are_those_of_python() -> None:
    pool = pool_of(480, 24)
    found = ShuffledSampler(pool, np.int64(3), shuffle_block=np.int32(4))
    assert found == ShuffledSampler(pool, 3, shuffle_block=4)
    assert json.dumps(found.identity) == json.dumps(
        ShuffledSampler(pool, 3, shuffle_block=4).identity
    )


@pytest.mark.parametrize("value", [0, -1, 1.5, "1", True])
def test_number_of_positions_is_checked(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^num_samples={value!r}"):
        FirstRows(pool_of(480, 24), num_samples=value)


@pytest.mark.parametrize("value", [3, "", ["label"]])
@pytest.mark.parametrize("name", ["stratify", "group", "field"])
def test_field_of_a_selection_is_a_name(name: str, value: Any) -> None:
    made = partial(Subset, values=[1]) if name == "field" else partial(KFold, 2)
    with pytest.raises(TypeError, match=f"{name}="):
        made(**{name: value})
