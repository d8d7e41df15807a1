"""``lightning-memmap rows``: the rows of any step, looked up without any data being loaded."""

import json as json_format
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import lightning as L
import numpy as np
import torch
import yaml
from jsonargparse import ArgumentError
from lightning.fabric.utilities.exceptions import MisconfigurationException
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_memmap.arguments import BriefParser, print_error, refuse_several_configs
from lightning_memmap.datamodule import MemmapDataModule
from lightning_memmap.errors import MemmapError
from lightning_memmap.loading.split import image_decoders
from lightning_memmap.loading.state import LoaderState
from lightning_memmap.pixels import pixels_of
from lightning_memmap.placement import DataTopology, topology_of
from lightning_memmap.sampling import BatchSchedule, Sampler
from lightning_memmap.sampling.differences import difference_of
from lightning_memmap.schema import Decode, Field, Form, read_forms
from lightning_memmap.splits import SPLITS
from lightning_memmap.store import Store
from lightning_memmap.store.columns import OpenColumn
from lightning_memmap.tables import printable

_DESCRIPTION = """List the rows of a global batch, device by device: of any step of any epoch, or of
the last and the next step of a checkpoint. The order of rows is computed: no data is loaded."""
#: Sections of the Trainer that decide nothing about rows, and may need what is not here.
_LEFT_OUT = ("callbacks", "logger", "plugins", "profiler", "barebones", "fast_dev_run")
#: Rows of a contact sheet at most, and pixels between images.
_SHEET_ROWS, _MARGIN = 1024, 2
#: The most characters of a field.
_MAX_TEXT = 80
#: Wider than any table.
_MAX_WIDTH = 2**20


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


@dataclass(frozen=True)
class DeviceRows:
    """The rows that one data device gives in a step.

    Args:
        device: Number of the data device over all processes.
        rank: Data-parallel rank of its process.
        rows: The rows of its batch, in their order, as for `StepRows`.
    """

    device: int
    rank: int
    rows: list[Any]


@dataclass(frozen=True)
class StepRows:
    """The rows of a step.

    Args:
        epoch: The epoch.
        step: The step of the epoch.
        first: Its first position.
        last: One past its last position.
        rows: The rows of the global batch, in the order of positions: numbers, or as
            `lightning_memmap.sampling.Shards.names` has them.
        devices: The same by data device.
    """

    epoch: int
    step: int
    first: int
    last: int
    rows: list[Any]
    devices: list[DeviceRows]


def rows_parser() -> BriefParser:
    """Make the parser of the command."""
    parser = BriefParser(prog="lightning-memmap rows", description=_DESCRIPTION)
    parser.add_class_arguments(Question, as_group=False, skip={"json"})
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
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
        data, topology = _read_config(question)
        store = data.open_train_store()
        order = data.train_sampler(store, topology)
        if question.ckpt_path is None:
            steps = [
                step_rows(
                    order, _schedule(data, order, topology), topology, question.epoch, question.step
                )
            ]
        else:
            steps = _steps_of_checkpoint(question.ckpt_path, data, order, topology)
        forms = read_forms(data.variable)
        shown = [_stored_rows(order, step) for step in steps]
        has_sheet = question.show is not None and _write_sheet(
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
            console.print(_devices_table(step))
        else:
            _print_values(console, _values(step, numbers, store, forms))
    if has_sheet:
        console.print(f"images are in {question.show}, row by row in the order of the table")
    return 0


def step_rows(
    order: Sampler, schedule: BatchSchedule, topology: DataTopology, epoch: int, step: int
) -> StepRows:
    """The rows of a step, by data device.

    Args:
        order: The order of rows.
        schedule: How the epoch is divided into steps.
        topology: The data devices of any of the processes.
        epoch: The epoch, counted from 0.
        step: The step of the schedule, counted from 0.

    Returns:
        The rows. Nothing is read.

    Raises:
        ValueError: There is no such step.
    """
    if step >= len(schedule):
        raise ValueError(f"step={step}: epoch {epoch} has the steps 0 to {len(schedule) - 1}")
    first, last = schedule.bounds(step)
    found = order.shards.base.names(order.dataset_rows(epoch, range(first, last)))
    count = topology.num_data_devices
    devices = [
        DeviceRows(device, device % topology.size, found[(device - first) % count :: count])
        for device in range(count)
    ]
    return StepRows(epoch, step, first, last, found, devices)


def _stored_rows(order: Sampler, step: StepRows) -> list[int]:
    """The rows of the store that the rows of a step are, or are parts of."""
    rows = order.dataset_rows(step.epoch, range(step.first, step.last))
    found: list[int] = order.shards.base.stored_rows(rows).tolist()
    return found


def _schedule(
    data: MemmapDataModule, order: Sampler, topology: DataTopology, start: int = 0
) -> BatchSchedule:
    global_batch = data.batch_size * topology.num_data_devices
    return BatchSchedule(order.num_positions, global_batch, order.num_shards, data.drop_last, start)


def _steps_of_checkpoint(
    path: str, data: MemmapDataModule, order: Sampler, topology: DataTopology
) -> list[StepRows]:
    """The last step that a checkpoint has seen, and the next one."""
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
    found = []
    if stand.steps:
        # The last step ends where the checkpoint stands, whatever the steps before it were.
        size = data.batch_size * topology.num_data_devices
        schedule = _schedule(data, order, topology)
        if stand.steps <= len(schedule):
            first, last = schedule.bounds(stand.steps - 1)
            size = last - first if last == stand.position else size
        before = max(0, stand.position - size)
        seen = BatchSchedule(stand.position, stand.position - before, 1, start=before)
        step = step_rows(order, seen, topology, stand.epoch, 0)
        found.append(StepRows(**{**vars(step), "step": stand.steps - 1}))
    schedule = _schedule(data, order, topology, stand.position)
    if len(schedule):
        step = step_rows(order, schedule, topology, stand.epoch, 0)
        found.append(StepRows(**{**vars(step), "step": stand.steps}))
    else:
        schedule = _schedule(data, order, topology)
        found.append(step_rows(order, schedule, topology, stand.epoch + 1, 0))
    return found


def _read_config(question: Question) -> tuple[MemmapDataModule, DataTopology]:
    """The data module of the config, without its datasets, and where its rows are."""
    text = Path(question.config).read_text(encoding="utf-8")
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"config={question.config!r} is no yaml file: {error}") from error
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


def _devices_table(step: StepRows) -> Table:
    """The rows of a step by device."""
    table = Table()
    for name in ("data device", "rank", "rows"):
        table.add_column(name, overflow="fold")
    for device in step.devices:
        rows = " ".join(map(_name, device.rows))
        table.add_row(str(device.device), str(device.rank), rows)
    return table


def _print_values(console: Console, values: Sequence[Sequence[str]]) -> None:
    """Print the values of rows as a table, or field by field where that would be too wide."""
    names, *rows = values
    table = Table(*names)
    for row in rows:
        table.add_row(*row)
    if console.measure(table, options=console.options.update(width=_MAX_WIDTH)).minimum <= (
        console.width
    ):
        console.print(table)
        return
    for number, device, *fields in rows:
        console.print(f"row {number}, data device {device}", soft_wrap=True)
        for name, value in zip(names[2:], fields, strict=True):
            console.print(f"  {name}: {value}", soft_wrap=True)


def _values(
    step: StepRows, numbers: Sequence[int], store: Store, forms: Mapping[str, Form]
) -> list[list[str]]:
    """The values that the rows of a step have in a store.

    Args:
        step: The step.
        numbers: Its rows in the store, in the order of positions.
        store: The store.
        forms: The forms of its fields.

    Returns:
        The names of what is shown, and then for each row its number, its data device and its
        fields.
    """
    names = [field.name for field in store.schema.fields]
    shown = [
        index
        for index, field in enumerate(store.schema.fields)
        if _is_short(field) and not isinstance(forms.get(field.name), Decode)
    ]
    own = ["row", "data device"]
    # A field of such a name would look like the row's number, or its device.
    heads = [f"field {name}" if name in own else name for name in (names[i] for i in shown)]
    found = [[*own, *heads]]
    for position, (name, row) in enumerate(zip(step.rows, numbers, strict=True), step.first):
        values = [
            _text(store.schema.fields[index], store.columns[index].row(row)) for index in shown
        ]
        found.append([_name(name), str(position % len(step.devices)), *values])
    return found


def _name(row: Any) -> str:
    """A row in a table: its number, or for a window the number of its series and its step."""
    if not isinstance(row, list):
        return str(row)
    return f"{_name(row[0])}:{row[1]}"


def _is_short(field: Field) -> bool:
    return field.is_text or (not field.num_variable and math.prod(field.item_shape) <= 8)


def _text(field: Field, row: Tensor) -> str:
    if field.is_text:
        text = str(field.value(row))
    else:
        text = " ".join(map(field.words, row.flatten().tolist()))
    return printable(shorten(text, _MAX_TEXT))


def _write_sheet(store: Store, rows: Sequence[int], path: Path, forms: Mapping[str, Form]) -> bool:
    """Write the images of rows as one image, in their order, if the rows have any.

    Raises:
        ValueError: Nothing is installed that writes images.
    """
    rows = rows[:_SHEET_ROWS]
    decoders = image_decoders(store.manifest.columns, store.columns, forms)
    images = list[list[NDArray[np.uint8]]]()
    for index, (field, column) in enumerate(zip(store.schema.fields, store.columns, strict=True)):
        if index in decoders:
            decoded = decoders[index].decoded([column.row(row).numpy() for row in rows])
            images.append([image.movedim(0, -1).numpy() for image in decoded])
        elif not field.num_variable and (found := _images(column, rows)):
            images.append(found)
    if not images:
        return False
    pixels = images[0]
    height, width, depth = pixels[0].shape
    across = math.ceil(math.sqrt(len(pixels) * height / width))
    down = -(-len(pixels) // across)
    cell = (height + _MARGIN, width + _MARGIN)
    sheet = np.full((down * cell[0], across * cell[1], depth), 255, np.uint8)
    for index, image in enumerate(pixels):
        top, left = index // across * cell[0], index % across * cell[1]
        sheet[top : top + height, left : left + width] = image
    try:
        from matplotlib.image import imsave
    except ImportError:
        raise ValueError(
            f"show={str(path)!r}: no package is installed that writes images: install matplotlib"
        ) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    imsave(path, np.repeat(sheet, 3, axis=2) if depth == 1 else sheet)
    return True


def _images(column: OpenColumn, rows: Sequence[int]) -> list[NDArray[np.uint8]]:
    """The rows of a field as images; none where they are no images."""
    if not rows or pixels_of(column.row(rows[0])) is None:
        return []
    return [found for row in rows if (found := pixels_of(column.row(row))) is not None]
