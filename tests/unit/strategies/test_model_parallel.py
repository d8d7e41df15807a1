"""How the layers of a model are divided among devices."""

import itertools
import random
from collections.abc import Sequence

import pytest

from lightning_memmap.strategies.model_parallel import even_cut


@pytest.mark.parametrize("seed", range(20))
def test_even_cut_has_the_smallest_largest_stage(seed: int) -> None:
    dice = random.Random(seed)
    loads = [dice.choice([0, 1, 5, 20, 100]) for _ in range(dice.randint(1, 9))]
    num_stages = dice.randint(1, len(loads))

    def largest(bounds: Sequence[int]) -> int:
        return max(sum(loads[a:b]) for a, b in itertools.pairwise(bounds))

    found = even_cut(loads, num_stages)
    assert (found[0], found[-1], len(found)) == (0, len(loads), num_stages + 1)
    assert found == sorted(set(found))
    cuts = itertools.combinations(range(1, len(loads)), num_stages - 1)
    assert largest(found) == min(largest((0, *cut, len(loads))) for cut in cuts)
