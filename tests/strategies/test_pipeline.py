"""memmap_pipeline in one process: early errors, and how batches are divided."""

from typing import Any

import pytest
import torch

from lightning_memmap.schema.fields import RowList
from lightning_memmap.strategies import PipelineStrategy
from lightning_memmap.strategies.microbatch import MicroBatches
from tests.rows import CPU


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "zigzag"}, "schedule='zigzag': choose one of gpipe, 1f1b, interleaved"),
        ({"data_parallel_size": 0}, "data_parallel_size=0: at least 1"),
        ({"num_microbatches": 0}, "num_microbatches=0: at least 1"),
    ],
)
def test_wrong_option_is_refused_at_birth(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PipelineStrategy(**options)


def test_parts_have_the_rows_of_their_places_and_all_that_has_none() -> None:
    batch = {
        "x": torch.arange(3),
        "text": RowList(["a", "b", "c"]),
        "scale": torch.tensor(2.0),
        "name": "n",
    }
    parts = MicroBatches.split(batch, [CPU] * 3, [range(2), range(2, 2), range(2, 3)])
    assert parts.rows == [2, 0, 1]
    # A part without rows has a copy of one.
    assert [part["x"].tolist() for part in parts.parts] == [[0, 1], [0], [2]]
    assert [part["text"] for part in parts.parts] == [["a", "b"], ["a"], ["c"]]
    assert [(part["scale"].item(), part["name"]) for part in parts.parts] == [(2.0, "n")] * 3
    for name, wrong in (("x", torch.arange(4)), ("text", RowList("ab"))):
        with pytest.raises(ValueError, match=rf"batch\['{name}'\] is not 3 rows"):
            MicroBatches.split({**batch, name: wrong}, [CPU] * 2, [range(1), range(1, 3)])
