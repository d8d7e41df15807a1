"""``lightning-memmap store``: build, describe, check, plan for, show and copy stores."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from pathlib import Path
from textwrap import shorten
from typing import Any

from rich.console import Console
from torch.utils.data import Dataset

from lightning_memmap.arguments import BriefParser, print_error
from lightning_memmap.commands.store_page import section_of
from lightning_memmap.commands.store_plan import (
    Machine,
    describe_build,
    describe_texts,
    device_counts,
    plan_devices,
    planned_store,
)
from lightning_memmap.commands.store_rates import Trial, text_bytes_of, try_build, try_writing
from lightning_memmap.errors import MemmapError, StoreNotFoundError, nearest_file
from lightning_memmap.host_memory import available_bytes
from lightning_memmap.sizes import format_bytes
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
from lightning_memmap.store.building import unfinished_build
from lightning_memmap.store.directory import is_store, unknown_files
from lightning_memmap.store.manifest import MANIFEST
from lightning_memmap.store.places import StoreUrl, place_of, store_directory
from lightning_memmap.store.progress import show_progress
from lightning_memmap.store.remote.files import RemoteFiles
from lightning_memmap.tables import (
    check_page,
    make_table,
    printable,
    render_page,
    text,
    write_at_once,
)

#: The most letters of the names of classes.
_MAX_CLASSES_TEXT = 160
#: What is switched on without a value, and what that means.
_FLAGS = {
    "_build": {
        "overwrite": "Replace a store of another dataset.",
        "finish": "Put a store in place whose parts are all written.",
    },
    "_push": {"overwrite": "Replace stores that are there."},
    "_pull": {"overwrite": "Replace stores that are there."},
}
_PLANNED_PATH = (
    "Directory of a store, or of one store per split. With --dataset or --row_bytes, where the"
    " store will be: the trial writes to its disk, by default to a temporary folder."
)


def store_command(args: list[str]) -> int:
    """Run the command with these arguments."""
    parser = BriefParser(prog="lightning-memmap store", description="Work on stores.")
    commands = parser.add_subcommands()
    for name, function in _COMMANDS.items():
        summary = str(function.__doc__).partition("\n")[0]
        commands.add_subcommand(name, _make_parser(function), help=summary)
    config = parser.parse_args(list(map(_with_underscores, args)))
    options = parser.instantiate(config)[config.subcommand]
    try:
        return _COMMANDS[config.subcommand](**vars(options))
    except (MemmapError, OSError, ValueError, TypeError) as error:
        print_error(error)
        return 2


def _with_underscores(argument: str) -> str:
    """Accept ``--row-bytes`` for ``--row_bytes``: no option has a dash in its name."""
    name, equals, value = argument.partition("=")
    is_option = name.startswith("--")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if is_option else argument


def _make_parser(function: Callable[..., int]) -> BriefParser:
    """A parser for the arguments of a function, described by its docstring."""
    parser, flags = BriefParser(), _FLAGS.get(function.__name__, {})
    described = {"_build": build_store, "_append": append_store}.get(function.__name__, function)
    is_build, is_plan = described is not function, function is _plan
    own = ("dataset", "progress") * is_build + ("dataset", "path") * is_plan
    skip: set[str | int] = {*flags, *own}
    if is_plan:
        parser.add_argument("path", nargs="?", type=str, help=_PLANNED_PATH)
    parser.add_function_arguments(described, as_group=False, as_positional=True, skip=skip)
    if is_build or is_plan:
        parser.add_argument(
            "--dataset",
            type=Dataset,
            required=function is _append,
            help="The dataset: the name or path of its class."
            + " Some of its rows are stored for a trial." * is_plan,
        )
    if function is _build:
        part = "Write part i of n, counted from 0, such as 0/8; then --finish."
        parser.add_argument("--part", type=str, metavar="i/n", help=part)
    for flag, meaning in flags.items():
        parser.add_argument(f"--{flag}", action="store_true", help=meaning)
    return parser


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
        build_part(part=_part(part), **options)
        return 0
    print_info(store, Console(markup=False))
    return 0


def _append(**options: Any) -> int:
    """Add the rows of a dataset to a store."""
    print_info(append_store(**options), Console(markup=False))
    return 0


def _part(given: str) -> tuple[int, int]:
    index, _, count = given.partition("/")
    try:
        return int(index), int(count)
    except ValueError:
        raise ValueError(f"part={given!r}: write its number and that of all, like 0/8") from None


def _info(path: str) -> int:
    """Print what a store holds.

    Args:
        path: Directory or URL of a store, or of one store per split.
    """
    code = 0
    try:
        stores = stores_or_errors(path)
    except StoreNotFoundError:
        if unfinished_in(path):
            return 0
        raise
    for store in stores.values():
        if isinstance(store, Exception):
            print_error(store)
            code = 2
        else:
            print_info(store, Console(markup=False))
    return code


def _verify(path: str) -> int:
    """Check every byte of a store.

    Args:
        path: Directory or URL of a store, or of one store per split.
    """
    is_damaged = False
    for store in stores_or_errors(path).values():
        try:
            if isinstance(store, Exception):
                raise store
            with show_progress("verifying", sum(store.manifest.file_bytes.values()), 1) as advance:
                damages = verify_store(store.location, advance=advance)
        except (MemmapError, OSError) as error:
            print_error(error)
            is_damaged = True
            continue
        for damage in damages:
            _print(damage, "red")
        where, is_here = store.location, isinstance(place_of(store.location), Path)
        if damages and not is_here:
            _print(f"{where}: what is damaged in the cache is fetched again when it is next needed")
        for name in unknown_files(store.path, store.manifest) if is_here else ():
            _print(f"{where}: {name} is not part of the store and is never read")
        if not damages:
            _print(f"{where}: all {store.manifest.num_checksums} checksums match")
        is_damaged |= bool(damages)
    return int(is_damaged)


def _plan(
    path: str | None = None,
    *,
    dataset: Any = None,
    rows: int | None = None,
    row_bytes: int | None = None,
    devices: str = "1..8",
    memory: str = "80GiB",
    host_memory: str | None = None,
    memory_fraction: float = 0.7,
    num_workers: int = 0,
    variable: Mapping[str, Any] | None = None,
) -> int:
    """Print which device would hold what, and how long a build takes.

    Args:
        rows: With --row_bytes, the number of rows; also needed for a dataset without a length.
        row_bytes: Bytes of a row, of data that isn't here.
        devices: Counts of devices, like 4 or 1..8.
        memory: Memory of one device, in bytes or with a unit such as GB or GiB.
        host_memory: Memory of the host; by default what is free on this one.
        memory_fraction: Share of both that shards may take, above 0 and at most 1.
        num_workers: Worker processes of the trial build.
        variable: With --dataset, fields that differ in length or may be None: see store build.
    """
    machine = Machine.of(memory, host_memory or available_bytes(), memory_fraction)
    counts = device_counts(devices)
    if dataset is not None or row_bytes is not None:
        trial = _try(path, dataset, rows, row_bytes, num_workers, variable)
        name = f"{trial.num_rows:,} rows of {trial.name}"
        plan = plan_devices({name: planned_store(trial.row_bytes, trial.num_rows)}, counts, machine)
        texts = describe_texts(trial.text_bytes * trial.num_rows)
        plan = replace(plan, notes=[*plan.notes, *texts, *describe_build(trial)])
    elif path is None:
        raise ValueError(
            "path is missing: pass the directory of a store; or, where there is none yet,"
            " --dataset, or --row_bytes and --rows"
        )
    elif rows is not None:
        raise ValueError(f"rows={rows}: needs --row_bytes, or a --dataset without a length")
    else:
        manifests = {name: store.manifest for name, store in stores_in(path).items()}
        plan = plan_devices(manifests, counts, machine)
        texts = describe_texts(sum(map(text_bytes_of, manifests.values())))
        plan = replace(plan, notes=[*plan.notes, *texts])
    Console(markup=False).print(plan)
    return 0


def _try(
    path: str | None,
    dataset: Any,
    rows: int | None,
    row_bytes: int | None,
    num_workers: int,
    variable: Mapping[str, Any] | None,
) -> Trial:
    """Store some rows for a trial: of a dataset, or of so many bytes."""
    with _folder_for(path) as folder:
        if row_bytes is None:
            return try_build(
                dataset, folder, num_rows=rows, num_workers=num_workers, variable=variable
            )
        if dataset is not None:
            raise ValueError(f"row_bytes={row_bytes}: --dataset measures them; leave one out")
        if rows is None:
            raise ValueError(f"row_bytes={row_bytes}: --rows is missing, the number of rows")
        return try_writing(row_bytes, rows, folder)


@contextmanager
def _folder_for(path: str | None) -> Iterator[Path]:
    """Find the nearest folder above a store that isn't there yet, or make a temporary one."""
    if path is None:
        with tempfile.TemporaryDirectory() as directory:
            yield Path(directory)
        return
    place = store_directory(path).absolute()
    if is_store(place):
        raise ValueError(f"path={path!r} is a store: leave --dataset and --row_bytes out")
    yield next(folder for folder in place.parents if folder.is_dir())


def _show(path: str, *, out: str = "store.html") -> int:
    """Write a page with samples and sizes.

    Args:
        path: Directory of a store, or of one store per split.
        out: The HTML file. A page that this command has written before is replaced.
    """
    check_page("out", Path(out))
    sections = [section_of(name, store) for name, store in stores_in(path).items()]
    write_at_once(Path(out), render_page("samples.html", sections=sections).encode())
    _print(out)
    return 0


def _push(path: str, url: str, *, overwrite: bool = False) -> int:
    """Copy a store to a URL, such as s3://bucket/stores.

    Args:
        path: Directory of a store, or of one store per split.
        url: Where it goes.
        overwrite: Replace stores that are there.
    """
    for name, place in places_in(str(store_directory(path))).items():
        there = f"{url.rstrip('/')}/{name}" if name else url
        push_store(place, there, overwrite=overwrite)
        _print(there)
    return 0


def _pull(url: str, path: str, *, overwrite: bool = False) -> int:
    """Copy a store from a URL, and check every byte.

    Args:
        url: URL of a store, or of one store per split.
        path: The directory that it goes to.
        overwrite: Replace stores that are there.
    """
    for name, there in places_in(url).items():
        store = pull_store(str(there), Path(path) / name, overwrite=overwrite)
        _print(store.path)
    return 0


_COMMANDS: dict[str, Callable[..., int]] = {
    function.__name__[1:]: function
    for function in (_build, _append, _info, _verify, _plan, _show, _push, _pull)
}


def places_in(path: str) -> dict[str, Path | StoreUrl]:
    """The store at a path or URL, by an empty name, or those up to two levels below, by path."""
    place = place_of(path)
    if isinstance(place, StoreUrl):
        return {name: place / name if name else place for name in RemoteFiles(place).stores()}
    # Resolved, so that "." has a name.
    directory = Path(os.path.realpath(place))
    if os.path.lexists(directory / MANIFEST):
        return {"": directory}
    # The stores of several datasets of a split lie one level further down.
    manifests = [*directory.glob(f"*/{MANIFEST}"), *directory.glob(f"*/*/{MANIFEST}")]
    names = sorted(found.parent.relative_to(directory).as_posix() for found in manifests)
    names = [name for name in names if name[0] != "." and "/." not in name]
    if not names:
        near = "" if directory.exists() else nearest_file(path)
        raise StoreNotFoundError(f"no store at {directory}, nor in the folders in it{near}")
    for other in sorted(directory.glob("[!.]*/")):
        is_store = any(Path(name).parts[0] == other.name for name in names)
        if not is_store and not unfinished_in(str(other)):
            print(f"skipped {printable(other)}: it is not a store", file=sys.stderr)
    return {name: directory / name for name in names}


def unfinished_in(path: str) -> dict[str, str]:
    """The stores at a path or below it that are being built, or were, and what is there of them."""
    place = place_of(path)
    if isinstance(place, StoreUrl):
        return {}
    directory = Path(os.path.realpath(place))
    keys = (directory.glob(f"{below}g-*/*.json") for below in ("", "*/", "*/*/"))
    stores = sorted({key.parents[1] for each in keys for key in each})
    found = {str(store): unfinished_build(store) for store in stores}
    return {store: there for store, there in found.items() if there is not None}


def stores_in(path: str) -> dict[str, Store]:
    """The store at a path or the stores below it, by name."""
    stores = stores_or_errors(path)
    for found in stores.values():
        if isinstance(found, Exception):
            raise found
    return {name: store for name, store in stores.items() if isinstance(store, Store)}


def stores_or_errors(path: str) -> dict[str, Store | MemmapError | OSError]:
    """Like `stores_in`, with an error in place of a store below the path that cannot be read."""
    for unfinished, there in unfinished_in(path).items():
        _print(f"{unfinished}: {there}")
    found: dict[str, Store | MemmapError | OSError] = {}
    for name, place in places_in(path).items():
        try:
            found[name or str(place).rstrip("/").rpartition("/")[2]] = open_store(place)
        except (MemmapError, OSError) as error:
            if not name:
                raise
            found[name] = error
    return found


def print_info(store: Store, console: Console) -> None:
    """Print what a store holds."""
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
    labels = ("field", "dtype", "shape", "kind", "bytes per row", "bytes", "bytes per shard")
    rows = []
    for field, column in zip(store.schema.fields, manifest.columns, strict=True):
        row_bytes = column.mean_bytes(1)
        cells = (
            field.name,
            str(field.dtype).removeprefix("torch."),
            field.shape,
            field.kind,
            f"{row_bytes} on average" if field.num_variable else row_bytes,
            format_bytes(column.num_bytes),
            format_bytes(row_bytes * -(-store.num_rows // store.num_shards)),
        )
        rows.append([*map(text, cells)])
    console.print(make_table(labels, rows, labels[1:4]))


def _print(line: object, style: str = "") -> None:
    Console(markup=False).print(printable(line), style=style, soft_wrap=True)
