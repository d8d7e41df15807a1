"""Lightning's ModelParallelStrategy, with nothing of this pack but the data: tensor parallel, and
tensor parallel with FSDP2 on a mesh of two dimensions."""

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed.harness import global_batches, launch
from tests.support.distributed.scenarios import tensor_parallel
from tests.support.models import weights
from tests.support.versions import weights_only

# The resumed runs save nothing.
pytestmark = pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("one")
    return out, tensor_parallel.fit_and_resume(out)


@pytest.mark.parametrize(("data_size", "tensor_size"), [(1, 2), (2, 2)])
def test_groups_have_one_batch_and_train_as_one_process(
    tmp_path: Path, one: tuple[Path, dict[str, Any]], data_size: int, tensor_size: int
) -> None:
    check(tmp_path, one, "model_parallel", data_size, tensor_size)


def check(
    tmp_path: Path,
    one: tuple[Path, dict[str, Any]],
    name: str,
    data_size: int,
    tensor_size: int,
    accelerator: str | None = None,
) -> list[dict[str, Any]]:
    """Compare a run of several processes with that of one, whose files and report are given."""
    ranks = launch(
        "tensor_parallel.fit_and_resume",
        tmp_path,
        processes=data_size * tensor_size,
        accelerator=accelerator,
        name=name,
        data_parallel=data_size,
        tensor_parallel=tensor_size,
    )
    if name == "model_parallel":
        # Sixteen columns are divided over the group, and their rows over the data-parallel ranks.
        shape = (16 // data_size // tensor_size, 8)
        assert [rank["held"] for rank in ranks] == [shape] * len(ranks)
    groups = [ranks[first : first + tensor_size] for first in range(0, len(ranks), tensor_size)]
    for number, group in enumerate(groups):
        for rank in group:
            assert rank["sampler"] == {"num_replicas": data_size, "rank": number}
            assert rank["seen"] == group[0]["seen"]
            assert rank["resumed"]["train"] == rank["seen"]["train"][tensor_parallel.RESUMED :]
    out, expected = one
    firsts = [group[0]["seen"] for group in groups]
    assert global_batches([seen["train"] for seen in firsts]) == expected["seen"]["train"]
    assert sorted(chain(*chain(*(seen["test"] for seen in firsts)))) == list(
        range(1000, 1000 + tensor_parallel.ROWS)
    )
    found = load(tmp_path / "whole.ckpt")
    assert torch.equal(load(tmp_path / "resumed.ckpt"), found)
    # float32 sums in another order, over 20 steps of Adam with a rate of 0.05.
    torch.testing.assert_close(found, load(out / "whole.ckpt"), rtol=0, atol=5e-6)
    assert not torch.allclose(found, weights(tensor_parallel.Parallel()), atol=1e-2)
    for rank in ranks:
        assert rank["metrics"] == pytest.approx(expected["metrics"], abs=1e-5)
    return ranks


def load(path: Path) -> torch.Tensor:
    """The weights of a checkpoint, in the plain module."""
    return weights(
        tensor_parallel.Parallel.load_from_checkpoint(
            path, map_location="cpu", **weights_only(True)
        )
    )
