"""Callbacks that freeze and thaw parameters train the weights of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed.harness import launch
from tests.support.distributed.scenarios.freezing import CALLBACKS, fit

ACCUMULATED = {"ThawsInside": {"accumulate_grad_batches": 2}}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    out = tmp_path_factory.mktemp("one")
    return {
        name: fit(out, "auto", 1, name, trainer_options=ACCUMULATED.get(name)) for name in CALLBACKS
    }


@pytest.mark.parametrize("callback", CALLBACKS)
@pytest.mark.parametrize("strategy", ["memmap_superbatch_ddp", "memmap_fsdp2"])
def test_thawed_parameters_train_as_on_one_process(
    tmp_path: Path, one: dict[str, dict[str, Any]], strategy: str, callback: str
) -> None:
    options = {"trainer_options": ACCUMULATED.get(callback)}
    for rank in launch(
        "freezing.fit",
        tmp_path,
        processes=2,
        strategy=strategy,
        devices=2,
        callback=callback,
        **options,
    ):
        expected = one[callback]["weights"]
        torch.testing.assert_close(rank["weights"], expected, rtol=0, atol=2e-6)
        assert not torch.allclose(expected, one[callback]["begin"], rtol=0, atol=1e-2)


def test_parameters_that_thaw_inside_a_step_are_rejected(tmp_path: Path) -> None:
    for rank in launch("freezing.thaw_in_step", tmp_path, processes=2):
        assert "net.0.weight, net.0.bias" in rank["error"]
