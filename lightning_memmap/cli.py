"""The command ``lightning-memmap``.

``fit``, ``validate``, ``test`` and ``predict`` are LightningCLI with the strategy names of this
pack registered. ``store`` works on stores: ``build``, ``info``, ``verify``, ``plan``. ``compare``
trains under several strategies and tells what each one costs; ``advise`` predicts that.
"""

import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import lightning as L
import torch
from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from lightning.pytorch.strategies import StrategyRegistry
from rich.console import Console
from rich.table import Table
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_memmap.arguments import BriefParser, TrainingParser, nearest
from lightning_memmap.compare import advise, compare
from lightning_memmap.errors import DatasetError, MemmapError, StoreNotFoundError
from lightning_memmap.placement import (
    DataTopology,
    Placement,
    Residency,
    SplitSize,
    format_bytes,
    parse_bytes,
    plan_placement,
)
from lightning_memmap.store import Store, build_store, open_store, verify_store
from lightning_memmap.store.manifest import Manifest
from lightning_memmap.store.progress import show_progress
from lightning_memmap.store.verify import unknown_files
from lightning_memmap.strategies import STRATEGIES

_DESCRIPTION = """Train with data that stays resident on every device.
"lightning-memmap store --help" lists what can be done with stores, and
"lightning-memmap compare --help" how strategies are compared, and
"lightning-memmap advise --help" how to ask which one is right."""


_MOST_DEVICES = 4096


class SaveConfig(SaveConfigCallback):
    """Lightning's, with a way out that a command line has where the file is there.

    It is not overwritten: without a logger it is a file of the folder that the user stands in, and
    may be the very config that was given.
    """

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        try:
            super().setup(trainer, pl_module, stage)
        except RuntimeError as error:
            if "to NOT exist" not in str(error):
                raise
            path = Path(trainer.log_dir or "") / self.config_filename
            raise MisconfigurationException(
                f"the config of this run would be saved as {path}, which is there already:\n"
                "name another folder with --trainer.default_root_dir, or move that file"
            ) from error


class TrainingCLI(LightningCLI):
    """LightningCLI that knows the names of all strategies when one is misspelt."""

    @override
    def before_instantiate_classes(self) -> None:
        strategy = self.config[self.subcommand].trainer.strategy
        names = ["auto", *StrategyRegistry.available_strategies()]
        if isinstance(strategy, str) and strategy.lower() not in names:
            ours = ", ".join(name for name, *_ in STRATEGIES)
            self.parser.error(
                f"trainer.strategy: {strategy!r} is no strategy{nearest(strategy, names) or '.'}"
                f" Those of this pack are {ours}"
            )


def main(args: Sequence[str] | None = None) -> None:
    """Run the command with these arguments, by default those of the process.

    A user's mistake ends it with a line or two and exit code 1 or 2, Ctrl-C with 130.
    """
    try:
        try:
            _run(args)
        finally:
            # Here, where it can be caught, and not when the interpreter ends.
            sys.stdout.flush()
    except KeyboardInterrupt as interrupt:
        print(str(interrupt) or "interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read the output has seen enough. What is still in the buffer goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        reason = _reason(error)
        if not _is_mistake(reason):
            raise
        print(f"error: {reason}", file=sys.stderr)
        sys.exit(1)


def _run(args: Sequence[str] | None) -> None:
    given = list(sys.argv[1:] if args is None else args)
    # A class_path may name a module of the folder the user stands in, as with `python -m`.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    commands = {"store": _store_command, "compare": compare, "advise": advise}
    if given and given[0] in commands:
        sys.exit(commands[given[0]](given[1:]))
    if given and not given[0].startswith("-") and given[0] not in TrainingCLI.subcommands():
        near = nearest(given[0], (*commands, *TrainingCLI.subcommands()))
        print(f"error: there is no command {given[0]!r}{near}", file=sys.stderr)
        print("lightning-memmap --help lists what there is", file=sys.stderr)
        sys.exit(2)
    TrainingCLI(
        args=None if args is None else given,
        parser_class=TrainingParser,
        save_config_callback=SaveConfig,
        parser_kwargs={"description": _DESCRIPTION},
    )


def _is_mistake(error: BaseException) -> bool:
    """Whether an error tells a user what to do otherwise, so that its traceback tells nothing: one
    of this package or the Trainer that refuse an argument, or a file. Where a dataset or a module
    failed, its author wants the traceback."""
    if isinstance(error, DatasetError) and error.__cause__ is not None:
        return False
    if isinstance(error, (MemmapError, MisconfigurationException)):
        return True
    raisers = ("lightning_memmap", "lightning", "fsspec")
    return isinstance(error, (ValueError, OSError)) and _raiser(error) in raisers


def _reason(error: BaseException) -> BaseException:
    """What jsonargparse met where it made an object of a config, and wrapped; else the error."""
    while _raiser(error) == "jsonargparse" and (inner := error.__cause__ or error.__context__):
        error = inner
    return error


def _raiser(error: BaseException) -> str:
    """The package that raised an error."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def _store_command(args: list[str]) -> int:
    parser = BriefParser(prog="lightning-memmap store", description="Work on stores.")
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
        _print_error(error)
        return 2


def _print_error(error: Exception) -> None:
    print("error: " + "\n".join(map(_printable, str(error).splitlines())), file=sys.stderr)


def _build_parser() -> BriefParser:
    parser = BriefParser()
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


def _path_parser() -> BriefParser:
    parser = BriefParser()
    parser.add_argument("path", type=str, help="directory of a store, or of one store per split")
    return parser


def _plan_parser() -> BriefParser:
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
    """The store at a path, or those one level below it, by name.

    Raises:
        MemmapError: One of them cannot be read, or there is none.
    """
    stores = {}
    for name, found in _stores_or_errors(path).items():
        if isinstance(found, Exception):
            raise found
        stores[name] = found
    return stores


def _stores_or_errors(path: str) -> dict[str, Store | MemmapError | OSError]:
    """As `_stores`, with the reason in place of a store below the path that cannot be read."""
    # Resolved, so that "." has a name.
    directory = Path(os.path.realpath(path))
    try:
        return {directory.name: open_store(directory)}
    except StoreNotFoundError:
        found: dict[str, Store | MemmapError | OSError] = {}
        others = []
        for child in sorted(directory.iterdir()) if directory.is_dir() else []:
            if child.is_dir() and not child.name.startswith("."):
                try:
                    found[child.name] = open_store(child)
                except StoreNotFoundError:
                    others.append(child)
                except (MemmapError, OSError) as error:
                    found[child.name] = error
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
    code = 0
    for store in _stores_or_errors(options.path).values():
        if isinstance(store, Exception):
            _print_error(store)
            code = 2
        else:
            _print_info(store, console)
    return code


def _print_info(store: Store, console: Console) -> None:
    manifest = store.manifest
    shard_bytes = manifest.shard_bytes()
    console.print(_printable(store.path), style="bold", soft_wrap=True)
    console.print(
        f"{store.num_rows:,} rows, {format_bytes(manifest.num_bytes)},"
        f" {store.num_shards} shards of {format_bytes(shard_bytes.min())} to"
        f" {format_bytes(shard_bytes.max())}"
    )
    source = ", ".join(f"{key} {value}" for key, value in manifest.source.items())
    console.print(_printable(f"from {source}"))
    table = Table()
    for name in ("field", "dtype", "shape", "given as"):
        table.add_column(name)
    for name in ("bytes per row", "bytes", "bytes per shard"):
        table.add_column(name, justify="right")
    for field in store.schema.fields:
        table.add_row(
            _printable(field.name),
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
    for store in _stores_or_errors(options.path).values():
        try:
            if isinstance(store, Exception):
                raise store
            with show_progress("verifying", store.manifest.num_bytes, 1) as advance:
                damages = verify_store(store.path, advance=advance)
        except (MemmapError, OSError) as error:
            _print_error(error)
            damaged = True
            continue
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
        title=f"{format_bytes(total)} of {_printable(', '.join(stores))} on devices of"
        f" {format_bytes(memory)}, {format_bytes(budget)} of each for shards",
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
            "re-striped" if anew else "as stored",
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
        title=f"{format_bytes(total)} of {_printable(', '.join(stores))} read window by window:"
        " host memory for two windows",
        title_justify="left",
    )
    names = ("devices", "store", "rows a shard", "rows mixed", "one process", "each of as many")
    for name in (*names, "rows"):
        table.add_column(name, justify="left" if name == "store" else "right")
    for count in counts:
        topology = DataTopology((torch.device("cpu"),) * count)
        for name, split in _placed(stores, topology, "stream", 0, window).splits.items():
            num_rows, num_shards = split.shards.num_rows, split.shards.num_shards
            anew = num_shards != stores[name].num_shards
            table.add_row(
                str(count),
                _printable(name),
                f"{split.size.window:,}",
                f"{min(num_rows, split.size.window * num_shards):,}",
                format_bytes(2 * split.window_bytes(num_shards)),
                format_bytes(2 * split.window_bytes(num_shards // count)),
                "re-striped" if anew else "as stored",
            )
    console.print(table)
    return 0


def _placed(
    stores: dict[str, Manifest],
    topology: DataTopology,
    residency: str,
    budget: int,
    window: int | None = None,
) -> Placement:
    with warnings.catch_warnings():
        # That rows are dealt anew for some counts is a column of the table.
        warnings.simplefilter("ignore")
        sizes = {
            name: SplitSize.of(name, manifest, topology, window=window)
            for name, manifest in stores.items()
        }
        return plan_placement(
            sizes,
            topology,
            residency,
            budget_bytes=dict.fromkeys(topology.data_devices, budget),
            pinned_budget_bytes=0,
        )


def _held_bytes(stores: dict[str, Manifest], count: int, budget: int) -> list[int]:
    """Bytes of shards on each of ``count`` devices under ``residency="auto"``."""
    devices = tuple(torch.device("cuda", index) for index in range(count))
    held = [0] * count
    for shards in _placed(stores, DataTopology(devices), "auto", budget).held():
        if shards.residency is Residency.DEVICE:
            held[shards.device_index] += shards.num_bytes
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
