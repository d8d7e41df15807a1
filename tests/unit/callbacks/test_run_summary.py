"""The table that `RunSummary` prints, as a user reads it."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from rich import reconfigure
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_memmap import MemmapDataModule
from lightning_memmap.callbacks import RunSummary, run_summary
from tests.datasets import Made
from tests.preloaded import python

Clock = Callable[[float], None]


class Numbers(Made):
    def sample(self, row: int) -> dict[str, Any]:
        return {"x": torch.full((4,), float(row)), "y": row % 2}


class Boxes(Made):
    """Rows whose first field is a list of any length."""

    def sample(self, row: int) -> dict[str, Any]:
        return {"boxes": [{"box": torch.ones(4)}] * (row % 3), "x": torch.ones(4)}


class Words(Made):
    """Text alone."""

    def sample(self, row: int) -> dict[str, Any]:
        return {"words": f"row {row}"}


class Model(L.LightningModule):
    """Steps that take as long as a clock is told."""

    def __init__(
        self,
        advance: Clock = lambda seconds: None,
        step_s: Callable[[int], float] = lambda epoch: 1,
    ) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.advance = advance
        self.step_s = step_s

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.advance(self.step_s(self.current_epoch))
        return self.layer(batch.get("x", torch.ones(4))).mean()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.advance(1000)
        self.log("val_rows", float(len(batch["y"])), reduce_fx="sum")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_rows", float(len(batch["y"])), reduce_fx="sum")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


@pytest.fixture(autouse=True)
def wide_console() -> Iterator[None]:
    """A console on which no line of the table wraps."""
    reconfigure(width=160)
    yield
    reconfigure()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Stops the clock of the callback; what it returns sets it forward."""
    now_s = 0.0

    def advance(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(run_summary, "perf_counter", lambda: now_s)
    return advance


def data(directory: Path, num_rows: int = 24, **options: Any) -> MemmapDataModule:
    return MemmapDataModule(
        Numbers(num_rows), Numbers(8), Numbers(9), store_dir=directory, batch_size=4, **options
    )


def trainer(directory: Path, callback: L.Callback, **options: Any) -> L.Trainer:
    return L.Trainer(
        **{"strategy": "memmap_superbatch", "devices": 2, "max_epochs": 3} | options,
        accelerator="cpu",
        callbacks=[callback],
        default_root_dir=directory,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def lines(printed: str) -> dict[str, str]:
    """The last table that was printed: by "section name" its value."""
    found, section = {}, ""
    for line in printed.rpartition("Run summary")[2].splitlines():
        cells = [cell.strip() for cell in line.split("│")]
        if len(cells) == 5:
            section = cells[1] or section
            found[f"{section} {cells[2]}"] = cells[3]
    return found


def test_run_summary_fit_and_test_shows_stores_placement_speed_and_metrics(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    model, datamodule = Model(clock), data(tmp_path)
    program = trainer(tmp_path, RunSummary())
    program.fit(model, datamodule=datamodule)
    fitted = lines(capsys.readouterr().out)
    program.test(model, datamodule=datamodule, verbose=False)
    tested = lines(capsys.readouterr().out)

    fields = "x float32 (4,); y int64 ()"
    assert fitted == {
        "stored train": f"24 rows, 576 B: {fields}",
        "stored val": f"8 rows, 192 B: {fields}",
        "placed 0: cpu": "mmap: 12 train, 12 val shards, 384 B",
        "placed 1: cpu": "mmap: 12 train, 12 val shards, 384 B",
        "samples/s first epoch": "8 (warm-up)",
        "samples/s later epochs": "8 (median of 2; 8 to 8)",
        "fit val_rows": "8",
    }
    assert tested == {
        "stored train": fitted["stored train"],
        "stored val": fitted["stored val"],
        "stored test": f"9 rows, 216 B: {fields}",
        # Of 9 rows, 5 lie in even shards and 4 in odd ones.
        "placed 0: cpu": "mmap: 12 train, 12 val, 12 test shards, 504 B",
        "placed 1: cpu": "mmap: 12 train, 12 val, 12 test shards, 480 B",
        "samples/s first epoch": fitted["samples/s first epoch"],
        "samples/s later epochs": fitted["samples/s later epochs"],
        "test test_rows": "9",
    }


def test_run_summary_of_a_test_alone_shows_residency_and_no_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = trainer(tmp_path, RunSummary(), devices=1)
    program.test(Model(), datamodule=data(tmp_path, residency="device"), verbose=False)
    found = lines(capsys.readouterr().out)
    assert found["placed 0: cpu"] == "device: 24 test shards, 216 B"
    assert found["test test_rows"] == "9"
    assert not [name for name in found if name.startswith("samples/s")]


def test_run_summary_uneven_epochs_gives_median_and_spread(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    # 12 steps: 11 of 8 rows and one of 12.
    seconds = [10.0, 1.0, 4.0, 2.0]
    model = Model(clock, lambda epoch: seconds[epoch] / 12)
    program = trainer(tmp_path, RunSummary(), max_epochs=4, val_check_interval=3)
    program.fit(model, datamodule=data(tmp_path, num_rows=100))
    found = lines(capsys.readouterr().out)
    assert found["samples/s first epoch"] == "10 (warm-up)"
    assert found["samples/s later epochs"] == "50 (median of 3; 25 to 100)"


@pytest.mark.parametrize("dataset", [Numbers(24), Boxes(24), Words(24)])
@pytest.mark.parametrize("skip_steps", [None, [1, 5]])
def test_run_summary_counts_the_rows_that_are_trained_on_whatever_a_batch_has(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str], dataset: Made, skip_steps: Any
) -> None:
    # Each step has 8 rows and takes a second.
    rows = MemmapDataModule(dataset, store_dir=tmp_path, batch_size=4, skip_steps=skip_steps)
    program = trainer(tmp_path, RunSummary(), limit_val_batches=0)
    program.fit(Model(clock), datamodule=rows)
    found = lines(capsys.readouterr().out)
    assert found["samples/s first epoch"] == "8 (warm-up)"
    assert found["samples/s later epochs"] == "8 (median of 2; 8 to 8)"


def test_run_summary_of_a_data_module_that_saves_more_has_its_speed(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    class Saving(MemmapDataModule):
        def state_dict(self) -> dict[str, Any]:
            return {"rows": super().state_dict(), "mine": 1}

    rows = Saving(Numbers(24), store_dir=tmp_path, batch_size=4)
    trainer(tmp_path, RunSummary(), limit_val_batches=0).fit(Model(clock), datamodule=rows)
    assert lines(capsys.readouterr().out)["samples/s first epoch"] == "8 (warm-up)"


def test_run_summary_of_a_fit_that_goes_on_inside_an_epoch_has_its_speed(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    class Saving(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            if trainer.global_step == 4:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    model, rows = Model(clock, lambda epoch: 1.0), data(tmp_path, num_rows=96)
    trainer(tmp_path, Saving(), max_epochs=1).fit(model, datamodule=rows)
    program = trainer(tmp_path, RunSummary(), max_epochs=1)
    program.fit(model, datamodule=rows.with_options(), ckpt_path=str(tmp_path / "middle.ckpt"))
    assert lines(capsys.readouterr().out)["samples/s first epoch"] == "8 (warm-up)"


def test_run_summary_without_memmap_data_module_is_refused(tmp_path: Path) -> None:
    program = trainer(tmp_path, RunSummary(), devices=1)
    with pytest.raises(TypeError, match=r"NoneType.*datamodule=MemmapDataModule"):
        program.fit(Model(), DataLoader(Numbers(8)), DataLoader(Numbers(8)))


_TWO_PROCESSES = """
import sys
from pathlib import Path
from lightning_memmap.callbacks import RunSummary, run_summary
from tests.unit.callbacks.test_run_summary import Model, data, trainer

if __name__ == "__main__":
    directory = Path(sys.argv[1])
    now_s = 0.0

    def advance(seconds):
        global now_s
        now_s += seconds

    run_summary.perf_counter = lambda: now_s
    # An epoch has 12 steps, the last of 11 rows, and takes 10 ms.
    model = Model(advance, lambda epoch: 0.01 / 12)
    datamodule = data(directory, num_rows=99)
    program = trainer(directory, RunSummary(), strategy="ddp", max_epochs=2)
    program.fit(model, datamodule=datamodule)
    assert program.world_size == 2
"""


@pytest.mark.slow
def test_run_summary_two_processes_prints_once(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(_TWO_PROCESSES)
    done = subprocess.run(
        [python(), str(script), str(tmp_path)],
        env={"PYTHONPATH": ":".join(sys.path), "COLUMNS": "160"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("Run summary") == 1
    found = lines(done.stdout)
    # Rank zero shows its own half of the shards, and counts the rows of both halves.
    assert found["placed 0: cpu"].startswith("mmap: 12 train, 12 val shards")
    assert found["samples/s later epochs"] == "9,900 (median of 1; 9,900 to 9,900)"
