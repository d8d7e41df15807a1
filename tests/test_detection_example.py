"""The example of images with boxes."""

from pathlib import Path

import pytest
import torch

from examples.boxes import BoxF1, iou
from examples.data.scenes import SIZE, Scenes
from examples.detection import BACKGROUND, CELL, Detector
from tests.test_examples import ROOT, metric, run, run_cli


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_scenes_have_a_box_around_the_ink_of_each_digit(split: str) -> None:
    scenes = Scenes(split)
    counts = set()
    for row in range(60):
        sample = scenes[row]
        image = sample["image"][0].clone()
        counts.add(len(sample["objects"]))
        for each in sample["objects"]:
            left, top, right, bottom = (int(edge) for edge in each["box"])
            ink = image[top:bottom, left:right]
            # Ink at each edge of the box, and nowhere but in a box.
            assert all(edge.any() for edge in (ink[0], ink[-1], ink[:, 0], ink[:, -1]))
            ink.zero_()
        assert not image.any()
        assert torch.equal(scenes[row]["image"], sample["image"])
    assert {0, 1, 2, 3} <= counts


def test_iou_of_boxes_is_the_share_of_common_pixels() -> None:
    generator = torch.Generator().manual_seed(0)
    corners = torch.randint(0, 8, (2, 20, 4), generator=generator)
    first, second = torch.cat([corners[..., :2], corners[..., :2] + corners[..., 2:] + 1], dim=2)
    y, x = torch.meshgrid(torch.arange(17), torch.arange(17), indexing="ij")

    def pixels(boxes: torch.Tensor) -> torch.Tensor:
        left, top, right, bottom = boxes.T[..., None, None]
        return (left <= x) & (x < right) & (top <= y) & (y < bottom)

    one, other = pixels(first)[:, None], pixels(second)[None]
    expected = (one & other).sum((2, 3)) / (one | other).sum((2, 3))
    assert torch.allclose(iou(first.float(), second.float()), expected)
    assert 0 < expected.max() < 1
    assert iou(torch.zeros(0, 4), first.float()).shape == (0, 20)


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


def test_detector_finds_what_its_cells_say() -> None:
    model = Detector().eval()
    logits = torch.full((2, BACKGROUND + 1, SIZE // CELL, SIZE // CELL), -9.0)
    logits[:, BACKGROUND] = 0
    logits[1, 7, 5, 2] = 8  # The row and column of a cell.
    logits[1, 4, 5, 3] = 7  # Its neighbour is less sure.
    edges = torch.zeros(2, 4, SIZE // CELL, SIZE // CELL)
    edges[1, :, 5, 2] = torch.tensor([-1.0, -2, 1, 3])
    model.network = torch.nn.Sequential()
    first, second = model.predict_step({"image": torch.cat([logits, edges], dim=1)}, 0)
    assert first["box"].shape == (0, 4)
    assert second["label"].tolist() == [7]
    assert second["box"].tolist() == [[6.0, 14.0, 14.0, 34.0]]


def test_detector_loss_of_images_without_digits_is_finite() -> None:
    model = Detector()
    model.log = lambda *_, **__: None  # type: ignore[method-assign]  # There is no Trainer.
    none = {"box": torch.zeros(0, 4), "label": torch.zeros(0, dtype=torch.int64)}
    loss = model.training_step({"image": torch.rand(2, 1, SIZE, SIZE), "objects": [none] * 2}, 0)
    loss.backward()
    assert loss.isfinite()


@pytest.mark.slow
def test_detection_script_finds_digits(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "detection.py")
    printed = run(tmp_path, script, "--max_epochs", "3")
    # An untrained model has 0.00.
    assert metric(printed, "test_f1") > 0.5
    assert "objects.box" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["stores"]


@pytest.mark.slow
def test_detection_config_trains_and_predicts(tmp_path: Path) -> None:
    options = ("--trainer.limit_train_batches", "60", "--trainer.max_epochs", "1")
    printed = run_cli(tmp_path, "fit", "detection.yaml", *options)
    assert metric(printed, "val_f1") >= 0
    assert "1,600 rows" in printed
    run_cli(tmp_path, "predict", "detection.yaml", "--trainer.limit_predict_batches", "2")
