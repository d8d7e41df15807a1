"""``lightning-memmap rows``: the rows of any step, computed without loading data."""

import json as json_format
from collections.abc import Sequence
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
from rich.table import Table

from lightning_memmap.arguments import BriefParser, print_error, read_config, reject_overrides
from lightning_memmap.commands.store_page import Section, read_values
from lightning_memmap.data.module import MemmapDataModule
from lightning_memmap.data.splits import ROLES
from lightning_memmap.errors import MemmapError, StoreNotFoundError, check_integer
from lightning_memmap.placement.topology import DataTopology, find_topology
from lightning_memmap.results.reading import check_dataset, read_latest, read_row_results
from lightning_memmap.sampling.columns import DatasetIdentity
from lightning_memmap.sampling.sampler import Sampler
from lightning_memmap.sampling.schedule import BatchSchedule, steps_to_skip
from lightning_memmap.store import Store
from lightning_memmap.store.series import make_fields
from lightning_memmap.tables import check_page, make_table, render_page, write_atomically

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
    num_devices = topology.num_global_data_devices
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
                "rank": device % topology.data_parallel_size,
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
    size = data.batch_size * topology.num_global_data_devices
    return BatchSchedule(order.num_positions, size, order.num_shards, data.drop_last)


@dataclass(frozen=True)
class _Listing:
    """The answer of the command: as JSON, and as a line and a table."""

    value: Any
    title: str
    table: Table | None = None
    #: The labels of rows on a page, and their rows in a store.
    labels: Sequence[str] = ()
    store_rows: Sequence[int] = ()


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
        listing = _list(options)
    except (MemmapError, OSError, ValueError, IndexError, TypeError) as error:
        print_error(error)
        return 2
    if options.json:
        print(json_format.dumps(listing.value))
        return 0
    console = Console(markup=False, highlight=False)
    for shown in (listing.title, listing.table, options.show):
        if shown is not None:
            console.print(shown, soft_wrap=shown is not listing.table)
    return 0


def _list(options: RowsOptions) -> _Listing:
    """List the rows that the options choose, and write their page if they name one."""
    if options.results is not None and options.show is None:
        return _list_results(options, None)
    data = _make_data(options)
    topology = _find_topology(options)
    store = _open_store(options, data)
    order = data.make_train_order(store, topology)
    if options.results is not None:
        fields = make_fields(store, order.pool.rows)
        check_dataset(options.results, DatasetIdentity.of(fields))
        listing = _list_results(options, order)
    elif options.find is not None:
        listing = _list_steps(options, data, order, topology)
    else:
        step = describe_step(data, order, topology, options.epoch, options.step)
        listing = _list_step(order, step)
    if options.show is not None:
        _write_page(Path(options.show), store, listing)
    return listing


def _open_store(options: RowsOptions, data: MemmapDataModule) -> Store:
    try:
        return data.open_train_store()
    except StoreNotFoundError as error:
        raise StoreNotFoundError(
            f"no store at {data.store_path('train')}. This command loads no dataset: store the"
            f" dataset first, with `lightning-memmap fit --config {options.config}` or"
            " `lightning-memmap store build`"
        ) from error


def _list_results(options: RowsOptions, order: Sampler | None) -> _Listing:
    """List the rows with the largest or smallest results. An order is needed for a page."""
    assert options.results is not None
    assert options.sort is not None
    values, is_seen, epoch = read_latest(options.results, options.sort)
    if values.ndim != 1:
        raise ValueError(
            f"sort={options.sort!r}: rows have values of shape {tuple(values.shape[1:])}: sort by"
            " results with one value for each row"
        )
    rows = is_seen.nonzero().flatten()
    descending = values[rows].argsort(descending=not options.ascending, stable=True)
    rows = rows[descending[: options.count]]
    table = read_row_results(options.results)
    names = [name for name in table.keys() if name not in ("seen", options.sort)]  # noqa: SIM118
    columns = {
        "row": rows,
        options.sort: values[rows],
        **{name: table[name][rows] for name in names},
    }
    cells = zip(*(column.tolist() for column in columns.values()), strict=True)
    entries = [dict(zip(columns, row, strict=True)) for row in cells]
    shown = [{name: _format_value(value) for name, value in entry.items()} for entry in entries]
    return _Listing(
        entries,
        f"{options.results}, epoch {epoch}: rows by {options.sort}",
        make_table([*columns], [[*entry.values()] for entry in shown]),
        [", ".join(map(" ".join, entry.items())) for entry in shown],
        [] if order is None else order.pool.rows.store_rows(rows.numpy()).tolist(),
    )


def _format_value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else short_repr(value)


def _list_steps(
    options: RowsOptions, data: MemmapDataModule, order: Sampler, topology: DataTopology
) -> _Listing:
    """List the steps that have some rows."""
    names = str(options.find).replace(" ", "").split(",")
    steps = find_steps(data, order, topology, options.epoch, names)
    answer = f"the steps {steps} of the run" if steps else "no step"
    return _Listing(
        {"epoch": options.epoch, "rows": names, "run_steps": steps},
        f"epoch {options.epoch}: rows {options.find} are in {answer}",
    )


def _list_step(order: Sampler, step: dict[str, Any]) -> _Listing:
    """List the rows of a step."""
    skipped = ", skipped by skip_steps" if step["is_skipped"] else ""
    title = (
        f"epoch {step['epoch']}, step {step['step']}: positions {step['first']} to"
        f" {step['last'] - 1} of {order.num_positions}, {type(order).__name__};"
        f" step {step['run_step']} of the run{skipped}"
    )
    lines = [
        [device["device"], device["rank"], " ".join(map(_format_row, device["rows"]))]
        for device in step["devices"]
    ]
    labels = ("data device", "rank", "rows")
    positions = np.arange(step["first"], step["last"])
    devices = np.repeat(positions, order.num_rows_at(step["epoch"], positions))
    devices %= len(step["devices"])
    pairs = zip(step["rows"], devices.tolist(), strict=True)
    dataset_rows = order.dataset_rows(step["epoch"], range(step["first"], step["last"]))
    return _Listing(
        step,
        title,
        make_table(labels, lines, labels[2:]),
        [f"row {_format_row(row)}, data device {device}" for row, device in pairs],
        order.pool.rows.store_rows(dataset_rows).tolist(),
    )


def _format_row(row: Any) -> str:
    """Format a row: its number, after the number of its series or the name of its set, if any."""
    return f"{_format_row(row[0])}:{row[1]}" if isinstance(row, list) else str(row)


def _write_page(path: Path, store: Store, listing: _Listing) -> None:
    samples = [*zip(listing.labels, read_values(store, listing.store_rows), strict=True)]
    section = Section(listing.title, [store.location], samples)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, render_page("samples.html", sections=[section]).encode())


def _make_data(options: RowsOptions) -> MemmapDataModule:
    """Make the data module of the config, without its datasets."""
    assert options.config is not None
    config = read_config(options.config, "data")
    arguments = dict(config["data"].get("init_args") or {})
    arguments |= dict.fromkeys(arguments.keys() & {f"{role}_dataset" for role in ROLES})
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


def _find_topology(options: RowsOptions) -> DataTopology:
    """Find the data devices of all processes."""
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
    return DataTopology(topology.data_devices, 0, topology.data_parallel_size)
