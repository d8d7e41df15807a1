"""The examples: scripts and configs run as a user runs them, and what each example shows holds."""

import csv
import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from examples import gpt, kfold
from examples.data.breast_cancer import BreastCancer
from examples.data.digits import Digits
from examples.data.folders import atomic_folder
from examples.data.shapes import Shapes
from examples.segmentation import mirror_and_turn
from lightning_memmap import open_store
from lightning_memmap.transforms import RowRandom
from tests.support.preloaded import python
from tests.support.versions import weights_only

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
TIMEOUT_S = 200


def run(directory: Path, *command: str) -> str:
    """Run a program in a directory; its whole output."""
    environment = {
        **os.environ,
        "COLUMNS": "160",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [python(), *command],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def run_cli(directory: Path, stage: str, config: str, *options: str) -> str:
    path = str(ROOT / "examples" / "configs" / config)
    return run(directory, "-m", "lightning_memmap", stage, "--config", path, *options)


def metric(printed: str, name: str) -> float:
    """A metric from the last printed table that names it."""
    found = re.findall(rf"{name} +│ +([0-9.]+) +│", printed)
    assert found, printed[-5000:]
    return float(found[-1])


def logged(directory: Path, name: str) -> float:
    """The last value of a metric in the log of a run from a config."""
    (file,) = directory.glob("lightning_logs/*/version_0/metrics.csv")
    with open(file, newline="", encoding="utf-8") as lines:
        values = [row[name] for row in csv.DictReader(lines) if row.get(name)]
    return float(values[-1])


# Scripts


@pytest.fixture(scope="module")
def shape_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The PNG files of the segmentation example: most of the time of its short runs makes them."""
    folder = tmp_path_factory.mktemp("shapes")
    for split in ("train", "val", "test"):
        Shapes(split, folder)
    return folder


def has_files(directory: Path, folder: Path, name: str) -> None:
    """Put files that were made before where a program would make them."""
    (directory / "stores").mkdir()
    (directory / "stores" / name).symlink_to(folder)


@pytest.mark.parametrize(
    ("name", "limit", "measures"),
    [
        ("digits", ("--max_epochs", "5"), {"test_accuracy": 0.95}),
        (
            # An untrained model has about 0.2 (all background), 0.5 and 0.6.
            "segmentation",
            ("--max_epochs", "4"),
            {"test_mask_iou": 0.5, "test_striped_accuracy": 0.9, "test_kinds_accuracy": 0.7},
        ),
        # The uniform distribution over bytes has ln(256) = 5.5.
        ("gpt", ("--max_steps", "20"), {"test_loss": -3.5}),
    ],
)
@pytest.mark.slow
def test_script_learns(
    tmp_path: Path,
    name: str,
    limit: tuple[str, ...],
    measures: dict[str, float],
    shape_files: Path,
) -> None:
    has_files(tmp_path, shape_files, "segmentation-png")
    printed = run(tmp_path, str(ROOT / "examples" / f"{name}.py"), *limit)
    for measure, bound in measures.items():
        found = metric(printed, measure)
        assert found > bound if bound > 0 else found < -bound, measure
    assert [path.name for path in tmp_path.iterdir()] == ["stores"]


@pytest.mark.slow
def test_photos_script_learns_in_two_processes(tmp_path: Path) -> None:
    # Fewer files than the example has: most of its time makes them.
    (program := tmp_path / "photos.py").write_text(
        "from jsonargparse import auto_cli\n"
        "from examples import photos\n"
        "from examples.data.photographs import _NUM_ROWS as rows\n"
        "rows.update(train=320, val=64, test=64)\n"
        "auto_cli(photos.main)\n"
    )
    (work := tmp_path / "work").mkdir()
    printed = run(work, str(program), "--max_epochs", "4")
    assert "Starting with 2 processes" in printed
    # By chance: 0.25.
    assert metric(printed, "test_accuracy") > 0.45
    assert len(open_store(work / "stores" / "photos" / "train")) == 320


@pytest.mark.slow
def test_token_stream_script_learns_from_windows_that_are_stored_once(tmp_path: Path) -> None:
    printed = run(
        tmp_path, str(ROOT / "examples" / "token_stream.py"), "--max_steps", "20", "--stride", "5"
    )
    # The uniform distribution over bytes has ln(256) = 5.5.
    (val_loss,) = re.findall(r"^val_loss ([0-9.]+)", printed, re.MULTILINE)
    assert float(val_loss) < 3.6
    # 65 bytes for each 5 of the text.
    assert "13.0 times as many" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["stores"]
    assert directory_bytes(tmp_path / "stores" / "token_stream" / "train") < 500_000


def directory_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


#: The example, which notes the rows of each step of a member in a file of it.
NOTING = """
from jsonargparse import auto_cli

from examples import kfold

rows = {tuple(each.tolist()): row for row, each in enumerate(kfold.BreastCancer("train").features)}
assert len(rows) == 455


class Noting(kfold.TableClassifier):
    def note(self, stage, batch):
        with open(f"../{stage}-{self.trainer.strategy.member}", "a") as file:
            print(*(rows[tuple(each.tolist())] for each in batch["features"]), file=file)

    def training_step(self, batch, batch_idx):
        self.note("train", batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.note("val", batch)
        return super().validation_step(batch, batch_idx)


kfold.TableClassifier = Noting
auto_cli(kfold.main)
"""


@pytest.mark.slow
def test_kfold_script_trains_each_member_on_the_other_folds_and_their_ensemble(
    tmp_path: Path,
) -> None:
    (program := tmp_path / "noting.py").write_text(NOTING)
    (work := tmp_path / "work").mkdir()
    printed = run(work, str(program), "--num_folds", "3", "--max_epochs", "6")
    rows = {
        (stage, member): Counter(map(int, (tmp_path / f"{stage}-{member}").read_text().split()))
        for stage in ("train", "val")
        for member in range(3)
    }
    held_out = [*rows["val", 0], *rows["val", 1], *rows["val", 2]]
    assert sorted(held_out) == [*range(455)]
    for member in range(3):
        trained = rows["train", member]
        assert trained.keys() == {*range(455)} - rows["val", member].keys()
        # As often as there were epochs.
        assert len({*trained.values()}) == 1
    found = re.findall(r"ensemble of 3 models: ([0-9.]+)", printed)
    # Always the larger class: 0.63.
    assert float(found[-1]) > 0.9
    for stage in ("fit", "test"):
        table = printed.rpartition(f"Members: {stage}")[2]
        assert len(re.findall(r"^[012] +\S+ +done ", table, re.MULTILINE)) >= 3
    members = sorted((work / "checkpoints" / "kfold").iterdir())
    assert [path.name for path in members] == ["member_0", "member_1", "member_2"]
    # One store serves all folds.
    assert [path.name for path in work.iterdir() if path.name != "checkpoints"] == ["stores"]
    stores = [*(work / "stores" / "kfold").iterdir()]
    assert {path.name: len(open_store(path)) for path in stores} == {"train": 455, "test": 114}
    # Each member validates on the rows that its fold holds out, and the ensemble averages all.
    train, test = BreastCancer("train"), BreastCancer("test")
    mean = torch.zeros(114, 2)
    for member, folder in enumerate(members):
        (path,) = folder.rglob("best.ckpt")
        model = kfold.TableClassifier.load_from_checkpoint(path, **weights_only(True)).eval()
        saved = torch.load(path, weights_only=True)["callbacks"]
        (score,) = (s["best_model_score"] for s in saved.values() if "best_model_score" in s)
        fold = slice(member, None, 3)
        with torch.inference_mode():
            logits, labels = model(train.features[fold]), torch.tensor(train.labels[fold])
            loss = torch.nn.functional.cross_entropy(logits, labels)
            mean += model(test.features).softmax(1) / 3
        assert loss.item() == pytest.approx(score.item(), rel=1e-4)
    accuracy = (mean.argmax(1) == torch.tensor(test.labels)).float().mean()
    assert float(found[-1]) == pytest.approx(accuracy.item(), abs=1e-4)


# Configs


@pytest.mark.parametrize(
    ("name", "max_epochs", "subcommands", "measure", "at_least"),
    [
        ("digits", 2, ("validate", "test"), "accuracy", 0.9),
        ("segmentation", 1, ("test",), "striped_accuracy", 0.8),
    ],
)
@pytest.mark.slow
def test_config_serves_subcommands(
    tmp_path: Path,
    name: str,
    max_epochs: int,
    subcommands: tuple[str, ...],
    measure: str,
    at_least: float,
    shape_files: Path,
) -> None:
    has_files(tmp_path, shape_files, "segmentation-png")
    config, checkpoint = f"{name}.yaml", f"checkpoints/{name}/best.ckpt"
    run_cli(tmp_path, "fit", config, "--trainer.max_epochs", str(max_epochs))
    manifest = tmp_path / "stores" / name / "val" / "manifest.json"
    built = manifest.stat().st_mtime_ns
    for subcommand in subcommands:
        printed = run_cli(tmp_path, subcommand, config, "--ckpt_path", checkpoint)
        prefix = "val" if subcommand == "validate" else "test"
        assert metric(printed, f"{prefix}_{measure}") > at_least
    # Stored once.
    assert manifest.stat().st_mtime_ns == built
    # All of these are git-ignored.
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == ["checkpoints", "lightning_logs", "stores"]
    if name == "digits":
        callback = "--trainer.callbacks+=lightning_memmap.callbacks.PredictionTable"
        options = (callback, "--trainer.callbacks.path=predictions", "--ckpt_path", checkpoint)
        run_cli(tmp_path, "predict", config, *options)
        predictions = torch.stack(list(open_store(tmp_path / "predictions")))
        correct = predictions == torch.tensor(Digits("test").labels)
        tested = metric(printed, "test_accuracy")
        assert correct.float().mean().item() == pytest.approx(tested, abs=1e-4)


# GPT


def fit_gpt(directory: Path, *options: str) -> str:
    limits = ("--trainer.limit_train_batches", "8", "--trainer.limit_val_batches", "2")
    return run_cli(directory, "fit", "gpt.yaml", *options, *limits)


@pytest.fixture(scope="module")
def gpt_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The losses of a GPT that one process trains."""
    folder = tmp_path_factory.mktemp("gpt")
    fit_gpt(folder)
    return {name: logged(folder, name) for name in ("train_loss", "val_loss")}


@pytest.mark.parametrize(
    ("strategy", "processes"),
    [("memmap_pipeline", 2), ("tensor_parallel", 2), ("memmap_model_parallel", 1)],
)
@pytest.mark.slow
def test_gpt_learns_the_same_when_it_is_divided(
    tmp_path: Path, strategy: str, processes: int, gpt_losses: dict[str, float]
) -> None:
    over = str(ROOT / "examples" / "configs" / "strategies" / f"{strategy}.yaml")
    printed = fit_gpt(tmp_path, "--config", over)
    assert (f"Starting with {processes} processes" in printed) == (processes > 1)
    # The uniform distribution over bytes has ln(256) = 5.5.
    assert gpt_losses["val_loss"] < 4
    for name, loss in gpt_losses.items():
        assert logged(tmp_path, name) == pytest.approx(loss, abs=2e-3)
    saved = torch.load(tmp_path / "checkpoints" / "gpt" / "best.ckpt", weights_only=True)
    gpt.GPT().load_state_dict(saved["state_dict"])


# Digits


@pytest.mark.parametrize(
    ("strategy", "processes"),
    [
        ("ddp", 2),
        ("memmap_superbatch_ddp", 2),
        ("memmap_fsdp2", 2),
        ("memmap_dp", 1),
        ("memmap_model_parallel", 1),
    ],
)
@pytest.mark.slow
def test_config_of_a_strategy_is_laid_over_another(
    tmp_path: Path, strategy: str, processes: int
) -> None:
    over = str(ROOT / "examples" / "configs" / "strategies" / f"{strategy}.yaml")
    printed = run_cli(tmp_path, "fit", "digits.yaml", "--config", over, "--trainer.max_epochs", "2")
    assert logged(tmp_path, "val_accuracy") > 0.9
    assert (f"Starting with {processes} processes" in printed) == (processes > 1)


@pytest.mark.slow
def test_kfold_config_serves_fit_and_test(tmp_path: Path) -> None:
    options = ["--trainer.max_epochs", "3", "--data.subset.init_args.num_folds", "2"]
    options += ["--trainer.strategy.num_members", "2"]
    run_cli(tmp_path, "fit", "kfold.yaml", *options)
    best = "checkpoints/kfold/member_{member}/best.ckpt"
    tested = run_cli(tmp_path, "test", "kfold.yaml", *options, "--ckpt_path", best)
    table = tested.rpartition("Members: test")[2]
    assert len(re.findall(r"^[01] +\S+ +done ", table, re.MULTILINE)) == 2
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == ["checkpoints", "lightning_logs", "stores"]
    assert len(list(tmp_path.rglob("output.log"))) == 1


# Batch transforms


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shapes_batch(rows: int = 12, size: int = 16) -> dict[str, Tensor]:
    generator = seeded(0)
    return {
        "image": torch.randint(256, (rows, 3, size, size), generator=generator, dtype=torch.uint8),
        "mask": torch.randint(4, (rows, 1, size, size), generator=generator, dtype=torch.uint8),
        "striped": torch.arange(rows) % 2 == 0,
        "kinds": torch.randint(2, (rows, 3), generator=generator, dtype=torch.uint8),
    }


def aligned_batch(rows: int, height: int, width: int) -> dict[str, Tensor]:
    """Images that equal their masks: ramps, on which interpolation is exact."""
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    ramp = torch.stack([x if row % 2 else y for row in range(rows)])[:, None].to(torch.uint8)
    batch = shapes_batch(rows)
    return {**batch, "image": ramp.expand(-1, 3, -1, -1), "mask": ramp}


def pixels(image: Tensor) -> Tensor:
    """Undo the conversion to -1 to 1."""
    return (image + 1) * 127.5


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("height", "width"), [(32, 32), (20, 28)])
def test_mirror_and_turn_image_and_mask_stay_aligned(seed: int, height: int, width: int) -> None:
    batch = aligned_batch(64, height, width)
    moved = mirror_and_turn(batch, RowRandom(range(64), seed=seed), max_degrees=15)
    apart = (pixels(moved["image"]) - moved["mask"][:, None]).abs().amax(dim=(1, 2, 3))
    # The nearest pixel is at most half a pixel away, along each axis.
    assert apart.max() <= 0.5 + 1e-3
    # And the rows did move: the classes of the mask are no longer where they were.
    assert (moved["mask"] != batch["mask"][:, 0]).flatten(1).any(dim=1).float().mean() > 0.9


# Photographs


def test_folder_that_another_process_has_made_is_kept(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "made") as mine:
        (mine / "mine").touch()
        (tmp_path / "made").mkdir()
        (tmp_path / "made" / "theirs").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["made", "theirs"]


@pytest.mark.slow
def test_photos_config_learns(tmp_path: Path) -> None:
    # Fewer files than the example has: most of its time makes them.
    program = (
        "from examples.data.photographs import _NUM_ROWS as rows\n"
        "rows.update(train=320, val=64, test=64)\n"
        "from lightning_memmap.cli import main; main()"
    )
    config = str(ROOT / "examples" / "configs" / "photos.yaml")
    run(tmp_path, "-c", program, "fit", "--config", config, "--trainer.max_epochs", "4")
    # By chance: 0.25.
    assert logged(tmp_path, "val_accuracy") > 0.45
    assert len(open_store(tmp_path / "stores" / "photos" / "train")) == 320
    assert len(list(tmp_path.glob("stores/photos-png/train/*/*.png"))) == 320
