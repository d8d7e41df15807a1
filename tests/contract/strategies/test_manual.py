"""Optimizers that are toggled train the weights of one process, under every strategy."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed.harness import launch
from tests.support.distributed.scenarios.manual import fit, networks, whole_weights

KINDS = ["in turn", "both", "accumulated", "looked at"]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return fit(tmp_path_factory.mktemp("one"), "auto", 1, KINDS)


def assert_as_one(found: dict[str, Any], one: dict[str, Any]) -> None:
    begin = dict(zip(("generator", "critic"), map(whole_weights, networks()), strict=True))
    for kind in KINDS:
        for name, expected in one[kind].items():
            torch.testing.assert_close(found[kind][name], expected, rtol=0, atol=5e-6, msg=kind)
            # Each network was trained.
            assert not torch.allclose(expected, begin[name], rtol=0, atol=0.05)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("memmap_fsdp2", None),
        ("memmap_fsdp2", {"reshard_after_forward": False, "min_unit_parameters": 1}),
        ("memmap_fsdp2", {"reshard_after_forward": True}),
        ("memmap_superbatch_ddp", {"find_unused_parameters": True}),
    ],
)
def test_toggled_optimizers_train_as_on_one_process(
    tmp_path: Path, one: dict[str, Any], strategy: str, options: dict[str, Any] | None
) -> None:
    for rank in launch(
        "manual.fit",
        tmp_path,
        processes=2,
        strategy=strategy,
        devices=2,
        kinds=KINDS,
        strategy_options=options,
    ):
        assert_as_one(rank, one)


@pytest.mark.parametrize("strategy", ["memmap_superbatch", "memmap_model_parallel"])
def test_toggled_optimizers_train_as_on_one_device(
    tmp_path: Path, one: dict[str, Any], strategy: str
) -> None:
    assert_as_one(fit(tmp_path, strategy, 2, KINDS), one)
