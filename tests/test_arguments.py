"""Mistakes on the command line: an error of a line or two, with the nearest right name."""

import copy
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_memmap import open_store
from lightning_memmap.arguments import is_from_user_code
from lightning_memmap.cli import main
from lightning_memmap.sampling import Sampler
from lightning_memmap.sizes import parse_bytes
from lightning_memmap.strategies import SuperBatchStrategy
from tests.support.command_line import CommandLine
from tests.support.preloaded import run

pytestmark = [
    # LightningCLI uses names that jsonargparse has changed.
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
]
DATA = ("data", "init_args")
POINTS = {"class_path": "tests.support.models.Points", "init_args": {"num_rows": 40}}
CONFIG: dict[str, Any] = {
    "seed_everything": False,
    "model": {"class_path": "tests.support.models.Regression", "init_args": {"lr": 0.1}},
    "data": {
        "class_path": "lightning_memmap.MemmapDataModule",
        "init_args": {"train_dataset": POINTS},
    },
    "trainer": {
        "strategy": "memmap_superbatch", "max_epochs": 1, "logger": False, "accelerator": "cpu",
        "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "devices": 1,
    },
}  # fmt: skip


class Untyped(torch.utils.data.Dataset[int]):
    """A dataset whose arguments have no type hints."""

    def __init__(self, size, start=0):  # type: ignore[no-untyped-def]
        self.rows = range(start, start + size)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> int:
        return self.rows[row]


def of_store(kind: str, **arguments: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """A change of the config: another dataset, of this package."""
    dataset = {"class_path": f"lightning_memmap.store.{kind}", "init_args": arguments}
    return DATA, {"train_dataset": dataset}


class Command(CommandLine):
    """Runs ``lightning-memmap`` with configs of this data."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        super().__init__(capsys)
        self._folder = folder

    def config(self, *path: str, **values: Any) -> Path:
        """A valid config, except for the values that are changed at a path."""
        config = copy.deepcopy(CONFIG)
        config["data"]["init_args"]["store_dir"] = str(self._folder / "stores")
        config["trainer"]["default_root_dir"] = str(self._folder / "run")
        place = config
        for key in path:
            place = place[key]
        place.update(values)
        file = self._folder / "config.yaml"
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        return file


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Command:
    monkeypatch.setattr(sys, "path", list(sys.path))
    # LightningCLI warns if there are other arguments as well.
    monkeypatch.setattr(sys, "argv", ["lightning-memmap"])
    monkeypatch.chdir(tmp_path)
    return Command(capsys, tmp_path)


def test_dataset_without_type_hints_is_stored(command: Command, tmp_path: Path) -> None:
    dataset = ["--dataset", f"{__name__}.Untyped", "--dataset.size", 30, "--dataset.start", 5]
    assert command("store", "plan", tmp_path, *dataset) == 0
    assert command("store", "build", tmp_path / "made", *dataset) == 0
    assert open_store(tmp_path / "made")[7] == 12


@pytest.mark.parametrize(
    ("path", "values", "name"),
    [
        (("trainer",), {"max_epoch": 2}, "trainer.max_epochs"),
        (DATA, {"batchsize": 2}, "batch_size"),
        ((*DATA, "train_dataset"), {"class_path": "tests.support.models.Point"}, "Points"),
        (
            ("trainer",),
            {"callbacks": [{"class_path": "lightning.pytorch.callbacks.ModelChekpoint"}]},
            "ModelCheckpoint",
        ),
        (("trainer",), {"strategy": "memmap_superbach"}, "memmap_superbatch"),
    ],
)
def test_misspelt_name_in_a_config_suggests_the_nearest(
    command: Command, path: tuple[str, ...], values: dict[str, Any], name: str
) -> None:
    assert_suggests(command, ["fit", "--config", command.config(*path, **values)], name)
    assert command.err.startswith("error: ")
    assert "?." not in command.err
    assert command.out == ""


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["comapre"], "compare"),
        (["fit", "--trainer.max_epochz", "3"], "--trainer.max_epochs"),
        (["store", "bild"], "build"),
        # Nor is the beginning of a name taken for the name.
        (["compare", "--config", "x.yaml", "--variant", "auto"], "--variants"),
        (["store", "build", "x", "--dataset", "ColumnDatase"], "ColumnDataset"),
    ],
)
def test_misspelt_name_on_the_command_line_suggests_the_nearest(
    command: Command, arguments: list[str], name: str
) -> None:
    assert_suggests(command, arguments, name)


def assert_suggests(command: Command, arguments: list[Any], name: str) -> None:
    assert command(*arguments) == 2
    assert f"did you mean '{name}'?" in command.err
    assert command.err.count("\n") == 2


@pytest.mark.parametrize(
    ("arguments", "name", "second"),
    [
        (["store"], "subcommand", "lightning-memmap store"),
        (["store", "build"], "path", "lightning-memmap store build"),
        (["fit"], "model", "lightning-memmap fit"),
    ],
)
def test_missing_argument_is_named(
    command: Command, arguments: list[str], name: str, second: str
) -> None:
    assert command(*arguments) == 2
    lines = command.err.splitlines()
    assert name in lines[0]
    assert lines[1:] == [f"{second} --help lists the arguments"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["fit", "--config", "confg.yaml"],
        ["store", "build", "made", "--dataset", "confg.yaml"],
        ["compare", "--config", "confg.yaml"],
        ["rows", "--config", "confg.yaml"],
        ["store", "info", "confg.yaml"],
    ],
)
def test_missing_file_suggests_the_nearest(command: Command, arguments: list[str]) -> None:
    command.config()
    assert command(*arguments) == 2
    assert re.search(r"; did you mean '(\S+/)?config.yaml'\?\n", command.err)
    assert command.err.count("\n") <= 2


def test_command_alone_prints_the_help(command: Command) -> None:
    assert command() == 2
    assert "usage: lightning-memmap COMMAND" in command.err
    assert command("--version") == 0
    assert command.out == f"lightning-memmap {version('lightning_memmap')}\n"


@pytest.mark.parametrize(
    ("path", "values", "words"),
    [
        (DATA, {"batchsize": 2}, ("'batchsize'", "'batch_size'?")),
        (DATA, {"batch_size": "six"}, ('"batch_size"', "<class 'int'>", "six")),
    ],
)
def test_mistake_in_the_config_of_a_comparison_is_reported_before_anything_runs(
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: tuple[str, ...],
    values: dict[str, Any],
    words: tuple[str, ...],
) -> None:
    run = "lightning_memmap.compare.runner.run_in_processes"
    monkeypatch.setattr(run, raising(AssertionError("ran")))
    out = ("--out", tmp_path / "out")
    assert command("compare", "--config", command.config(*path, **values), *out) == 2
    assert all(word in command.err for word in words)
    assert command.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:Experiment logs directory")
def test_config_is_saved_beside_the_logs_and_nowhere_else(command: Command, tmp_path: Path) -> None:
    # Without a dataset a run ends soon after its config was saved.
    config = command.config(*DATA, train_dataset=None)
    before = config.read_bytes()
    root = f"--trainer.default_root_dir={tmp_path}"
    assert command("fit", "--config", config, root) == 2
    assert config.read_bytes() == before
    assert not [*tmp_path.glob("*/config.yaml")]
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger"}
    logger["init_args"] = {"save_dir": str(tmp_path / "logs"), "version": 0}
    for epochs, name in ((2, "config.yaml"), (3, "config-2.yaml")):
        given = ("--trainer.max_epochs", epochs, "--trainer.logger", json.dumps(logger))
        assert command("fit", "--config", config, *given) == 2
        (saved,) = tmp_path.glob(f"logs/**/{name}")
        assert f"max_epochs: {epochs}\n" in saved.read_text()


def last_line(command: Command) -> str:
    """The last line of an error, which has no traceback."""
    assert "Traceback" not in command.err
    return command.err.splitlines()[-1]


def test_damaged_store_is_reported_without_a_traceback(command: Command, tmp_path: Path) -> None:
    (tmp_path / "stores" / "train").mkdir(parents=True)
    (tmp_path / "stores" / "train" / "manifest.json").write_text("{}")
    assert command("fit", "--config", command.config(*DATA, train_dataset=None)) == 1
    assert last_line(command).startswith("error: ")


@pytest.mark.parametrize(
    ("path", "values", "words"),
    [
        (DATA, {"batch_size": None}, "batch_size=None"),
        (DATA, {"batch_size": 0}, "error: batch_size=0"),
        (DATA, {"train_dataset": None}, "error: "),
        (DATA, {"sampler": "Sampler"}, "sampler.Sampler'>"),
        (
            (),
            {
                "model": {
                    "class_path": "tests.support.models.Regression",
                    "dict_kwargs": {"number": 3},
                }
            },
            "unexpected keyword argument 'number'",
        ),
        (
            DATA,
            {
                "transform": {
                    "class_path": "lightning_memmap.transforms.PerSample",
                    "init_args": {"function": "math.sqrt"},
                }
            },
            "PerSample(function=<built-in function sqrt>)",
        ),
        (*of_store("ColumnDataset", columns="config.yaml"), "pandas.read_csv"),
        (*of_store("TarDataset", tars="config.yaml"), "config.yaml"),
    ],
)
def test_value_that_its_type_allows_is_refused_without_a_traceback(
    command: Command, path: tuple[str, ...], values: dict[str, Any], words: str
) -> None:
    # A dataset that cannot be read isn't a wrong argument.
    is_dataset = any("columns" in str(value) or "tars" in str(value) for value in values.values())
    code = command("fit", "--config", command.config(*path, **values))
    assert code == (1 if is_dataset else 2)
    assert words in last_line(command)


def strategy(kind: str, **arguments: Any) -> dict[str, Any]:
    """A strategy of this package in a config."""
    return {"class_path": f"lightning_memmap.strategies.{kind}", "init_args": arguments}


class Broken(SuperBatchStrategy):
    """A strategy with a bug."""

    def __init__(self, broken: int | None = None) -> None:
        raise KeyError(broken)


@dataclass(frozen=True)
class Own(Sampler):
    """A sampler with an option."""

    rate: int = 1


def sampler(kind: str, **arguments: Any) -> dict[str, Any]:
    """A sampler in a config."""
    return {"sampler": {"class_path": kind, "init_args": arguments}}


def curriculum(kind: str, **arguments: Any) -> dict[str, Any]:
    """A curriculum in a config, with a sampler of this package after the first epochs."""
    stage = {"class_path": f"lightning_memmap.sampling.{kind}", "init_args": arguments}
    return sampler("lightning_memmap.sampling.Curriculum", stages={0: None, 3: stage})


@pytest.mark.parametrize(
    ("path", "values", "words"),
    [
        (
            ("trainer",),
            {"strategy": strategy("PipelineStrategy", schedule="foo")},
            ("PipelineStrategy", '"schedule"', "'1f1b'", "foo"),
        ),
        (DATA, curriculum("Bucketed", foo=3), ("Bucketed", "'foo'")),
        (DATA, sampler(f"{__name__}.Own", rate="x"), ('"rate"', "<class 'int'>", "x")),
        # Values of another kind.
        (("data",), {"batch_size": 2}, ("LightningDataModule",)),
        (DATA, {"train_dataset": "math.sqrt"}, ('"train_dataset"', "math.sqrt")),
        (DATA, {"sampler": "math.sqrt"}, ('"sampler"', "math.sqrt")),
        (("trainer",), {"strategy": {"class_path": "torch.nn.ReLU"}}, ("Strategy", "ReLU")),
    ],
)
def test_wrong_argument_is_named_by_its_class_in_two_lines(
    command: Command, path: tuple[str, ...], values: dict[str, Any], words: tuple[str, ...]
) -> None:
    assert command("fit", "--config", command.config(*path, **values)) == 2
    first, second = command.err.splitlines()
    assert all(word in first for word in words)
    assert second == "lightning-memmap fit --help lists the arguments"


def test_bug_of_a_strategy_keeps_its_traceback(command: Command) -> None:
    given = {"class_path": f"{__name__}.Broken"}
    with pytest.raises(KeyError):
        command("fit", "--config", command.config("trainer", strategy=given))


@pytest.mark.parametrize("arguments", [[], ["fit"], ["store"], ["store", "plan"], ["compare"]])
def test_help_prints_the_usage(command: Command, arguments: list[str]) -> None:
    assert command(*arguments, "--help") == 0
    assert "usage: " in command.out
    assert command.err == ""


def raising(error: BaseException) -> Callable[..., int]:
    def run(*args: object) -> int:
        raise error

    return run


def test_interrupt_prints_one_line(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_memmap.cli.rows_command", raising(KeyboardInterrupt()))
    assert command("rows") == 130
    assert command.err == "interrupted\n"


@pytest.mark.parametrize("error", [RuntimeError("a bug"), ValueError("of somebody else")])
def test_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr("lightning_memmap.cli.rows_command", raising(error))
    with pytest.raises(type(error)):
        main(["rows"])


@pytest.mark.parametrize(
    ("function", "is_from_user"),
    [
        (lambda: int("x"), True),
        (lambda: json.loads("{"), True),
        (lambda: F.cross_entropy(torch.zeros(2, 3), torch.zeros(3, dtype=torch.long)), True),
        (lambda: parse_bytes("x"), False),
        (lambda: L.Trainer(max_epochs=-2, logger=False), False),
    ],
)
def test_error_of_a_library_that_user_code_calls_is_an_error_of_user_code(
    function: Callable[[], Any], is_from_user: bool
) -> None:
    with pytest.raises((ValueError, MisconfigurationException)) as caught:
        function()
    libraries = ("lightning_memmap", "lightning")
    assert is_from_user_code(caught.value, libraries) is is_from_user


@pytest.mark.usefixtures("command")
def test_closed_output_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["--help"], ["store", "--help"], ["rows", "--help"]):
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as pipe, monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", pipe)
            with pytest.raises(SystemExit) as end:
                main(arguments)
        assert end.value.code == 1
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_error_of_several_processes_is_a_line_of_each_with_its_rank(command: Command) -> None:
    options = {"strategy": "memmap_pipeline", "devices": 2, "sync_batchnorm": True}
    file = command.config("trainer", **options)
    done = run("-m", "lightning_memmap", "fit", "--config", file)
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if "error: " in line]
    assert errors
    assert all(re.match(r"\[rank[01]\]: error: sync_batchnorm=True", line) for line in errors)
