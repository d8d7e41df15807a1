"""``lightning-memmap rows``: the rows of any step, looked up without any data being loaded."""

import json as json_format
import pickle
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from jsonargparse import ArgumentError
from lightning.fabric.utilities.exceptions import MisconfigurationException
from rich.console import Console

from lightning_memmap.arguments import BriefParser, print_error, read_config, refuse_several_configs
from lightning_memmap.commands.row_values import (
    DeviceRows,
    StepRows,
    devices_table,
    print_values,
    values_of,
    write_sheet,
)
from lightning_memmap.data.module import MemmapDataModule
from lightning_memmap.data.splits import SPLITS
from lightning_memmap.errors import MemmapError, StoreNotFoundError
from lightning_memmap.loading.state import LoaderState
from lightning_memmap.placement import DataTopology, topology_of
from lightning_memmap.sampling import BatchSchedule, Sampler
from lightning_memmap.sampling.differences import difference_of
from lightning_memmap.sampling.schedule import SkippedSteps, steps_to_skip
from lightning_memmap.schema import read_forms

_DESCRIPTION = """List the rows of a global batch, device by device: of any step of any epoch, or of
the last and the next step of a checkpoint. The order of rows is computed: no data is loaded."""
#: Sections of the Trainer that decide nothing about rows, and may need what is not here.
_LEFT_OUT = ("callbacks", "logger", "plugins", "profiler", "barebones", "fast_dev_run")


@dataclass(frozen=True)
class RowsOptions:
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
    parser.add_class_arguments(RowsOptions, as_group=False, skip={"json"})
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
        question = RowsOptions(**given)
        data, topology = _data_of(question)
        try:
            store = data.open_train_store()
        except StoreNotFoundError as error:
            raise StoreNotFoundError(
                f"no store at {data.store_path('train')}: this command reads it, and loads no"
                f" dataset: store the dataset first, with `lightning-memmap fit --config"
                f" {question.config}` or `lightning-memmap store build`"
            ) from error
        order = data.train_sampler(store, topology)
        if question.ckpt_path is None:
            epochs = Epochs.of(data, order, topology, SkippedSteps())
            steps = [epochs.step_rows(question.epoch, question.step)]
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
        left_out = ", left out by skip_steps" if step.is_skipped else ""
        console.print(
            f"epoch {step.epoch}, step {step.step}: positions {step.first} to {step.last - 1} of"
            f" {order.num_positions}, {type(order).__name__}; step {step.run_step} of the"
            f" run{left_out}",
            soft_wrap=True,
        )
        if question.show is None:
            console.print(devices_table(step))
        else:
            print_values(console, values_of(step, numbers, store, forms))
    if has_sheet:
        console.print(f"images are in {question.show}, row by row in the order of the table")
    return 0


def _data_of(question: RowsOptions) -> tuple[MemmapDataModule, DataTopology]:
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


@dataclass(frozen=True)
class Epochs:
    """The steps of epochs, and their rows by data device. Nothing is read."""

    order: Sampler
    whole: BatchSchedule
    topology: DataTopology
    skipped: SkippedSteps

    @classmethod
    def of(
        cls, data: MemmapDataModule, order: Sampler, topology: DataTopology, skipped: SkippedSteps
    ) -> "Epochs":
        """Those of a data module, which may leave out steps beside those of a checkpoint."""
        size = data.batch_size * topology.num_data_devices
        whole = BatchSchedule(order.num_positions, size, order.num_shards, data.drop_last)
        skipped = skipped.adding(steps_to_skip(data.skip_steps), whole)
        return cls(order, whole, topology, skipped)

    def step_rows(self, epoch: int, step: int) -> StepRows:
        """A step of an epoch, whether it is left out or not."""
        if step >= len(self.whole):
            raise ValueError(f"step={step}: epoch {epoch} has the steps 0 to {len(self.whole) - 1}")
        return self.rows_at(epoch, step, *self.whole.bounds(step))

    def rows_at(self, epoch: int, step: int, first: int, last: int) -> StepRows:
        """The step of these positions."""
        order, topology = self.order, self.topology
        found = order.pool.rows.names(order.dataset_rows(epoch, range(first, last)))
        count = topology.num_data_devices
        devices = [
            DeviceRows(device, device % topology.size, found[(device - first) % count :: count])
            for device in range(count)
        ]
        run_step = epoch * len(self.whole) + step
        is_skipped = any(begin <= first < end for begin, end in self.skipped.of_epoch(epoch))
        return StepRows(epoch, step, first, last, found, devices, run_step, is_skipped)

    def left_of(self, epoch: int, start: int) -> BatchSchedule:
        """The steps of an epoch from a position on, without those that are left out."""
        return replace(self.whole, start=start, skipped=self.skipped.of_epoch(epoch))

    def num_skipped(self, epoch: int, position: int) -> int:
        """The steps of an epoch that are left out before a position."""
        spans = self.skipped.of_epoch(epoch)
        rows = (min(last, position) - first for first, last in spans if first < position)
        return sum(-(-each // self.whole.global_batch) for each in rows)


def stored_rows(order: Sampler, step: StepRows) -> list[int]:
    """The rows of the store that the rows of a step are, or are parts of, in the same order."""
    rows = order.dataset_rows(step.epoch, range(step.first, step.last))
    found: list[int] = order.pool.rows.stored_rows(rows).tolist()
    return found


def steps_of_checkpoint(
    path: str, data: MemmapDataModule, order: Sampler, topology: DataTopology
) -> list[StepRows]:
    """The last step that a checkpoint has seen, and the next one.

    Args:
        path: The checkpoint.
        data: The data module of the training.
        order: The order of rows.
        topology: Its data devices.

    Returns:
        The two steps; the next one alone where the checkpoint has seen none.

    Raises:
        ValueError: The checkpoint is of another data module or another order, or holds more than
            tensors and plain values.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise ValueError(
            f"ckpt_path={path!r} holds more than tensors and plain values, and is not unpickled:"
            f" {str(error).splitlines()[0]}"
        ) from error
    name = type(data).__qualname__
    state = saved.get(name, {}).get("train") if isinstance(saved, dict) else None
    if state is None:
        raise ValueError(f"ckpt_path={path!r}: it has no state of a {name}")
    stand = LoaderState.read(state)
    if (differing := difference_of(stand.sampler, order.identity)) is not None:
        name, was, now, remedy = differing
        raise ValueError(
            f"ckpt_path={path!r}: its rows come in another order than those of the config, which"
            f" has {name}={now} instead of {name}={was}: give a config with {remedy}"
        )
    epochs = Epochs.of(data, order, topology, stand.skipped)
    epoch, position, found = stand.epoch, stand.position, list[StepRows]()
    if stand.steps:
        # The last step ends where the checkpoint stands, whatever the steps before it were.
        before = epochs.left_of(epoch, 0)
        first, last = before.bounds(stand.steps - 1) if stand.steps <= len(before) else (0, 0)
        if last != position:
            first = max(0, position - before.global_batch)
        number = stand.steps - 1 + epochs.num_skipped(epoch, first)
        found.append(epochs.rows_at(epoch, number, first, position))
    left = epochs.left_of(epoch, position)
    number = stand.steps
    if not len(left):
        left, epoch, number = epochs.left_of(epoch + 1, 0), epoch + 1, 0
    first, last = left.bounds(0)
    number += epochs.num_skipped(epoch, first)
    found.append(epochs.rows_at(epoch, number, first, last))
    return found
