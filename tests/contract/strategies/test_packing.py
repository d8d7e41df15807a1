"""On several processes, a mean over tokens is over all tokens of an optimizer step."""

from pathlib import Path

import pytest
import torch

from tests.support.distributed.harness import launch
from tests.support.distributed.scenarios.packing import (
    LR,
    make_data,
    make_layers,
    run,
    token_losses,
)

EPOCHS = 2


def expected(path: Path, accumulated: int) -> tuple[list[torch.Tensor], int]:
    """The parameters after plain steps on the mean over the tokens of all micro-batches."""
    data = make_data(path, 1)
    data.prepare_data()
    data.setup("fit")
    loader = data.train_dataloader()
    layers = make_layers()
    optimizer = torch.optim.SGD(layers.parameters(), lr=LR)
    num_steps = 0
    for _ in range(EPOCHS):
        batches = [*loader]
        for first in range(0, len(batches), accumulated):
            parts = [token_losses(layers, batch) for batch in batches[first : first + accumulated]]
            loss = torch.stack([part for part, _ in parts]).sum()
            optimizer.zero_grad()
            (loss / sum(int(count) for _, count in parts)).backward()
            optimizer.step()
            num_steps += 1
    return [parameter.detach() for parameter in layers.parameters()], num_steps


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize(
    ("strategy", "devices"), [("memmap_superbatch", 2), ("memmap_dp", 1), ("memmap_dp", 4)]
)
def test_step_of_one_process_is_the_mean_over_all_of_its_tokens(
    tmp_path: Path, strategy: str, devices: int, accumulated: int
) -> None:
    parameters, num_steps = expected(tmp_path / "expected", accumulated)
    result = run(tmp_path / "run", strategy, devices, accumulated, EPOCHS)
    assert result["steps"] == num_steps
    for found, right in zip(result["parameters"], parameters, strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "processes", "accumulated"),
    [
        ("memmap_superbatch_ddp", 1, 3),
        ("memmap_superbatch_ddp", 2, 1),
        ("memmap_superbatch_ddp", 4, 3),
        ("memmap_fsdp2", 2, 3),
    ],
)
def test_step_is_the_mean_over_all_of_its_tokens(
    tmp_path: Path, strategy: str, processes: int, accumulated: int
) -> None:
    parameters, num_steps = expected(tmp_path / "expected", accumulated)
    ranks = launch(
        "packing.run",
        tmp_path,
        processes=processes,
        strategy=strategy,
        devices=processes,
        accumulated=accumulated,
        epochs=EPOCHS,
    )
    initial = [*make_layers().parameters()]
    for rank in ranks:
        assert rank["steps"] == num_steps
        pairs = zip(rank["parameters"], parameters, initial, strict=True)
        for found, right, before in pairs:
            assert (right - before).abs().max() > 0.05
            torch.testing.assert_close(found, right, rtol=0, atol=1e-5)
