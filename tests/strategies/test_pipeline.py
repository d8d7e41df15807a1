"""Options of `PipelineStrategy` that cannot be."""

from typing import Any

import pytest

from lightning_memmap.strategies import PipelineStrategy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "zigzag"}, "schedule='zigzag'.*interleaved"),
        ({"data_parallel_size": 0}, "data_parallel_size=0"),
        ({"num_microbatches": 0}, "num_microbatches=0"),
    ],
)
def test_wrong_option_is_refused_at_birth(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PipelineStrategy(**options)
