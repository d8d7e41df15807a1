"""The command ``lightning-memmap``.

``fit``, ``validate``, ``test`` and ``predict`` are LightningCLI with the strategy names of this
pack registered. ``store`` works on stores: ``build``, ``info``, ``verify``, ``plan``. ``compare``
trains under several strategies and tells what each one costs; ``advise`` predicts that.
"""

import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.cli import LightningCLI
from rich.console import Console
from rich.table import Table
from torch.utils.data import Dataset

from lightning_memmap.compare import advise, compare
from lightning_memmap.errors import MemmapError, StoreNotFoundError
from lightning_memmap.order import shard_rows
from lightning_memmap.placement import (
    Consumers,
    Placement,
    Residency,
    format_bytes,
    parse_bytes,
    plan_placement,
)
from lightning_memmap.store import Store, build_store, open_store, verify_store
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.progress import show_progress
from lightning_memmap.store.verify import unknown_files

_DESCRIPTION = """Train with data that stays resident on every device.
"lightning-memmap store --help" lists what can be done with stores, and
"lightning-memmap compare --help" how strategies are compared, and
"lightning-memmap advise --help" how to ask which one is right."""


_MOST_DEVICES = 4096


def main(args: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, by default those of the process."""
    given = list(sys.argv[1:] if args is None else args)
    # A class_path may name a module of the folder the user stands in, as with `python -m`.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    commands = {"store": _store_command, "compare": compare, "advise": advise}
    if given and given[0] in commands:
        sys.exit(commands[given[0]](given[1:]))
    LightningCLI(args=None if args is None else given, parser_kwargs={"description": _DESCRIPTION})


def _store_command(args: list[str]) -> int:
    parser = ArgumentParser(prog="lightning-memmap store", description="Work on stores.")
    commands = parser.add_subcommands()
    commands.add_subcommand("build", _build_parser(), help="store a dataset")
    commands.add_subcommand("info", _path_parser(), help="print what a store holds")
    commands.add_subcommand("verify", _path_parser(), help="check every byte of a store")
    commands.add_subcommand("plan", _plan_parser(), help="print what would live where")
    config = parser.parse_args(args)
    run = {"build": _build, "info": _info, "verify": _verify, "plan": _plan}[config.subcommand]
    options = parser.instantiate(config)[config.subcommand]
    try:
        # Without markup: the names of files and fields may look like it.
        return run(options, Console(markup=False))
    except (MemmapError, OSError, ValueError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        # What is kept, and how to go on, has been said where it is known.
        return 128 + signal.SIGINT


def _build_parser() -> ArgumentParser:
    parser = ArgumentParser()
    parser.add_argument("path", type=str, help="directory of the store")
    parser.add_argument("--dataset", type=Dataset, required=True, help="class path of the dataset")
    parser.add_argument("--num_shards", type=int, default=24, help="shards of the store")
    parser.add_argument("--num_workers", type=int, default=0, help="processes that write")
    parser.add_argument("--overwrite", action="store_true", help="replace another dataset")
    parser.add_argument(
        "--fingerprint", type=str | None, help="text that changes whenever the rows do"
    )
    parser.add_argument(
        "--check",
        type=Literal["probes", "full", "off"],
        default="probes",
        help="which rows are compared with a store that is there",
    )
    parser.add_argument("--fresh", action="store_true", help="resume no interrupted build")
    return parser


def _path_parser() -> ArgumentParser:
    parser = ArgumentParser()
    parser.add_argument("path", type=str, help="directory of a store, or of one store per split")
    return parser


def _plan_parser() -> ArgumentParser:
    parser = _path_parser()
    parser.add_argument("--devices", type=str, default="1..8", help="counts, like 4 or 1..8")
    parser.add_argument("--memory", type=str, default="80GiB", help="memory of one device")
    parser.add_argument(
        "--memory_fraction", type=float, default=0.7, help="share that shards may take"
    )
    parser.add_argument(
        "--residency",
        type=Literal["auto", "stream"],
        default="auto",
        help="auto, or stream for data larger than memory",
    )
    parser.add_argument(
        "--shuffle_window", type=int | None, help="rows of a shard in a window of stream"
    )
    return parser


def _stores(path: str) -> dict[str, Store]:
    """The store at a path, or those one level below it, by name."""
    # Resolved, so that "." has a name.
    directory = Path(os.path.realpath(path))
    try:
        return {directory.name: open_store(directory)}
    except StoreNotFoundError:
        found, others = {}, []
        for child in sorted(directory.iterdir()) if directory.is_dir() else []:
            if child.is_dir() and not child.name.startswith("."):
                try:
                    found[child.name] = open_store(child)
                except StoreNotFoundError:
                    others.append(child)
        if not found:
            raise
        for other in others:
            print(f"skipped {_printable(other)}: it is no store", file=sys.stderr)
        return found


def _printable(value: object) -> str:
    """A name as a terminal may show it: the codes that control one are left out."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(value))


def _build(options: Namespace, console: Console) -> int:
    store = build_store(
        options.dataset,
        options.path,
        num_shards=options.num_shards,
        num_workers=options.num_workers,
        overwrite=options.overwrite,
        fingerprint=options.fingerprint,
        check=options.check,
        fresh=options.fresh,
    )
    _print_info(store, console)
    return 0


def _info(options: Namespace, console: Console) -> int:
    for store in _stores(options.path).values():
        _print_info(store, console)
    return 0


def _print_info(store: Store, console: Console) -> None:
    manifest = store.manifest
    console.print(_printable(store.path), style="bold", soft_wrap=True)
    console.print(
        f"{store.num_rows:,} rows, {format_bytes(manifest.num_bytes)},"
        f" {store.num_shards} shards of {format_bytes(min(manifest.shard_bytes))} to"
        f" {format_bytes(max(manifest.shard_bytes))}"
    )
    console.print("from " + ", ".join(f"{key} {value}" for key, value in manifest.source.items()))
    table = Table()
    for name in ("field", "dtype", "shape", "given as"):
        table.add_column(name)
    for name in ("bytes per row", "bytes", "bytes per shard"):
        table.add_column(name, justify="right")
    for field in store.schema.fields:
        table.add_row(
            field.name,
            str(field.dtype).removeprefix("torch."),
            str(tuple(field.shape)),
            field.kind,
            str(field.row_bytes),
            format_bytes(field.row_bytes * store.num_rows),
            format_bytes(field.row_bytes * -(-store.num_rows // store.num_shards)),
        )
    console.print(table)


def _verify(options: Namespace, console: Console) -> int:
    damaged = False
    for store in _stores(options.path).values():
        with show_progress("verifying", store.manifest.num_bytes, 1) as advance:
            damages = verify_store(store.path, advance=advance)
        for damage in damages:
            console.print(_printable(damage), style="red", soft_wrap=True)
        where = _printable(store.path)
        for name in unknown_files(store.path, store.manifest):
            line = f"{where}: {_printable(name)} is no part of the store: nothing here reads it"
            console.print(line, soft_wrap=True)
        if not damages:
            sums = store.num_shards * len(store.schema.fields)
            console.print(f"{where}: all {sums} checksums match", soft_wrap=True)
        damaged = damaged or bool(damages)
    return int(damaged)


def _plan(options: Namespace, console: Console) -> int:
    stores = {name: store.manifest for name, store in _stores(options.path).items()}
    window = options.shuffle_window
    if options.residency == "stream":
        return _plan_windows(stores, _counts(options.devices), window, console)
    if window is not None:
        raise ValueError(f"shuffle_window={window}: it is planned for with residency='stream'")
    total = sum(manifest.num_bytes for manifest in stores.values())
    memory = parse_bytes(options.memory)
    if not 0 < options.memory_fraction <= 1:
        raise ValueError(f"memory_fraction={options.memory_fraction}: more than 0 and at most 1")
    budget = int(memory * options.memory_fraction)
    table = Table(
        title=f"{format_bytes(total)} of {', '.join(stores)} on devices of {format_bytes(memory)},"
        f" {format_bytes(budget)} of each for shards",
        title_justify="left",
    )
    for name in ("devices", "on devices", "in host memory", "fullest device", "fits", "rows"):
        table.add_column(name, justify="right")
    for count in _counts(options.devices):
        held = _held_bytes(stores, count, budget)
        anew = any(manifest.num_shards % count for manifest in stores.values())
        table.add_row(
            str(count),
            format_bytes(sum(held)),
            format_bytes(total - sum(held)),
            format_bytes(max(held)),
            "yes" if sum(held) == total else "no",
            "dealt anew" if anew else "as stored",
        )
    console.print(table)
    fewest = _fewest_devices(stores, budget)
    if fewest is None:
        console.print(f"Even {_MOST_DEVICES} devices do not hold the data.")
    else:
        console.print(f"The fewest devices that hold the data: {fewest}")
    return 0


def _plan_windows(
    stores: dict[str, Manifest], counts: range, window: int | None, console: Console
) -> int:
    if window is not None and window < 1:
        raise ValueError(f"shuffle_window={window}: at least 1 row of a shard")
    total = sum(manifest.num_bytes for manifest in stores.values())
    table = Table(
        title=f"{format_bytes(total)} of {', '.join(stores)} read window by window: host memory for"
        " two windows",
        title_justify="left",
    )
    names = ("devices", "store", "rows a shard", "rows mixed", "one process", "each of as many")
    for name in (*names, "rows"):
        table.add_column(name, justify="left" if name == "store" else "right")
    for count in counts:
        consumers = Consumers((torch.device("cpu"),) * count)
        for split in _placed(stores, consumers, "stream", 0, window).splits.values():
            assert split.window is not None
            anew = split.num_shards != stores[split.split].num_shards
            table.add_row(
                str(count),
                split.split,
                f"{split.window:,}",
                f"{min(split.num_rows, split.window * split.num_shards):,}",
                format_bytes(2 * split.window_bytes(split.num_shards)),
                format_bytes(2 * split.window_bytes(split.num_shards // count)),
                "dealt anew" if anew else "as stored",
            )
    console.print(table)
    return 0


def _placed(
    stores: dict[str, Manifest],
    consumers: Consumers,
    residency: str,
    budget: int,
    window: int | None = None,
) -> Placement:
    with warnings.catch_warnings():
        # That rows are dealt anew for some counts is a column of the table.
        warnings.simplefilter("ignore")
        return plan_placement(
            stores,
            consumers,
            residency,
            budget_bytes=dict.fromkeys(consumers.data_devices, budget),
            pinned_budget_bytes=0,
            window=window,
        )


def _held_bytes(stores: dict[str, Manifest], count: int, budget: int) -> list[int]:
    """Bytes of shards on each of ``count`` devices under ``residency="auto"``."""
    devices = tuple(torch.device("cuda", index) for index in range(count))
    consumers = Consumers(devices)
    placement = _placed(stores, consumers, "auto", budget)
    held = [0] * count
    for split in placement.splits.values():
        sizes = shard_rows(split.num_rows, split.num_shards) * split.row_bytes
        for shard, residency in enumerate(split.residency):
            owner = consumers.owner(shard)
            if residency is Residency.DEVICE and owner is not None:
                held[owner] += int(sizes[shard])
    return held


def _fewest_devices(stores: dict[str, Manifest], budget: int) -> int | None:
    total = sum(manifest.num_bytes for manifest in stores.values())
    most = min(_MOST_DEVICES, *(manifest.num_rows for manifest in stores.values()))
    for count in range(max(1, -(-total // max(1, budget))), most + 1):
        if sum(_held_bytes(stores, count, budget)) == total:
            return count
    return None


def _counts(text: str) -> range:
    first, _, last = text.partition("..")
    try:
        counts = range(int(first), int(last or first) + 1)
    except ValueError:
        raise ValueError(f"devices={text!r}: write a count or a range, like 4 or 1..8") from None
    if not counts or counts[0] < 1:
        raise ValueError(f"devices={text!r}: counts start at 1, and the range must not be empty")
    return counts
