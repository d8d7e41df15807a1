"""``lightning-memmap rows``: the rows of any step, computed without loading data."""

import json as json_format
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from reprlib import repr as short_repr
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from rich.console import Console

from lightning_memmap.arguments import BriefParser, print_error, read_config, reject_overrides
from lightning_memmap.commands.store_page import Section, read_values
from lightning_memmap.data.module import MemmapDataModule
from lightning_memmap.data.splits import SPLITS
from lightning_memmap.errors import MemmapError, StoreNotFoundError, check_integer
from lightning_memmap.placement.topology import DataTopology, find_topology
from lightning_memmap.results.reading import read_latest, read_row_results
from lightning_memmap.sampling.sampler import Sampler
from lightning_memmap.sampling.schedule import BatchSchedule, steps_to_skip
from lightning_memmap.store import Store
from lightning_memmap.tables import check_page, make_table, render_page, text, write_atomically

_DESCRIPTION = """List the rows of the global batch of any step, device by device, or the rows with
the largest results. The order of rows is computed: no data is loaded."""
#: Options of the Trainer that don't affect rows, and may need packages that aren't installed.
_IGNORED = ("callbacks", "logger", "plugins", "profiler", "barebones", "fast_dev_run")


@dataclass(frozen=True)
class RowsOptions:
    """The options of the command.

    Args:
        config: The config of the training, as for ``lightning-memmap fit``. Its datasets are not
            loaded; the training store must be there. With results, only ``show`` needs it.
        epoch: The epoch, counted from 0.
        step: The step of the epoch, counted from 0.
        devices: Data devices of all processes; by default as the config's Trainer has.
        find: Rows as the command lists them, such as ``17,4``: print the steps of the epoch that
            have one of them, as ``skip_steps`` counts them.
        results: The folder of the results of ``RowResults``: list rows by these instead of a step.
        sort: The results to sort by, the largest first.
        ascending: Sort the smallest first.
        count: The number of rows to list by results.
        json: Print JSON instead of a table.
        show: Write a page with the fields of each row, images too, to this HTML file.

    Raises:
        ValueError: An option is out of range, or two of them exclude each other.
    """

    config: str | None = None
    epoch: int = 0
    step: int = 0
    devices: int | None = None
    find: str | None = None
    results: str | None = None
    sort: str | None = None
    ascending: bool = False
    count: int = 20
    json: bool = False
    show: str | None = None

    def __post_init__(self) -> None:
        if self.config is None and (self.results is None or self.show is not None):
            raise ValueError(
                "config: pass the config of the training, which names the store; only --results"
                " without --show needs no config"
            )
        if (self.results is None) != (self.sort is None):
            raise ValueError(
                f"results={self.results!r} with sort={self.sort!r}: pass both, such as --results"
                " results/run1 --sort loss"
            )
        check_integer("count", self.count, 1)
        check_integer("epoch", self.epoch, 0)
        check_integer("step", self.step, 0)
        if self.devices is not None:
            check_integer("devices", self.devices, 1)
        if self.show is not None and (self.json or self.find is not None):
            other = "json=True" if self.json else f"find={self.find!r}"
            raise ValueError(f"show={self.show!r} with {other}: only one of the two can be set")


def describe_step(
    data: MemmapDataModule, order: Sampler, topology: DataTopology, epoch: int, step: int
) -> dict[str, Any]:
    """Describe a step of an epoch: its rows, the rows of each device, and whether it is skipped."""
    num_devices = topology.num_data_devices
    schedule = _schedule(data, order, topology)
    if step >= len(schedule):
        raise ValueError(f"step={step}: epoch {epoch} has the steps 0 to {len(schedule) - 1}")
    start, stop = schedule.bounds(step)
    names = order.pool.rows.names(order.dataset_rows(epoch, range(start, stop)))
    # Each position has several rows if they are packed.
    stops = np.cumsum(order.num_rows_at(epoch, np.arange(start, stop))).tolist()
    by_position = [names[first:last] for first, last in pairwise([0, *stops])]
    run_step = epoch * len(schedule) + step
    return {
        "epoch": epoch,
        "step": step,
        "first": start,
        "last": stop,
        "rows": names,
        "devices": [
            {
                "device": device,
                "rank": device % topology.size,
                "rows": [*chain(*by_position[(device - start) % num_devices :: num_devices])],
            }
            for device in range(num_devices)
        ],
        "run_step": run_step,
        "is_skipped": any(
            skip_start <= run_step < skip_stop
            for skip_start, skip_stop in steps_to_skip(data.skip_steps)
        ),
    }


def find_steps(
    data: MemmapDataModule, order: Sampler, topology: DataTopology, epoch: int, names: list[str]
) -> list[int]:
    """Find the steps of an epoch that have one of these rows, counted over all epochs."""
    schedule = _schedule(data, order, topology)
    unknown = {*names}
    shard_names: list[str] = []
    for shard in range(order.pool.num_shards):
        rows = order.pool.rows.names(order.pool.shard_dataset_rows(shard))
        shard_names = [*map(_format_row, rows)] or shard_names
        unknown.difference_update(shard_names)
    if unknown:
        raise ValueError(f"find: {min(unknown)!r} isn't a training row, such as {shard_names[0]!r}")
    steps = []
    for step in range(len(schedule)):
        dataset_rows = order.dataset_rows(epoch, range(*schedule.bounds(step)))
        if not {*names}.isdisjoint(map(_format_row, order.pool.rows.names(dataset_rows))):
            steps.append(epoch * len(schedule) + step)
    return steps


def _schedule(data: MemmapDataModule, order: Sampler, topology: DataTopology) -> BatchSchedule:
    size = data.batch_size * topology.num_data_devices
    return BatchSchedule(order.num_positions, size, order.num_shards, data.drop_last)


def rows_command(args: list[str]) -> int:
    """Run the command with these arguments."""
    parser = BriefParser(prog="lightning-memmap rows", description=_DESCRIPTION)
    parser.add_class_arguments(RowsOptions, as_group=False, skip={"json", "ascending"})
    parser.add_argument("--ascending", action="store_true", help="Sort the smallest first.")
    parser.add_argument("--json", action="store_true", help="Print JSON instead of a table.")
    try:
        reject_overrides(args)
        options = RowsOptions(**parser.parse_args(args).as_dict())
        if options.show is not None:
            check_page("show", Path(options.show))
        if options.results is not None:
            _list_results(options)
            return 0
        data = _read_data(options)
        topology = _read_topology(options)
        store = _open_store(options, data)
        order = data.train_sampler(store, topology)
        if options.find is not None:
            names = options.find.replace(" ", "").split(",")
            steps = find_steps(data, order, topology, options.epoch, names)
            _print_steps(options, names, steps)
            return 0
        step = describe_step(data, order, topology, options.epoch, options.step)
        if options.show is not None:
            _write_page(Path(options.show), store, order, step)
    except (MemmapError, OSError, ValueError, IndexError, TypeError) as error:
        print_error(error)
        return 2
    if options.json:
        print(json_format.dumps(step))
        return 0
    console = Console(markup=False)
    console.print(_title(order, step), soft_wrap=True)
    lines = [
        [
            text(device["device"]),
            text(device["rank"]),
            text(" ".join(map(_format_row, device["rows"]))),
        ]
        for device in step["devices"]
    ]
    console.print(make_table(("data device", "rank", "rows"), lines, ("rows",)))
    if options.show is not None:
        console.print(options.show, soft_wrap=True)
    return 0


def _open_store(options: RowsOptions, data: MemmapDataModule) -> Store:
    try:
        return data.open_train_store()
    except StoreNotFoundError as error:
        raise StoreNotFoundError(
            f"no store at {data.store_path('train')}. This command loads no dataset: store the"
            f" dataset first, with `lightning-memmap fit --config {options.config}` or"
            " `lightning-memmap store build`"
        ) from error


def _list_results(options: RowsOptions) -> None:
    """List the rows with the largest or smallest results."""
    assert options.results is not None
    assert options.sort is not None
    values, is_seen, epoch = read_latest(options.results, options.sort)
    if values.ndim != 1:
        raise ValueError(
            f"sort={options.sort!r}: rows have values of shape {tuple(values.shape[1:])}: sort by"
            " results with one value for each row"
        )
    rows = is_seen.nonzero().flatten()
    order = values[rows].argsort(descending=not options.ascending, stable=True)
    rows = rows[order[: options.count]]
    table = read_row_results(options.results)
    names = [name for name in table.keys() if name not in ("seen", options.sort)]  # noqa: SIM118
    entries = [
        {
            "row": row,
            options.sort: values[row].item(),
            **{name: table[name][row].tolist() for name in names},
        }
        for row in rows.tolist()
    ]
    if options.json:
        print(json_format.dumps(entries))
        return
    title = f"{options.results}, epoch {epoch}: rows by {options.sort}"
    lines = [[text(_format_value(value)) for value in entry.values()] for entry in entries]
    console = Console(markup=False)
    console.print(title, soft_wrap=True)
    console.print(make_table(("row", options.sort, *names), lines, ()))
    if options.show is None:
        return
    data = _read_data(options)
    store = _open_store(options, data)
    store_rows = data.train_sampler(store, _read_topology(options)).pool.rows.store_rows(
        rows.numpy()
    )
    labels = [
        ", ".join(f"{name} {_format_value(value)}" for name, value in entry.items())
        for entry in entries
    ]
    samples = [*zip(labels, read_values(store, store_rows.tolist()), strict=True)]
    _write_section(Path(options.show), Section(title, [store.location], samples))
    console.print(options.show, soft_wrap=True)


def _format_value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else short_repr(value)


def _print_steps(options: RowsOptions, names: list[str], steps: list[int]) -> None:
    if options.json:
        print(json_format.dumps({"epoch": options.epoch, "rows": names, "run_steps": steps}))
        return
    answer = f"the steps {steps} of the run" if steps else "no step"
    print(f"epoch {options.epoch}: rows {options.find} are in {answer}")


def _title(order: Sampler, step: dict[str, Any]) -> str:
    skipped = ", skipped by skip_steps" if step["is_skipped"] else ""
    return (
        f"epoch {step['epoch']}, step {step['step']}: positions {step['first']} to"
        f" {step['last'] - 1} of {order.num_positions}, {type(order).__name__};"
        f" step {step['run_step']} of the run{skipped}"
    )


def _format_row(row: Any) -> str:
    """Format a row: its number, after the number of its series or the name of its set, if any."""
    return f"{_format_row(row[0])}:{row[1]}" if isinstance(row, list) else str(row)


def _write_page(path: Path, store: Store, order: Sampler, step: dict[str, Any]) -> None:
    positions = np.arange(step["first"], step["last"])
    devices = np.repeat(positions, order.num_rows_at(step["epoch"], positions))
    devices %= len(step["devices"])
    pairs = zip(step["rows"], devices.tolist(), strict=True)
    names = [f"row {_format_row(row)}, data device {device}" for row, device in pairs]
    dataset_rows = order.dataset_rows(step["epoch"], range(step["first"], step["last"]))
    values = read_values(store, order.pool.rows.store_rows(dataset_rows).tolist())
    samples = [*zip(names, values, strict=True)]
    title = f"Epoch {step['epoch']}, step {step['step']}"
    _write_section(path, Section(title, [_title(order, step), store.location], samples))


def _write_section(path: Path, section: Section) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, render_page("samples.html", sections=[section]).encode())


def _read_data(options: RowsOptions) -> MemmapDataModule:
    """Make the data module of the config, without its datasets."""
    assert options.config is not None
    config = read_config(options.config, "data")
    arguments = dict(config["data"].get("init_args") or {})
    arguments |= dict.fromkeys(arguments.keys() & {f"{split}_dataset" for split in SPLITS})
    parser = BriefParser(exit_on_error=False)
    parser.add_subclass_arguments(L.LightningDataModule, "data", required=True)
    section = {"data": {**config["data"], "init_args": arguments}}
    data = parser.instantiate(parser.parse_config(section)).data
    if not isinstance(data, MemmapDataModule):
        raise ValueError(
            f"config={options.config!r}: data is a {type(data).__name__}. Only the order of a"
            " MemmapDataModule can be computed"
        )
    return data


def _read_topology(options: RowsOptions) -> DataTopology:
    """Determine the data devices of all processes."""
    if options.devices is not None:
        return DataTopology((torch.device("cpu"),) * options.devices)
    assert options.config is not None
    config = read_config(options.config, "data")
    trainer_options = config.get("trainer") or {}
    kept = {name: value for name, value in trainer_options.items() if name not in _IGNORED}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    parser = BriefParser(exit_on_error=False)
    parser.add_class_arguments(L.Trainer, "trainer", fail_untyped=False)
    try:
        section = {"trainer": {**kept, **quiet}}
        trainer = parser.instantiate(parser.parse_config(section)).trainer
        topology = find_topology(trainer.strategy)
    except (MisconfigurationException, ValueError, RuntimeError, MemmapError) as error:
        raise ValueError(
            f"the Trainer of the config cannot be made here ({error}). Pass the number of data"
            " devices of all processes as --devices"
        ) from error
    # Without a rank, so that the rows are the rows of all processes.
    return DataTopology(topology.data_devices, 0, topology.size)
