"""``lightning-memmap rows``: the rows of any step, looked up without any data being loaded."""

import json as json_format
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from jsonargparse import ArgumentError
from lightning.fabric.utilities.exceptions import MisconfigurationException
from rich.console import Console

from lightning_memmap.arguments import BriefParser, print_error, read_config, refuse_several_configs
from lightning_memmap.commands.step_rows.lookup import (
    schedule_of,
    step_rows,
    steps_of_checkpoint,
    stored_rows,
)
from lightning_memmap.commands.step_rows.show import (
    devices_table,
    print_values,
    values_of,
    write_sheet,
)
from lightning_memmap.data.module import MemmapDataModule
from lightning_memmap.data.splits import SPLITS
from lightning_memmap.errors import MemmapError
from lightning_memmap.placement import DataTopology, topology_of
from lightning_memmap.schema import read_forms

_DESCRIPTION = """List the rows of a global batch, device by device: of any step of any epoch, or of
the last and the next step of a checkpoint. The order of rows is computed: no data is loaded."""
#: Sections of the Trainer that decide nothing about rows, and may need what is not here.
_LEFT_OUT = ("callbacks", "logger", "plugins", "profiler", "barebones", "fast_dev_run")


@dataclass(frozen=True)
class Question:
    """The options of the command.

    Args:
        config: The config of the training, as for ``lightning-memmap fit``. Its datasets are not
            loaded; the training store must be there.
        epoch: The epoch, counted from 0.
        step: The step of the epoch, counted from 0.
        ckpt_path: Instead of them, a checkpoint: the last step that it has seen, and the next one.
        devices: Data devices of all processes; by default those of the config's Trainer.
        json: Print JSON instead of a table.
        show: List the numbers and texts of each row, and write its images, if it has any, to this
            PNG file.

    Raises:
        ValueError: An option is out of range, or two of them exclude each other.
    """

    config: str
    epoch: int = 0
    step: int = 0
    ckpt_path: str | None = None
    devices: int | None = None
    json: bool = False
    show: str | None = None

    def __post_init__(self) -> None:
        for name in ("epoch", "step"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: counted from 0")
        if self.devices is not None and self.devices < 1:
            raise ValueError(f"devices={self.devices}: at least 1 data device")
        if self.ckpt_path is not None and (self.epoch or self.step):
            raise ValueError(
                f"ckpt_path={self.ckpt_path!r} with epoch={self.epoch}, step={self.step}: the"
                " checkpoint says where it stands; leave them out"
            )
        if self.show is not None and Path(self.show).suffix != ".png":
            raise ValueError(f"show={self.show!r}: name a PNG file, such as rows.png")
        if self.show is not None and self.json:
            raise ValueError(
                f"show={self.show!r} with json=True: JSON has the numbers of rows alone; give one"
                " of the two, or read the rows of the store in Python, with open_store(path)[row]"
            )


def rows_parser() -> BriefParser:
    """Make the parser of the command."""
    parser = BriefParser(prog="lightning-memmap rows", description=_DESCRIPTION)
    parser.add_class_arguments(Question, as_group=False, skip={"json"})
    parser.add_argument("--json", action="store_true", help="Print JSON instead of a table.")
    return parser


def rows(args: list[str]) -> int:
    """Run the command with these arguments.

    Args:
        args: Arguments of the command line, after ``lightning-memmap rows``.

    Returns:
        The exit code: 0, or 2 for a wrong argument.

    Raises:
        SystemExit: An argument is unknown or has the wrong type (code 2), or help was asked for
            (0).
    """
    given = rows_parser().parse_args(args).as_dict()
    try:
        refuse_several_configs(args)
        question = Question(**given)
        data, topology = _data_of(question)
        store = data.open_train_store()
        order = data.train_sampler(store, topology)
        if question.ckpt_path is None:
            schedule = schedule_of(data, order, topology)
            steps = [step_rows(order, schedule, topology, question.epoch, question.step)]
        else:
            steps = steps_of_checkpoint(question.ckpt_path, data, order, topology)
        forms = read_forms(data.variable)
        shown = [stored_rows(order, step) for step in steps]
        has_sheet = question.show is not None and write_sheet(
            store, [row for numbers in shown for row in numbers], Path(question.show), forms
        )
    except (MemmapError, OSError, ValueError, IndexError, TypeError) as error:
        print_error(error)
        return 2
    if question.json:
        print(json_format.dumps([asdict(step) for step in steps]))
        return 0
    console = Console(markup=False)
    for step, numbers in zip(steps, shown, strict=True):
        console.print(
            f"epoch {step.epoch}, step {step.step}: positions {step.first} to {step.last - 1} of"
            f" {order.num_positions}, {type(order).__name__}",
            soft_wrap=True,
        )
        if question.show is None:
            console.print(devices_table(step))
        else:
            print_values(console, values_of(step, numbers, store, forms))
    if has_sheet:
        console.print(f"images are in {question.show}, row by row in the order of the table")
    return 0


def _data_of(question: Question) -> tuple[MemmapDataModule, DataTopology]:
    """The data module of the config, without its datasets, and where its rows are."""
    config = read_config(question.config)
    if isinstance(config, dict) and "data" not in config and isinstance(config.get("fit"), dict):
        config = config["fit"]
    if not isinstance(config, dict) or not isinstance(config.get("data"), dict):
        raise ValueError(f"config={question.config!r}: it has no section 'data' with a class_path")
    given = dict(config["data"])
    arguments = dict(given.get("init_args") or {})
    for name in arguments.keys() & {f"{split}_dataset" for split in SPLITS}:
        arguments[name] = None
    parser = BriefParser(exit_on_error=False)
    parser.add_subclass_arguments(L.LightningDataModule, "data", required=True)
    data = _made(parser, {"data": {**given, "init_args": arguments}}).data
    if not isinstance(data, MemmapDataModule):
        raise ValueError(
            f"config={question.config!r}: data is a {type(data).__name__}; only the order of a"
            " MemmapDataModule can be computed"
        )
    if question.devices is not None:
        return data, DataTopology((torch.device("cpu"),) * question.devices)
    options = config.get("trainer") or {}
    kept = {name: value for name, value in options.items() if name not in _LEFT_OUT}
    parser = BriefParser(exit_on_error=False)
    parser.add_class_arguments(L.Trainer, "trainer", fail_untyped=False)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    try:
        trainer = _made(parser, {"trainer": {**kept, **quiet}}).trainer
        found = topology_of(trainer.strategy)
    except (MisconfigurationException, ValueError, RuntimeError, MemmapError) as error:
        raise ValueError(
            f"the Trainer of the config cannot be made here ({error}): give the number of data"
            " devices over all processes with --devices"
        ) from error
    # The rows are those of all processes.
    return data, DataTopology(found.data_devices, 0, found.size)


def _made(parser: BriefParser, config: dict[str, Any]) -> Any:
    try:
        return parser.instantiate(parser.parse_object(config))
    except ArgumentError as error:
        raise ValueError(str(error)) from error
