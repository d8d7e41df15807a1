"""``lightning-memmap rows``: the rows of any step, looked up without any data being loaded."""

import json as json_format
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from rich.console import Console

from lightning_memmap.arguments import BriefParser, print_error, read_config, reject_overrides
from lightning_memmap.commands.store_page import Section, values_of
from lightning_memmap.data.module import MemmapDataModule
from lightning_memmap.data.splits import SPLITS
from lightning_memmap.errors import MemmapError, StoreNotFoundError, check_integer
from lightning_memmap.placement.topology import DataTopology, topology_of
from lightning_memmap.sampling.sampler import Sampler
from lightning_memmap.sampling.schedule import BatchSchedule, steps_to_skip
from lightning_memmap.store import Store
from lightning_memmap.tables import check_page, make_table, render_page, text, write_at_once

_DESCRIPTION = """List the rows of the global batch of any step, device by device. The order of rows
is computed: no data is loaded."""
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
        devices: Data devices of all processes; by default those of the config's Trainer.
        find: Rows as they are listed, such as ``17,4``: print the steps of the epoch that have one
            of them, as ``skip_steps`` counts them.
        json: Print JSON instead of a table.
        show: Write a page with the fields of each row, images too, to this HTML file.

    Raises:
        ValueError: An option is out of range, or two of them exclude each other.
    """

    config: str
    epoch: int = 0
    step: int = 0
    devices: int | None = None
    find: str | None = None
    json: bool = False
    show: str | None = None

    def __post_init__(self) -> None:
        check_integer("epoch", self.epoch, 0)
        check_integer("step", self.step, 0)
        if self.devices is not None:
            check_integer("devices", self.devices, 1)
        if self.show is not None and (self.json or self.find is not None):
            other = "json=True" if self.json else f"find={self.find!r}"
            raise ValueError(f"show={self.show!r} with {other}: give one of the two")


def step_rows(
    data: MemmapDataModule, order: Sampler, topology: DataTopology, epoch: int, step: int
) -> dict[str, Any]:
    """The rows of a step of an epoch, whether it is left out or not, and of each data device."""
    count, schedule = topology.num_data_devices, _schedule(data, order, topology)
    if step >= len(schedule):
        raise ValueError(f"step={step}: epoch {epoch} has the steps 0 to {len(schedule) - 1}")
    first, last = schedule.bounds(step)
    found = order.pool.rows.names(order.dataset_rows(epoch, range(first, last)))
    run_step = epoch * len(schedule) + step
    return {
        "epoch": epoch,
        "step": step,
        "first": first,
        "last": last,
        "rows": found,
        "devices": [
            {"device": d, "rank": d % topology.size, "rows": found[(d - first) % count :: count]}
            for d in range(count)
        ],
        "run_step": run_step,
        "is_skipped": any(begin <= run_step < end for begin, end in steps_to_skip(data.skip_steps)),
    }


def steps_with(
    data: MemmapDataModule, order: Sampler, topology: DataTopology, epoch: int, names: list[str]
) -> list[int]:
    """The steps of an epoch that have one of these rows, counted over all epochs."""
    schedule, wanted, found = _schedule(data, order, topology), {*names}, list[int]()
    unknown, known = {*names}, list[str]()
    for shard in range(order.pool.num_shards):
        known = [*map(_name, order.pool.rows.names(order.pool.shard_dataset_rows(shard)))] or known
        unknown.difference_update(known)
    if unknown:
        raise ValueError(f"find: {min(unknown)!r} is no training row, such as {known[0]!r}")
    for step in range(len(schedule)):
        rows = order.dataset_rows(epoch, range(*schedule.bounds(step)))
        if not wanted.isdisjoint(map(_name, order.pool.rows.names(rows))):
            found.append(epoch * len(schedule) + step)
    return found


def _schedule(data: MemmapDataModule, order: Sampler, topology: DataTopology) -> BatchSchedule:
    size = data.batch_size * topology.num_data_devices
    return BatchSchedule(order.num_positions, size, order.num_shards, data.drop_last)


def rows(args: list[str]) -> int:
    """Run the command with these arguments."""
    parser = BriefParser(prog="lightning-memmap rows", description=_DESCRIPTION)
    parser.add_class_arguments(RowsOptions, as_group=False, skip={"json"})
    parser.add_argument("--json", action="store_true", help="Print JSON instead of a table.")
    try:
        reject_overrides(args)
        question = RowsOptions(**parser.parse_args(args).as_dict())
        if question.show is not None:
            check_page("show", Path(question.show))
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
        if question.find is not None:
            names = question.find.replace(" ", "").split(",")
            found = steps_with(data, order, topology, question.epoch, names)
            where = f"the steps {found} of the run" if found else "no step"
            answer = {"epoch": question.epoch, "rows": names, "run_steps": found}
            line = f"epoch {question.epoch}: rows {question.find} are in {where}"
            print(json_format.dumps(answer) if question.json else line)
            return 0
        step = step_rows(data, order, topology, question.epoch, question.step)
        if question.show is not None:
            _write_page(Path(question.show), store, order, step)
    except (MemmapError, OSError, ValueError, IndexError, TypeError) as error:
        print_error(error)
        return 2
    if question.json:
        print(json_format.dumps(step))
        return 0
    console = Console(markup=False)
    console.print(_title(order, step), soft_wrap=True)
    rows = [
        [text(each["device"]), text(each["rank"]), text(" ".join(map(_name, each["rows"])))]
        for each in step["devices"]
    ]
    console.print(make_table(("data device", "rank", "rows"), rows, ("rows",)))
    if question.show is not None:
        console.print(question.show, soft_wrap=True)
    return 0


def _title(order: Sampler, step: dict[str, Any]) -> str:
    left_out = ", left out by skip_steps" if step["is_skipped"] else ""
    return (
        f"epoch {step['epoch']}, step {step['step']}: positions {step['first']} to"
        f" {step['last'] - 1} of {order.num_positions}, {type(order).__name__};"
        f" step {step['run_step']} of the run{left_out}"
    )


def _name(row: Any) -> str:
    """The number of a row; of a window or a row of several sets with that of its series or set."""
    return f"{_name(row[0])}:{row[1]}" if isinstance(row, list) else str(row)


def _write_page(path: Path, store: Store, order: Sampler, step: dict[str, Any]) -> None:
    names = [
        f"row {_name(row)}, data device {position % len(step['devices'])}"
        for position, row in enumerate(step["rows"], step["first"])
    ]
    rows = order.dataset_rows(step["epoch"], range(step["first"], step["last"]))
    values = values_of(store, order.pool.rows.store_rows(rows).tolist())
    samples = [*zip(names, values, strict=True)]
    title = f"Epoch {step['epoch']}, step {step['step']}"
    path.parent.mkdir(parents=True, exist_ok=True)
    section = Section(title, [_title(order, step), store.location], samples)
    write_at_once(path, render_page("samples.html", sections=[section]).encode())


def _data_of(question: RowsOptions) -> tuple[MemmapDataModule, DataTopology]:
    """The data module of the config, without its datasets, and where its rows are."""
    config = read_config(question.config, "data")
    arguments = dict(config["data"].get("init_args") or {})
    arguments |= dict.fromkeys(arguments.keys() & {f"{split}_dataset" for split in SPLITS})
    parser = BriefParser(exit_on_error=False)
    parser.add_subclass_arguments(L.LightningDataModule, "data", required=True)
    given = {"data": {**config["data"], "init_args": arguments}}
    data = parser.instantiate(parser.parse_config(given)).data
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
        given = {"trainer": {**kept, **quiet}}
        trainer = parser.instantiate(parser.parse_config(given)).trainer
        found = topology_of(trainer.strategy)
    except (MisconfigurationException, ValueError, RuntimeError, MemmapError) as error:
        raise ValueError(
            f"the Trainer of the config cannot be made here ({error}): give the number of data"
            " devices over all processes with --devices"
        ) from error
    # The rows are those of all processes.
    return data, DataTopology(found.data_devices, 0, found.size)
