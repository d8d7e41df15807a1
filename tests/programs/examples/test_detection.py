"""The example of images with boxes."""

from pathlib import Path

import pytest
import torch

from examples.detection import BoxF1
from lightning_memmap import open_store
from tests.programs.examples.test_examples import ROOT, logged, metric, run, run_cli


def test_f1_counts_missed_false_double_and_mistaken_boxes() -> None:
    box = torch.tensor([[0.0, 0, 10, 10], [20, 20, 30, 30]])
    true = {"box": box, "label": torch.tensor([3, 4])}
    none = {"box": box[:0], "label": true["label"][:0]}
    double = {name: value[[0, 0, 1]] for name, value in true.items()}
    cases = [
        (true, true, 1.0),
        ({"box": box + 2, "label": true["label"]}, true, 0.0),  # An IoU of 64 / 136.
        ({"box": box, "label": torch.tensor([3, 5])}, true, 0.5),
        (none, true, 0.0),
        (true, none, 0.0),
        (none, none, 0.0),
        (double, true, 4 / 5),
    ]
    whole = BoxF1()
    for found, wanted, score in cases:
        alone = BoxF1()
        alone.update([found], [wanted])
        assert alone.compute() == pytest.approx(score)
        whole.update([found], [wanted])
    assert whole.compute() == pytest.approx(2 * (2 + 1 + 2) / (4 + 4 + 4 + 2 + 2 + 0 + 5))


@pytest.mark.slow
def test_detection_script_finds_digits(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "detection.py")
    printed = run(tmp_path, script, "--max_epochs", "3")
    # An untrained model has 0.00.
    assert metric(printed, "test_f1") > 0.5
    fields = open_store(tmp_path / "stores" / "detection" / "train").schema.fields
    assert "objects.box" in {field.name for field in fields}
    assert [path.name for path in tmp_path.iterdir()] == ["stores"]


@pytest.mark.slow
def test_detection_config_trains_and_predicts(tmp_path: Path) -> None:
    options = ("--trainer.limit_train_batches", "60", "--trainer.max_epochs", "1")
    run_cli(tmp_path, "fit", "detection.yaml", *options)
    assert logged(tmp_path, "val_f1") >= 0
    assert len(open_store(tmp_path / "stores" / "detection" / "train")) == 1600
    run_cli(tmp_path, "predict", "detection.yaml", "--trainer.limit_predict_batches", "2")
