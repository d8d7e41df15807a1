"""memmap_pipeline in one process: the grid of processes, early errors."""

from typing import Any

import pytest

from lightning_memmap.strategies import PipelineStrategy
from lightning_memmap.strategies._pipeline_stages import check_schedule
from lightning_memmap.strategies.pipeline import divide_processes


@pytest.mark.parametrize(
    ("data", "pipeline", "expected"),
    [("auto", "auto", (1, 4)), ("auto", 2, (2, 2)), (4, "auto", (4, 1)), (2, 2, (2, 2))],
)
def test_a_missing_size_is_computed(data: Any, pipeline: Any, expected: tuple[int, int]) -> None:
    assert divide_processes(4, data, pipeline) == expected


@pytest.mark.parametrize(("data", "pipeline"), [(3, "auto"), ("auto", 8), (2, 3), ("auto", 3)])
def test_wrong_sizes_are_refused(data: Any, pipeline: Any) -> None:
    with pytest.raises(ValueError, match="does not make 4 processes"):
        divide_processes(4, data, pipeline)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "zigzag"}, "schedule='zigzag': choose one of gpipe, 1f1b, interleaved"),
        ({"data_parallel_size": 0}, "data_parallel_size=0: 'auto', or at least 1"),
        ({"pipeline_parallel_size": "all"}, "pipeline_parallel_size='all': 'auto', or at least 1"),
        ({"step_timeout_s": 0.0}, "step_timeout_s=0.0: more than 0 seconds"),
    ],
)
def test_wrong_option_is_refused_at_birth(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PipelineStrategy(**options)


def test_zero_microbatches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_microbatches=0: .* needs at least 1"):
        check_schedule("gpipe", 0, 2)
