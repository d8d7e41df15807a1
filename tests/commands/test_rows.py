"""``lightning-memmap rows``: any step is looked up, and is what a training has seen."""

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch.utils.data import Dataset

from lightning_memmap import MemmapDataModule, build_store
from tests.support.command_line import CommandLine
from tests.support.datasets import Series
from tests.support.models import Points, Regression, make_trainer
from tests.support.rows import NumberedRows, image_of, joined

ROWS, BATCH = 90, 6


class Forbidden(Dataset[Any]):
    """A dataset that must not be made."""

    def __init__(self) -> None:
        raise AssertionError("the dataset was loaded")


class Command(CommandLine):
    """Runs ``lightning-memmap rows`` with a config of this data."""

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__(capsys, "rows", "--config", path / "config.yaml")
        self.path = path

    def write(self, trainer: dict[str, Any] | None = None, **options: Any) -> None:
        data = {
            "class_path": "lightning_memmap.MemmapDataModule",
            "init_args": {
                "train_dataset": {"class_path": "tests.commands.test_rows.Forbidden"},
                "store_dir": str(self.path / "stores"),
                "batch_size": BATCH,
                **options,
            },
        }
        config = {"data": data, "trainer": {"accelerator": "cpu", **(trainer or {})}}
        (self.path / "config.yaml").write_text(yaml.safe_dump(config))

    def step(self, *arguments: object) -> dict[str, Any]:
        assert self(*arguments, "--json") == 0, self.err
        found: dict[str, Any] = json.loads(self.out)
        return found


@pytest.fixture
def command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Command:
    monkeypatch.setenv("COLUMNS", "200")
    build_store(Points(ROWS), tmp_path / "stores" / "train", progress=False)
    return Command(tmp_path, capsys)


WEIGHTED = {
    "class_path": "lightning_memmap.sampling.Weighted",
    "init_args": {"weights": "row", "num_samples": 75},
}


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"sampler": WEIGHTED}])
@pytest.mark.parametrize("devices", [1, 3])
def test_steps_are_those_of_a_training(
    command: Command, tmp_path: Path, devices: int, options: dict[str, Any]
) -> None:
    trainer = {"strategy": "memmap_superbatch", "devices": devices}
    command.write(trainer, **options)
    module = Regression()
    data_options = dict(options)
    if "sampler" in options:
        from lightning_memmap.sampling import Weighted

        data_options["sampler"] = Weighted("row", num_samples=75)
    data = MemmapDataModule(
        Points(ROWS), store_dir=tmp_path / "stores", batch_size=BATCH, **data_options
    )
    make_trainer(tmp_path, **trainer, max_epochs=2, limit_val_batches=0).fit(module, data)
    seen = module.seen["train"]
    num_steps = len(seen) // 2
    for epoch in range(2):
        for step in (0, num_steps - 1):
            found = command.step("--epoch", epoch, "--step", step)
            assert found["rows"] == seen[epoch * num_steps + step]
            assert len(found["devices"]) == devices
            assert sorted(joined([each["rows"] for each in found["devices"]])) == sorted(
                found["rows"]
            )
    assert command("--step", num_steps) == 2
    assert f"step={num_steps}: epoch 0 has the steps 0 to {num_steps - 1}" in command.err


def test_rows_of_uneven_steps_are_listed_for_their_devices(command: Command) -> None:
    command.write({"strategy": "memmap_superbatch", "devices": 4}, shuffle=False, batch_size=5)
    for step in (3, 4):
        found = command.step("--step", step)
        assert all(row % 4 == each["device"] for each in found["devices"] for row in each["rows"])
    assert found["rows"] == [*range(75, 90)]


def test_ranks_are_those_of_the_strategy(command: Command) -> None:
    command.write({"strategy": "ddp", "devices": 2})
    found = command.step()
    assert [(each["device"], each["rank"]) for each in found["devices"]] == [(0, 0), (1, 1)]
    assert len(found["rows"]) == 2 * BATCH


def test_steps_that_are_left_out_are_shown_as_such(command: Command, tmp_path: Path) -> None:
    # 15 steps in an epoch.
    command.write(skip_steps=[*range(3, 5), 16])
    whole = Regression()
    data = MemmapDataModule(Points(ROWS), store_dir=tmp_path / "stores", batch_size=BATCH)
    make_trainer(tmp_path, max_epochs=2, limit_val_batches=0).fit(whole, data)
    assert command("--step", 3) == 0
    assert "step 3 of the run, skipped by skip_steps" in command.out
    found = command.step("--epoch", 1, "--step", 1)
    assert (found["run_step"], found["is_skipped"]) == (16, True)
    assert found["rows"] == whole.seen["train"][16]


def test_rows_are_found_in_the_steps_that_have_them(command: Command) -> None:
    command.write()
    options = "--devices", 3, "--epoch", 2
    found, num_steps = command.step(*options, "--find", "17,4")["run_steps"], ROWS // (3 * BATCH)
    assert 1 <= len(found) <= 2
    for step in range(num_steps):
        rows = command.step(*options, "--step", step)["rows"]
        assert (not {17, 4}.isdisjoint(rows)) == (2 * num_steps + step in found)
    assert command(*options, "--find", "17,4") == 0
    assert f"epoch 2: rows 17,4 are in the steps {found} of the run" in command.out
    assert command(*options, "--find", "17,4", "--show", "rows.html") == 2
    assert "show='rows.html' with find='17,4'" in command.err
    for name in (str(ROWS), "x", "a:1", "-1"):
        assert command(*options, f"--find=2,{name}") == 2
        assert f"find: {name!r}" in command.err


def test_rows_that_are_dropped_are_found_in_no_step(command: Command) -> None:
    command.write(drop_last=True)
    steps = [command.step("--devices", 4, "--step", step)["rows"] for step in range(3)]
    dropped = {*range(ROWS)}.difference(*steps)
    assert len(dropped) == ROWS % (4 * BATCH)
    assert command("--devices", 4, "--find", min(dropped)) == 0
    assert f"rows {min(dropped)} are in no step" in command.out


def test_windows_are_found_by_the_names_that_are_listed(command: Command, tmp_path: Path) -> None:
    build_store(Series([30] * 8), tmp_path / "series" / "train", progress=False)
    windows = {"fields": ["value", "time"], "length": 8, "stride": 3}
    command.write(store_dir=str(tmp_path / "series"), windows=windows)
    rows = command.step("--devices", 1, "--step", 2)["rows"]
    name = ":".join(map(str, rows[0]))
    assert command.step("--devices", 1, "--find", name)["run_steps"] == [2]


def test_table_names_rows_by_device(command: Command, caplog: pytest.LogCaptureFixture) -> None:
    command.write(shuffle=False)
    with caplog.at_level("INFO"):
        assert command() == 0
    assert caplog.text == ""
    assert command("--devices", 2) == 0
    assert "epoch 0, step 0: positions 0 to 11 of 90, SequentialSampler" in command.out
    assert "0 2 4 6 8 10" in command.out
    assert "1 3 5 7 9 11" in command.out


def test_show_writes_a_page_with_the_fields_of_each_row(command: Command, tmp_path: Path) -> None:
    build_store(NumberedRows(40), tmp_path / "images" / "train", progress=False)
    command.write(shuffle=False, store_dir=str(tmp_path / "images"))
    path = tmp_path / "out" / "rows.html"
    assert command("--show", path, "--step", 1, "--devices", 2) == 0
    assert command.out.rstrip().endswith(str(path))
    page = path.read_text(encoding="utf-8")
    shown = re.findall(r"<b>row (\d+), data device (\d)</b>", page)
    assert shown == [(str(row), str(row % 2)) for row in range(12, 24)]
    pictures = re.findall(r'<img src="data:image/png;base64,([^"]+)"', page)
    pixels = [np.array(Image.open(io.BytesIO(base64.b64decode(each)))) for each in pictures]
    for row, found in zip(range(12, 24), pixels, strict=True):
        assert np.array_equal(found, image_of(torch.tensor(row))[0].numpy())


def test_show_replaces_no_file_of_others(command: Command, tmp_path: Path) -> None:
    command.write()
    path = tmp_path / "rows.html"
    path.write_text("mine")
    assert command("--show", path) == 2
    assert f"show='{path}'" in command.err
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--json", "--show", "rows.html"), "show='rows.html' with json=True"),
        (("--epoch", "-1"), "epoch=-1"),
        (("--devices", "0"), "devices=0"),
    ],
)
def test_options_that_cannot_be_are_refused(
    command: Command, arguments: tuple[str, ...], words: str
) -> None:
    command.write()
    assert command(*arguments) == 2
    assert words in command.err


def test_config_that_cannot_be_is_refused(command: Command, tmp_path: Path) -> None:
    for text, words in (
        ("[1", "config="),
        ("model: 3", "section 'data'"),
        ("data: {class_path: lightning.pytorch.LightningDataModule}", "LightningDataModule"),
        ("data: {class_path: lightning_memmap.MemmapDataModule}", "store_dir"),
    ):
        (tmp_path / "config.yaml").write_text(text)
        assert command() == 2
        assert words in command.err, command.err
    command.write({"accelerator": "gpu", "devices": 8})
    assert command() == 2
    assert "--devices" in command.err
    assert command("--devices", 8) == 0
    command.write(store_dir=str(tmp_path / "elsewhere"))
    assert command("--devices", 1) == 2
    assert str(tmp_path / "elsewhere") in command.err
    assert "`lightning-memmap fit --config" in command.err
