"""Results as tables of Arrow and pandas, and as the command ``rows`` lists them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from lightning_memmap import MemmapDataModule
from lightning_memmap.callbacks import RowResults
from lightning_memmap.results import read_row_results
from lightning_memmap.sampling import Subset
from tests.support.command_line import CommandLine
from tests.support.models import Points, Regression, make_trainer, set_up

NUM_ROWS = 61
SEEN = [*range(0, NUM_ROWS, 2)]


class PerRow(Regression):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        row = batch["row"]
        matrix = row[:, None, None] + torch.arange(6).view(2, 3)
        return {
            "loss": self(batch["x"]).mean(),
            "value": (row * 7 % 61).float() / 2 + self.current_epoch,
            "flag": row % 4 == 0,
            "number": row.to(torch.uint8),
            "half": row.bfloat16(),
            "matrix": matrix,
        }


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """The results of two epochs of every second row."""
    path = tmp_path / "results"
    make_trainer(
        tmp_path,
        max_epochs=2,
        callbacks=[RowResults(path, ["value", "flag", "number", "half", "matrix"])],
    ).fit(
        PerRow(),
        MemmapDataModule(
            Points(NUM_ROWS), store_dir=tmp_path / "stores", batch_size=8, subset=Subset(SEEN)
        ),
    )
    return path


def test_tables_have_a_line_for_each_epoch_and_row(results: Path) -> None:
    table = read_row_results(results, "all", "arrow")
    assert table.num_rows == 2 * NUM_ROWS
    lines = table.to_pylist()
    for number, line in enumerate(lines):
        epoch, row = divmod(number, NUM_ROWS)
        assert (line["epoch"], line["row_number"]) == (epoch, row)
        is_seen = row % 2 == 0
        assert line["value"] == ((row * 7 % 61) / 2 + epoch if is_seen else None)
        assert line["flag"] == (row % 4 == 0 if is_seen else None)
        assert line["half"] == (row if is_seen else None)
        expected = [[row, row + 1, row + 2], [row + 3, row + 4, row + 5]]
        assert line["matrix"] == (expected if is_seen else None)
    frame = read_row_results(results, container="pandas")
    assert frame["value"].isna().sum() == 30
    assert (frame["flag"].dtype, frame["number"].dtype) == ("boolean", "UInt8")
    assert frame["number"].tolist()[::2] == SEEN
    assert frame["number"].isna().sum() == 30
    assert frame["row_number"].dtype == "int64"
    assert frame.groupby("epoch").size().to_dict() == {1: NUM_ROWS}
    with pytest.raises(ValueError, match="container"):
        read_row_results(results, container="polars")


def test_command_lists_rows_by_their_results(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = CommandLine(capsys, "rows", "--results", results)

    def command(*options: object) -> str:
        assert program(*options) == 0, program.err
        return program.out

    expected = sorted(SEEN, key=lambda row: -(row * 7 % 61))[:5]
    entries = json.loads(command("--sort", "value", "--count", 5, "--json"))
    assert [entry["row"] for entry in entries] == expected
    assert entries[0]["value"] == (expected[0] * 7 % 61) / 2 + 1
    assert entries[0]["matrix"][0][0] == expected[0]
    smallest = json.loads(command("--sort", "value", "--count", 1, "--ascending", "--json"))
    assert [entry["row"] for entry in smallest] == [0]
    lines = command("--sort", "value", "--count", 5)
    assert all(str(row) in lines for row in expected)
    config = tmp_path / "config.yaml"
    data = {
        "class_path": "lightning_memmap.MemmapDataModule",
        "init_args": {"store_dir": str(tmp_path / "stores"), "batch_size": 8},
    }
    config.write_text(yaml.safe_dump({"data": data}))
    page = tmp_path / "hardest.html"
    command("--sort", "value", "--count", 3, "--config", config, "--show", page)
    other = tmp_path / "other"
    set_up(MemmapDataModule(Points(NUM_ROWS, 1), store_dir=other), "fit")
    data["init_args"]["store_dir"] = str(other)
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(yaml.safe_dump({"data": data}))
    options = ("--sort", "value", "--config", wrong, "--show", tmp_path / "wrong.html")
    assert program(*options) == 2
    assert "another dataset" in program.err
    text = page.read_text()
    assert all(f"row {row}, value" in text for row in expected[:3])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--sort", "wait"], "wait"),
        (["--sort", "matrix"], "matrix"),
        ([], "sort"),
        (["--sort", "value", "--show", "page.html"], "config"),
        (["--sort", "value", "--count", "0"], "count"),
    ],
)
def test_wrong_options_of_the_command_are_errors(
    results: Path, capsys: pytest.CaptureFixture[str], options: list[str], match: str
) -> None:
    command = CommandLine(capsys, "rows", "--results", results)
    assert command(*options) == 2
    assert match in command.err
