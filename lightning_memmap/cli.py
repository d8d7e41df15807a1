"""The command ``lightning-memmap``.

``fit``, ``validate``, ``test`` and ``predict`` are LightningCLI with the strategy names of this
pack registered. ``store`` works on stores: ``build``, ``append``, ``info``, ``verify``, ``plan``,
``show``, ``push``, ``pull``.
``compare`` trains under several strategies and reports what each one costs; ``advise`` predicts it.
``rows`` lists the rows of any step, and ``doctor`` says what will work on this machine.
"""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal, NoReturn

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.strategies import StrategyRegistry
from rich.console import Console
from rich.table import Table
from torch.utils.data import Dataset
from typing_extensions import override

from lightning_memmap._compat.parsers import commands_of, known_classes
from lightning_memmap.arguments import (
    BriefParser,
    TrainingParser,
    imports_for_pages,
    nearest,
    nearest_file,
    print_error,
    printable,
)
from lightning_memmap.compare.advise_command import advise, advise_parser
from lightning_memmap.compare.command import compare, compare_parser
from lightning_memmap.completion import completion_parser, completion_script
from lightning_memmap.doctor import doctor, doctor_parser
from lightning_memmap.errors import DatasetError, MemmapError, StoreNotFoundError
from lightning_memmap.placement import format_bytes
from lightning_memmap.rows_command import rows, rows_parser
from lightning_memmap.schema import Field
from lightning_memmap.store import (
    Store,
    append_store,
    build_part,
    build_store,
    finish_store,
    open_store,
    pull_store,
    push_store,
    verify_store,
)
from lightning_memmap.store.places import StoreUrl, check_path, place_of
from lightning_memmap.store.progress import show_progress
from lightning_memmap.store.remote.transfer import stores_at
from lightning_memmap.store.verify import unknown_files
from lightning_memmap.store_plan import plan_devices, plan_images, plan_windows
from lightning_memmap.strategies import STRATEGIES

_DESCRIPTION = "Train with data that stays resident on every device."
_HELP = f"""usage: lightning-memmap COMMAND [arguments]

{_DESCRIPTION}

train, from a config (these are the commands of LightningCLI):
  fit         train, and validate in between
  validate    validate once
  test        test once
  predict     predict

before and after:
  store       build, describe, check, plan for, show and copy stores
  compare     train under several strategies: do they agree, and what does each cost?
  advise      predict which strategy is right for a model, its data and some devices
  rows        list the rows of any step
  doctor      say what will work on this machine
  completion  print what makes a shell complete these commands

lightning-memmap COMMAND --help describes a command. A first run:
  lightning-memmap fit --config examples/configs/digits.yaml"""

#: How a config begins that LightningCLI has saved.
_SAVED = b"# lightning.pytorch=="
#: The most letters of the names of classes.
_MAX_CLASSES_TEXT = 160


class SaveConfig(SaveConfigCallback):
    """Lightning's callback, for a user who runs the command more than once in a folder.

    Without a logger the config is saved in the user's own folder. There it takes the place of one
    that an earlier run saved, and of no other file: neither of one that somebody wrote, nor of one
    that this run was given.
    """

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        path = Path(trainer.log_dir or "") / self.config_filename
        if trainer.is_global_zero and not trainer.loggers and self._is_of_earlier_run(path):
            path.unlink()
        try:
            super().setup(trainer, pl_module, stage)
        except RuntimeError as error:
            if "to NOT exist" not in str(error):
                raise
            raise MisconfigurationException(
                f"the config of this run would be saved as {path}, which exists already:\n"
                "name another folder with --trainer.default_root_dir, or move that file"
            ) from error

    def _is_of_earlier_run(self, path: Path) -> bool:
        given = {os.path.realpath(str(config)) for config in self.config.get("config") or []}
        if self.already_saved or not path.is_file() or os.path.realpath(path) in given:
            return False
        with open(path, "rb") as file:
            return file.read(len(_SAVED)) == _SAVED


class TrainingCLI(LightningCLI):
    """LightningCLI that suggests the nearest name when a strategy is misspelt."""

    @override
    def before_instantiate_classes(self) -> None:
        strategy = self.config[self.subcommand].trainer.strategy
        names = ["auto", *StrategyRegistry.available_strategies()]
        if isinstance(strategy, str) and strategy.lower() not in names:
            parser = commands_of(self.parser)[str(self.subcommand)]
            classes = {path.rpartition(".")[2]: path for path in known_classes(parser)}
            near = nearest(strategy, [*names, *classes, *classes.values()])
            for name, path in classes.items():
                near = near.replace(repr(name), repr(path))
            ours = ", ".join(name for name, *_ in STRATEGIES)
            parser.error(
                f"trainer.strategy: unknown strategy {strategy!r}{near or '.'}"
                f" Those of this pack are {ours}"
            )


def main(args: Sequence[str] | None = None) -> None:
    """Run the command.

    A user's mistake ends it with a line or two on standard error.

    Args:
        args: The arguments after ``lightning-memmap``, by default those of the process.

    Raises:
        SystemExit: With code 1 or 2 after a user's mistake, 130 after Ctrl-C, and the code of
            ``store``, ``compare``, ``advise``, ``rows`` or
            ``doctor``.
    """
    try:
        try:
            _run(args)
        finally:
            # An error of flushing can be caught here, but not when the interpreter ends.
            sys.stdout.flush()
    except KeyboardInterrupt as interrupt:
        print(str(interrupt) or "interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of the output is gone: discard what is still in the buffer.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        reason = _reason(error)
        if not _is_mistake(reason):
            raise
        print_error(reason)
        sys.exit(1)


def _run(args: Sequence[str] | None) -> None:
    given = list(sys.argv[1:] if args is None else args)
    # A class_path may name a module in the working directory, as with `python -m`.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    commands = {
        "store": _store_command,
        "compare": compare,
        "advise": advise,
        "rows": rows,
        "doctor": doctor,
        "completion": _completion_command,
    }
    if given and given[0] in ("--help", "-h"):
        print(_HELP)
        sys.exit(0)
    if given and given[0] in commands:
        sys.exit(commands[given[0]](given[1:]))
    if given == ["--version"]:
        print(f"lightning-memmap {version('lightning_memmap')}")
        sys.exit(0)
    if not given:
        print(_HELP, file=sys.stderr)
        sys.exit(2)
    if given and not given[0].startswith("-") and given[0] not in TrainingCLI.subcommands():
        near = nearest(given[0], (*commands, *TrainingCLI.subcommands()))
        print(f"error: unknown command {given[0]!r}{near}", file=sys.stderr)
        print("lightning-memmap --help lists the commands", file=sys.stderr)
        sys.exit(2)
    TrainingCLI(
        args=None if args is None else given,
        parser_class=TrainingParser,
        save_config_callback=SaveConfig,
        parser_kwargs={"prog": "lightning-memmap", "description": _DESCRIPTION},
    )


def _is_mistake(error: BaseException) -> bool:
    """Whether the message of an error is enough for its user.

    It is when this package or the Trainer refuses an argument or a file. When a dataset or a
    module failed, its author wants the traceback.
    """
    if isinstance(error, DatasetError) and error.__cause__ is not None:
        return False
    if isinstance(error, (MemmapError, MisconfigurationException)):
        return True
    raisers = ("lightning_memmap", "lightning", "fsspec")
    return isinstance(error, (ValueError, OSError)) and _raiser(error) in raisers


def _reason(error: BaseException) -> BaseException:
    """The error that jsonargparse wrapped when it made an object of a config, or the error."""
    while _raiser(error) == "jsonargparse" and (inner := error.__cause__ or error.__context__):
        error = inner
    return error


def _raiser(error: BaseException) -> str:
    """The package that raised an error."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).partition(".")[0]


class CompletionCLI(TrainingCLI):
    """Prints what makes a shell complete words, in place of parsing and training."""

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> NoReturn:
        (shell,) = args
        others = {
            "store": _store_parser(),
            "compare": compare_parser(),
            "advise": advise_parser(),
            "rows": rows_parser(),
            "doctor": doctor_parser(),
            "completion": completion_parser(),
        }
        print(completion_script(shell, {**commands_of(parser), **others}))
        sys.exit(0)


def _completion_command(args: list[str]) -> NoReturn:
    shell = completion_parser().parse_args(args).shell
    CompletionCLI(parser_class=TrainingParser, args=[shell])
    raise AssertionError("LightningCLI did not parse its arguments")


def _store_parser() -> BriefParser:
    parser = BriefParser(prog="lightning-memmap store", description="Work on stores.")
    commands = parser.add_subcommands()
    for name, function in _store_functions().items():
        summary = str(function.__doc__).partition("\n")[0]
        commands.add_subcommand(name, _make_parser(function), help=summary)
    for command in commands_of(parser).values():
        command.prog = command.prog.replace(" [options]", "")
    return parser


def _store_functions() -> dict[str, Callable[..., int]]:
    return {
        "build": _build,
        "append": _append,
        "info": _info,
        "verify": _verify,
        "plan": _plan,
        "show": _show,
        "push": _push,
        "pull": _pull,
    }


def _store_command(args: list[str]) -> int:
    parser = _store_parser()
    config = parser.parse_args(args)
    options = parser.instantiate(config)[config.subcommand]
    try:
        return _store_functions()[config.subcommand](**vars(options))
    except (MemmapError, OSError, ValueError, TypeError) as error:
        print_error(error)
        return 2


def _make_parser(function: Callable[..., int]) -> BriefParser:
    """A parser for the arguments of a function, described by its docstring."""
    parser = BriefParser()
    if function is _append:
        skipped: set[str | int] = {"dataset", "progress"}
        parser.add_function_arguments(
            append_store, as_group=False, as_positional=True, skip=skipped
        )
        parser.add_argument(
            "--dataset", type=Dataset, required=True, help="class path of the dataset"
        )
        return parser
    if function in (_push, _pull):
        parser.add_function_arguments(
            function, as_group=False, as_positional=True, skip={"overwrite"}
        )
        parser.add_argument(
            "--overwrite", action="store_true", help="replace stores that are there"
        )
        return parser
    if function is not _build:
        parser.add_function_arguments(function, as_group=False, as_positional=True)
        return parser
    flags = {
        "overwrite": "replace a store of another dataset",
        "fresh": "resume no earlier build",
        "finish": "commit the store whose parts are all written",
    }
    skip: set[str | int] = {"dataset", "check", "progress", *flags}
    parser.add_function_arguments(build_store, as_group=False, as_positional=True, skip=skip)
    parser.add_argument("--dataset", type=Dataset, help="class path of the dataset")
    part = "write part i of n, counted from 0, such as 0/8; --finish commits all"
    parser.add_argument("--part", type=str, metavar="i/n", help=part)
    checks, meaning = Literal["probes", "full", "off"], "rows to compare with an existing store"
    parser.add_argument("--check", type=checks, default="probes", help=meaning)
    for flag, meaning in flags.items():
        parser.add_argument(f"--{flag}", action="store_true", help=meaning)
    return parser


def _make_console() -> Console:
    """A console without markup: the names of files and fields may look like it."""
    return Console(markup=False)


def _stores(path: str) -> dict[str, Store]:
    """The store at a path or the stores below it, by name.

    Raises:
        MemmapError: There is no store, or one cannot be read.
    """
    stores = {}
    for name, found in _stores_or_errors(path).items():
        if isinstance(found, Exception):
            raise found
        stores[name] = found
    return stores


def _stores_or_errors(path: str) -> dict[str, Store | MemmapError | OSError]:
    """Like `_stores`, with an error in place of a store below the path that cannot be read."""
    if isinstance(place_of(path), StoreUrl):
        try:
            return {path.rstrip("/").rpartition("/")[2]: open_store(path)}
        except StoreNotFoundError:
            return {name: open_store(url) for name, url in stores_at(path).items()}
    # Resolved, so that "." has a name.
    directory = Path(os.path.realpath(path))
    try:
        return {directory.name: open_store(directory)}
    except StoreNotFoundError as error:
        found: dict[str, Store | MemmapError | OSError] = {}
        others = []
        for child in _folders(directory):
            # The stores of several datasets of a split lie one level further down.
            opened = {path: _opened(path) for path in (child, *_folders(child))}
            stores = {path: store for path, store in opened.items() if store is not None}
            found |= {path.relative_to(directory).as_posix(): stores[path] for path in stores}
            if not stores:
                others.append(child)
        if not found:
            near = "" if directory.exists() else nearest_file(path)
            raise StoreNotFoundError(f"{error}{near}") from None
        for other in others:
            print(f"skipped {printable(other)}: it is not a store", file=sys.stderr)
        return found


def _opened(path: Path) -> Store | MemmapError | OSError | None:
    """The store at a path, why it cannot be opened, or None where there is none."""
    try:
        return open_store(path)
    except StoreNotFoundError:
        return None
    except (MemmapError, OSError) as error:
        return error


def _folders(directory: Path) -> list[Path]:
    """The folders in a directory, without hidden ones and what may not be looked into."""
    try:
        children = sorted(directory.iterdir()) if directory.is_dir() else []
    except PermissionError:
        return []
    return [child for child in children if child.is_dir() and not child.name.startswith(".")]


def _build(*, part: str | None, finish: bool, **options: Any) -> int:
    """Store a dataset."""
    defaults = {
        name: parameter.default for name, parameter in signature(build_store).parameters.items()
    }
    given = [name for name, value in options.items() if value not in (None, defaults[name])]
    if finish and (others := {*given, *["part"] * bool(part)} - {"path", "overwrite"}):
        raise ValueError(f"--finish with --{min(others)}: it takes the path, and --overwrite")
    if finish:
        store = finish_store(options["path"], overwrite=options["overwrite"])
    elif options["dataset"] is None:
        raise ValueError("--dataset is missing: give the class path of the dataset")
    elif part is None:
        store = build_store(**options)
    else:
        if others := {"check", "fresh"} & {*given}:
            raise ValueError(f"--part with --{min(others)}: a part goes on where it stopped")
        options = {name: value for name, value in options.items() if name not in ("check", "fresh")}
        build_part(part=_part(part), **options)
        return 0
    _print_info(store, _make_console())
    return 0


def _append(**options: Any) -> int:
    """Add the rows of a dataset to a store."""
    _print_info(append_store(**options), _make_console())
    return 0


def _part(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    try:
        return int(index), int(count)
    except ValueError:
        raise ValueError(f"part={text!r}: write its number and that of all, like 0/8") from None


def _info(path: str) -> int:
    """Print what a store holds.

    Args:
        path: Directory of a store, or of one store per split.
    """
    code = 0
    for store in _stores_or_errors(path).values():
        if isinstance(store, Exception):
            print_error(store)
            code = 2
        else:
            _print_info(store, _make_console())
    return code


def _print_info(store: Store, console: Console) -> None:
    manifest = store.manifest
    shard_bytes = manifest.shard_bytes()
    console.print(printable(store.location), style="bold", soft_wrap=True)
    console.print(
        f"{store.num_rows:,} rows, {format_bytes(manifest.num_bytes)},"
        f" {store.num_shards} shards of {format_bytes(shard_bytes.min())} to"
        f" {format_bytes(shard_bytes.max())}"
    )
    if store.classes:
        names = shorten(", ".join(store.classes), _MAX_CLASSES_TEXT, placeholder=" ...")
        console.print(f"{len(store.classes)} classes: {names}", soft_wrap=True)
    source = ", ".join(f"{key} {value}" for key, value in manifest.source.items())
    console.print(printable(f"from {source}"))
    table = Table()
    for name in ("field", "dtype", "shape", "given as"):
        table.add_column(name)
    for name in ("bytes per row", "bytes", "bytes per shard"):
        table.add_column(name, justify="right")
    for field, column in zip(store.schema.fields, manifest.columns, strict=True):
        num_bytes = column.num_bytes(range(store.num_rows))
        row_bytes = -(-num_bytes // store.num_rows)
        table.add_row(
            printable(field.name),
            str(field.dtype).removeprefix("torch."),
            str(field.shape),
            _given_as(field),
            str(row_bytes) if not field.num_variable else f"{row_bytes} on average",
            format_bytes(num_bytes),
            format_bytes(row_bytes * -(-store.num_rows // store.num_shards)),
        )
    console.print(table)


def _given_as(field: Field) -> str:
    """The kind of a field, with the members of an enum."""
    names = ", ".join(f"{name}={number}" for name, number in field.names)
    return (
        shorten(f"{field.kind}: {names}", _MAX_CLASSES_TEXT, placeholder=" ...")
        if names
        else field.kind
    )


def _verify(path: str) -> int:
    """Check every byte of a store.

    Args:
        path: Directory of a store, or of one store per split.
    """
    check_path(path)
    console = _make_console()
    damaged = False
    for store in _stores_or_errors(path).values():
        try:
            if isinstance(store, Exception):
                raise store
            with show_progress("verifying", store.manifest.num_bytes, 1) as advance:
                damages = verify_store(store.path, advance=advance)
        except (MemmapError, OSError) as error:
            print_error(error)
            damaged = True
            continue
        for damage in damages:
            console.print(printable(damage), style="red", soft_wrap=True)
        where = printable(store.path)
        for name in unknown_files(store.path, store.manifest):
            line = f"{where}: {printable(name)} is not part of the store and is never read"
            console.print(line, soft_wrap=True)
        if not damages:
            sums = store.num_shards * len(store.schema.fields)
            console.print(f"{where}: all {sums} checksums match", soft_wrap=True)
        damaged = damaged or bool(damages)
    return int(damaged)


def _plan(
    path: str,
    *,
    devices: str = "1..8",
    memory: str = "80GiB",
    memory_fraction: float = 0.7,
    residency: Literal["auto", "stream"] = "auto",
    shuffle_window: int | None = None,
    html: str | None = None,
) -> int:
    """Print which device would hold what.

    Args:
        path: Directory of a store, or of one store per split.
        devices: Counts of devices, like 4 or 1..8.
        memory: Memory of one device.
        memory_fraction: Share of it that shards may take.
        residency: auto, or stream for data larger than memory.
        shuffle_window: Rows of a shard in a window of stream.
        html: Where to write the table as a page, with bars.
    """
    opened = _stores(path)
    stores = {name: store.manifest for name, store in opened.items()}
    if residency == "stream":
        plans = [plan_windows(opened, devices, shuffle_window)]
    elif shuffle_window is not None:
        raise ValueError(f"shuffle_window={shuffle_window}: give residency='stream' to plan for it")
    else:
        plans = [plan_devices(stores, devices, memory, memory_fraction)]
        plans += plan_images(opened, memory, memory_fraction)
    console = _make_console()
    for plan in plans:
        table = Table(title=printable(plan.title), title_justify="left")
        for column in plan.columns:
            table.add_column(column.label, justify="left" if column.is_text else "right")
        for row in plan.rows:
            table.add_row(*(printable(cell.text) for cell in row))
        console.print(table)
        for note in plan.notes:
            console.print(note.text)
    if html is not None:
        with imports_for_pages():
            from lightning_memmap.pages import write_tables
        write_tables(Path(html), f"Where would {', '.join(stores)} be?", (), plans)
        console.print(html, soft_wrap=True)
    return 0


def _show(path: str, *, out: str = "store.html") -> int:
    """Write a page with samples, distributions and sizes.

    Args:
        path: Directory of a store, or of one store per split.
        out: The HTML file.
    """
    with imports_for_pages():
        from lightning_memmap.store_page import render_stores
    Path(out).write_text(render_stores(_stores(path)), encoding="utf-8")
    _make_console().print(out, soft_wrap=True)
    return 0


def _push(path: str, url: str, *, overwrite: bool = False) -> int:
    """Copy a store to a URL, such as s3://bucket/stores.

    Args:
        path: Directory of a store, or of one store per split.
        url: Where it goes.
        overwrite: Replace stores that are there.
    """
    directory = Path(os.path.realpath(path))
    for store in _stores(path).values():
        name = store.path.relative_to(directory).as_posix()
        there = url if name == "." else f"{url.rstrip('/')}/{name}"
        push_store(store.path, there, overwrite=overwrite)
        _make_console().print(printable(there), soft_wrap=True)
    return 0


def _pull(url: str, path: str, *, overwrite: bool = False) -> int:
    """Copy a store from a URL, and check every byte.

    Args:
        url: URL of a store, or of one store per split.
        path: The directory that it goes to.
        overwrite: Replace stores that are there.
    """
    for name, there in stores_at(url).items():
        store = pull_store(there, Path(path) / name, overwrite=overwrite)
        _make_console().print(printable(store.path), soft_wrap=True)
    return 0
