"""memmap_pipeline in one process: micro-batches, the grid of processes, early refusals."""

from typing import Any

import pytest
import torch

from lightning_memmap.strategies import PipelineStrategy
from lightning_memmap.strategies.pipelining.groups import Layout
from lightning_memmap.strategies.pipelining.microbatches import MicroBatches, slice_rows
from lightning_memmap.strategies.pipelining.schedules import PipelineOptions


@pytest.mark.parametrize("num", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 8, 9, 31])
def test_microbatches_have_each_row_once_with_equal_weight(num_rows: int, num: int) -> None:
    rows = MicroBatches(num_rows, num)
    assert len(rows.padded_rows) == num * rows.size
    own = [row for index in range(num) if rows.weight(index) for row in rows.rows(index)]
    assert own == list(range(num_rows))
    for index in range(num):
        if weight := rows.weight(index):
            assert weight == len(rows.rows(index)) / num_rows
        # The own rows come first, and there is at least one to compute a loss of.
        first = index * rows.size
        mine = list(rows.rows(index))
        assert mine
        assert rows.padded_rows[first : first + len(mine)] == mine
    values = torch.randn(num_rows, 2)
    restored = rows.unpad({"y": rows.pad(values)})["y"]
    assert torch.equal(restored, values)


def test_slice_rows_of_a_nested_batch_leaves_values_without_rows() -> None:
    batch = {"x": torch.arange(6), "of": [torch.arange(12).view(6, 2), torch.tensor(3)], "n": "a"}
    found: Any = slice_rows(batch, range(2, 4), 6)
    assert found["x"].tolist() == [2, 3]
    assert found["of"][0].tolist() == [[4, 5], [6, 7]]
    assert found["of"][1] == 3
    assert found["n"] == "a"


def test_slice_rows_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a batch of 6 rows has a tensor of shape"):
        slice_rows([torch.zeros(6), torch.zeros(5)], range(2), 6)


@pytest.mark.parametrize(
    ("data", "pipeline", "expected"),
    [("auto", "auto", (1, 4)), ("auto", 2, (2, 2)), (4, "auto", (4, 1)), (2, 2, (2, 2))],
)
def test_layout_with_a_missing_size_computes_it(
    data: Any, pipeline: Any, expected: tuple[int, int]
) -> None:
    layout = Layout.of(4, 3, data, pipeline)
    assert (layout.data_parallel_size, layout.pipeline_size) == expected
    assert layout.pipelines[layout.data_parallel_rank][layout.pipeline_rank] == 3


@pytest.mark.parametrize(("data", "pipeline"), [(3, "auto"), ("auto", 8), (2, 3), ("auto", 3)])
def test_layout_of_wrong_sizes_is_refused(data: Any, pipeline: Any) -> None:
    with pytest.raises(ValueError, match="does not make 4 processes"):
        Layout.of(4, 0, data, pipeline)


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
    with pytest.raises(ValueError, match="num_microbatches=0: at least 1"):
        PipelineOptions("gpipe", 0, 2)
