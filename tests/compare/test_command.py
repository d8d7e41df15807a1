"""``lightning-memmap compare`` from the command line: real processes, on the CPU."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

import psutil
import pytest
import yaml
from torch.utils.data import get_worker_info

from tests.support.models import Points
from tests.support.preloaded import python

pytestmark = pytest.mark.slow


ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240
#: Bytes of tests.support.models.Regression: two layers with their biases, in float32.
PARAMETER_BYTES = 4 * (8 * 16 + 16 + 16 + 1)


class NotInWorkers(Points):
    """Rows that a DataLoader with workers fails at."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if get_worker_info() is not None:
            raise RuntimeError("these rows are not for workers")
        return super().__getitem__(index)


def write_config(path: Path, dataset: dict[str, Any], **data: Any) -> Path:
    config = {
        "seed_everything": 1,
        "model": {"class_path": data.pop("model", "tests.support.models.Regression")},
        "data": {
            "class_path": "lightning_memmap.MemmapDataModule",
            "init_args": {
                "train_dataset": dataset,
                "store_dir": str(path / "stores"),
                "batch_size": 8,
                **data,
            },
        },
        "trainer": {"strategy": "memmap_superbatch", "max_epochs": 3, "callbacks": [],
                    "accelerator": "cpu"},
    }  # fmt: skip
    file = path / "config.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return file


#: The command, which first says what process it is.
COMMAND = "import os; print(os.getpid(), flush=True); from lightning_memmap.cli import main; main()"


def start(*arguments: object) -> "tuple[subprocess.Popen[str], psutil.Process]":
    """Start the command: what stands for its process, and the process, whose children are runs."""
    command = [python(), "-c", COMMAND, "compare", *map(str, arguments)]
    started = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"},
    )  # fmt: skip
    assert started.stdout is not None
    return started, psutil.Process(int(started.stdout.readline()))


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "report.json").read_text(encoding="utf-8"))
    return found


def weight_files(out: Path) -> list[Path]:
    """Files as large as the parameters, except for stores and logs."""
    return [
        path
        for path in out.glob("variants/*/*/*")
        if path.is_file()
        and path.suffix not in (".json", ".txt")
        and path.stat().st_size >= PARAMETER_BYTES
    ]


@contextmanager
def watch_weights(out: Path) -> Iterator[set[int]]:
    """Collect the numbers of weight files that exist at any time within the context."""
    counts = set[int]()
    is_done = Event()

    def watch() -> None:
        while not is_done.wait(0.002):
            with suppress(FileNotFoundError):  # Removed while it was looked at.
                counts.add(len(weight_files(out)))

    thread = Thread(target=watch)
    thread.start()
    try:
        yield counts
    finally:
        is_done.set()
        thread.join()


def test_variants_are_compared_and_the_report_tells_what_each_costs(tmp_path: Path) -> None:
    config = write_config(
        tmp_path, {"class_path": "tests.support.models.Points", "init_args": {"num_rows": 96}}
    )
    process, _ = start(
        "--config", config, "--variants", "auto,ddp,fsdp,memmap_superbatch+first_epoch",
        "--repeats", 1, "--steps", 8, "--warmup_steps", 2, "--check_steps", 6,
        "--out", tmp_path / "out",
    )  # fmt: skip
    with watch_weights(tmp_path / "out") as counts:
        printed, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, printed
    # There was a file of weights, and never more than one. None is left.
    assert counts == {0, 1}
    assert not weight_files(tmp_path / "out")
    report = read(tmp_path / "out")
    auto, ddp, fsdp, first_epoch = report["variants"]
    statuses = [variant["status"] for variant in report["variants"]]
    assert statuses == ["ok", "ok", "refused", "ok"]
    assert "GPU" in fsdp["reason"]
    # The store that each run has built for itself is removed.
    assert not list((tmp_path / "out").glob("variants/*/*/stores"))
    for variant in (auto, ddp, first_epoch):
        assert variant["parity"]["holds"] is True
        assert variant["parity"]["steps_with_equal_rows"] == [6, 6]
        assert len(variant["check_losses"]) == 6
        assert variant["figures"]["samples_per_s"][0] > 0
    # Sums of other parts of the batch are rounded otherwise: not the same floats, but near them.
    assert ddp["parity"]["weight_difference"] < 1e-4
    # In fresh processes nothing but this model is alive.
    for variant in (auto, ddp):
        state = [
            variant["figures"][f"{kind}_bytes"] for kind in ("parameters", "gradients", "optimizer")
        ]
        assert state == [[PARAMETER_BYTES], [PARAMETER_BYTES], [2 * PARAMETER_BYTES + 4 * 4]]
    left_out = {"trainer.strategy", "trainer.max_epochs", "trainer.callbacks"}
    assert set(report["left_out"]) == left_out
    assert report["command"].startswith("lightning-memmap compare --config")
    # Parity stands before speed, and the page shows both.
    assert printed.index("Parity with auto") < printed.index("Speed")
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Parity holds: 3 variants" in page


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_failed_variant_is_told_and_an_interrupt_keeps_what_is_finished(
    tmp_path: Path, number: signal.Signals
) -> None:
    dataset = {
        "class_path": "tests.compare.test_command.NotInWorkers",
        "init_args": {"num_rows": 60},
    }
    config = write_config(tmp_path, dataset)
    process, program = start(
        "--config", config, "--variants", "auto+workers1,auto", "--repeats", 1, "--steps", 10**9,
        "--check_steps", 6, "--devices", 1, "--out", tmp_path / "out",
    )  # fmt: skip
    progress = tmp_path / "out" / "variants" / "auto" / "timed1" / "trained"
    deadline = monotonic() + TIMEOUT_S
    while not progress.exists() and process.poll() is None and monotonic() < deadline:
        sleep(0.1)
    children = program.children(recursive=True)
    program.send_signal(number)
    printed, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, printed
    assert children
    assert not [child for child in children if child.is_running()]
    report = read(tmp_path / "out")
    assert report["interrupted"]
    failed, auto = report["variants"]
    assert failed["status"] == "failed"
    assert "not for workers" in failed["reason"]
    assert (tmp_path / "out" / "variants" / "auto+workers1" / "check" / "log.txt").exists()
    assert auto["parity"]["holds"] is True
    assert auto["status"] == "pending"
    assert "interrupted" in auto["reason"]
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--variants", "dpp"], "'dpp' is unknown"),
        (["--repeats", "0"], "repeats=0"),
        (["--steps", "1"], "steps=1"),
        (["--config", "other.yaml"], "--config and --config"),
        (["--model.lr", "0.1"], "--config and --model.lr"),
        (["--out", "tests"], "out='tests'"),
        (["--out", "README.md"], "out='README.md'"),
        (["--out", "README.md/runs"], "out='README.md/runs'"),
    ],
)
def test_wrong_argument_is_told_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    from lightning_memmap.compare import compare

    rows = {"class_path": "tests.support.models.Points", "init_args": {"num_rows": 40}}
    config = write_config(tmp_path, rows)
    given = ["--config", str(config), "--out", str(tmp_path / "out"), *arguments]
    assert compare(given) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
