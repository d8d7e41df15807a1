"""The example of packed documents: one process and two give the same losses."""

import re
from pathlib import Path

import pytest
import torch

from examples.data.paragraphs import IGNORED, Paragraphs
from tests.programs.examples.test_examples import ROOT, run


def loss(printed: str, name: str) -> float:
    found = re.search(rf"^{name} ([0-9.]+)$", printed, re.MULTILINE)
    assert found, printed[-5000:]
    return float(found.group(1))


def test_prompts_of_paragraphs_are_masked() -> None:
    train, val = Paragraphs("train", 128), Paragraphs("val", 128)
    assert len(train) > 8 * len(val) > 1000
    for row in range(0, len(train), 97):
        sample = train[row]
        labels = sample["labels"]
        prompt = int((labels == IGNORED).sum())
        assert bytes(sample["tokens"][:prompt]).endswith(b": ")
        assert (labels[prompt:] == sample["tokens"][prompt:]).all()
        assert sample["num_targets"] == len(labels) - prompt
        assert len(labels) <= 128


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["memmap_superbatch_ddp", "memmap_fsdp2"])
def test_two_processes_fine_tune_like_one(tmp_path: Path, strategy: str) -> None:
    script = str(ROOT / "examples" / "packed.py")
    # The last group of micro-batches, of steps and of an epoch, would be incomplete.
    options = ("--max_steps", "12", "--length", "768", "--packs", "4", "--accumulate", "3")
    alone, divided = (
        run(tmp_path, script, "--devices", devices, "--strategy", strategy, *options)
        for devices in ("1", "2")
    )
    # The uniform distribution over bytes has ln(256) = 5.5.
    assert loss(alone, "val_loss") < 4
    for name in ("val_loss", "val_document_loss"):
        assert loss(divided, name) == pytest.approx(loss(alone, name), abs=2e-4)
    assert re.search(r"^[0-9]+ packs, [0-6]\.[0-9]% of them padding$", alone, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["memmap_superbatch_ddp", "memmap_fsdp2"])
def test_adapters_resume_inside_an_epoch(tmp_path: Path, strategy: str) -> None:
    script = str(ROOT / "examples" / "packed.py")
    limits = ("--devices", "2", "--length", "768", "--packs", "4", "--save_every", "2")
    lora = ("--lora_rank", "4", "--precision", "bf16-mixed", "--checkpointing", "true")
    options = (*limits, *lora, "--strategy", strategy)
    (tmp_path / "whole").mkdir()
    (tmp_path / "resumed").mkdir()
    whole = run(tmp_path / "whole", script, *options, "--max_steps", "4")
    run(tmp_path / "resumed", script, *options, "--max_steps", "2")
    last = "checkpoints/packed/last.ckpt"
    state = torch.load(tmp_path / "resumed" / last, weights_only=True)["state_dict"]
    resumed = run(tmp_path / "resumed", script, *options, "--max_steps", "4", "--ckpt_path", last)
    assert loss(resumed, "val_loss") == pytest.approx(loss(whole, "val_loss"), abs=1e-5)
    # Adapters are saved, and nothing else.
    trained = torch.load(tmp_path / "resumed" / last, weights_only=True)["state_dict"]
    assert all("lora_" in name for name in trained)
    assert all(not torch.equal(state[name], value) for name, value in trained.items())
