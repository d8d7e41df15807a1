"""Rows of several data devices are merged in order, as the docstrings show."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_memmap.loading.nested import interleave
from lightning_memmap.loading.variable_rows import VariableRows, _contiguous_runs
from lightning_memmap.schema.fields import Field, RowList

CPU = torch.device("cpu")


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


@pytest.mark.parametrize("form", [jagged, RowList])
def test_interleave_of_three_devices_from_the_second_returns_seven_rows_in_order(
    form: Callable[[Any], Any],
) -> None:
    # Row i has i + 1 items.
    rows = [torch.full((row + 1,), row) for row in range(7)]
    leaves = [form([rows[row] for row in held]) for held in ([2, 5], [0, 3, 6], [1, 4])]
    merged = interleave(leaves, 1, 7, CPU)
    unbound = merged.unbind() if isinstance(merged, torch.Tensor) else merged
    assert [row.tolist() for row in unbound] == [row.tolist() for row in rows]


def test_contiguous_runs_of_a_padded_matrix_are_its_lines() -> None:
    field = Field("x", torch.int64, (None, None))
    rows = VariableRows(
        field, torch.arange(6), starts=np.array([0]), sizes=np.array([[2, 3]]), widths=(2, 4)
    )
    starts, targets, lengths = _contiguous_runs(rows, np.array([[2, 4]]))
    assert starts.tolist() == [0, 3]
    assert targets.tolist() == [0, 4]
    assert lengths.tolist() == [3, 3]
