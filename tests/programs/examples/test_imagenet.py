"""The recipe for a folder of JPEG files, at a small size and in two processes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_memmap import open_store
from tests.programs.examples.test_examples import ROOT, metric, run
from tests.support.versions import needs_ema

NUM_ROWS = {"train": 192, "val": 49}
OPTIONS = ("--network", "small", "--size", "24", "--batch_size", "16", "--devices", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEG files of several sizes and three classes: noise on red, green and blue."""
    directory = tmp_path_factory.mktemp("jpegs")
    generator = np.random.default_rng(0)
    for split, num_rows in NUM_ROWS.items():
        for row in range(num_rows):
            label = row % 3
            height, width = generator.integers(32, 64, 2)
            pixels = generator.integers(0, 160, (height, width, 3))
            pixels[..., label] += 80
            path = directory / split / f"class_{label}" / f"{row:03}.JPEG"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(path)
    return directory


def train(directory: Path, folder: Path, *options: str) -> str:
    directory.mkdir(exist_ok=True)
    script = str(ROOT / "examples" / "imagenet.py")
    return run(directory, script, str(folder), *OPTIONS, "--ema", "0.8", *options)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    path = directory / "checkpoints" / "imagenet" / "last.ckpt"
    state: dict[str, torch.Tensor] = torch.load(path, weights_only=True)["state_dict"]
    return {name: tensor for name, tensor in state.items() if name.startswith("network")}


@needs_ema
@pytest.mark.slow
def test_two_processes_learn_from_jpegs_the_same_under_both_strategies(
    tmp_path: Path, folder: Path
) -> None:
    for strategy in ("ddp", "memmap_superbatch_ddp"):
        printed = train(tmp_path / strategy, folder, "--strategy", strategy, "--max_epochs", "5")
        assert "Starting with 2 processes" in printed
        # By chance: 0.33.
        assert metric(printed, "val_accuracy") > 0.8
    # The store has the bytes of the files.
    store = open_store(tmp_path / "ddp" / "stores" / "imagenet" / "train")
    assert len(store) == NUM_ROWS["train"]
    first = folder / "train" / "class_0" / "000.JPEG"
    assert store[0]["image"] == first.read_bytes()
    # All steps are even, so the two strategies weight rows alike.
    for name, expected in weights(tmp_path / "ddp").items():
        torch.testing.assert_close(
            weights(tmp_path / "memmap_superbatch_ddp")[name], expected, atol=1e-5, rtol=1e-4
        )
