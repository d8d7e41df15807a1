"""``lightning-memmap store plan``: which device holds which rows, and how long a build takes."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_memmap.arguments import BriefParser
from lightning_memmap.commands.store_find import open_stores
from lightning_memmap.commands.store_options import add_dataset, make_function_parser
from lightning_memmap.commands.store_packs import describe_packs
from lightning_memmap.commands.store_placement import (
    Machine,
    describe_build,
    describe_texts,
    make_planned_manifest,
    parse_device_counts,
    plan_devices,
)
from lightning_memmap.commands.store_rates import (
    count_text_bytes,
    try_build,
    try_writing,
)
from lightning_memmap.host_memory import available_bytes
from lightning_memmap.store.directory import is_store
from lightning_memmap.store.paths import store_directory

_PATH_HELP = (
    "Directory of a store, or of one store per split. With --dataset or --row_bytes, the directory"
    " that the store will have: the trial writes to its disk, by default to a temporary folder."
)
_DATASET_HELP = (
    "The dataset: the name or path of its class. Some of its rows are stored for a trial."
)


def make_plan_parser() -> BriefParser:
    """Make the parser of ``store plan``."""
    parser = make_function_parser(plan, skip=("dataset", "path"))
    parser.add_argument("path", nargs="?", type=str, help=_PATH_HELP)
    add_dataset(parser, _DATASET_HELP)
    return parser


def plan(
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
    variable: list[str] | dict[str, int] | None = None,
    nullable: list[str] | None = None,
    pack: str | None = None,
) -> int:
    """Print which device would hold what, and how long a build takes.

    Args:
        rows: With --row_bytes, the number of rows; also needed for a dataset without a length.
        row_bytes: Bytes of a row, of data that isn't here.
        devices: Counts of devices, like 4 or 1..8.
        memory: Memory of one device, in bytes or with a unit such as GB or GiB.
        host_memory: Memory of the host; by default what is free on this one.
        memory_fraction: Fraction of both for shards, above 0 and at most 1.
        num_workers: Worker processes of the trial build.
        variable: With --dataset, fields that may differ in length: see store build.
        nullable: With --dataset, fields that may be None: see store build.
        pack: Plan packed sequences of a stored field too: its name and their length, such as
            tokens=2048.
    """
    machine = Machine.of(memory, host_memory or available_bytes(), memory_fraction)
    counts = parse_device_counts(devices)
    if pack is not None and (dataset is not None or row_bytes is not None):
        raise ValueError(f"pack={pack!r}: needs the lengths of a store: pass its directory alone")
    if dataset is not None and row_bytes is not None:
        raise ValueError(f"row_bytes={row_bytes}: --dataset measures them. Omit one of the two")
    if dataset is not None or row_bytes is not None:
        with _trial_folder(path) as folder:
            if row_bytes is None:
                trial = try_build(dataset, folder, rows, num_workers, variable, nullable)
            else:
                trial = try_writing(row_bytes, rows, folder)
        name = f"{trial.num_rows:,} rows of {trial.name}"
        table = plan_devices(
            {name: make_planned_manifest(trial.row_bytes, trial.num_rows)}, counts, machine
        )
        notes = [*describe_texts(trial.text_bytes * trial.num_rows), *describe_build(trial)]
    elif path is None:
        raise ValueError(
            "path is missing: pass the directory of a store. For data that isn't stored yet, pass"
            " --dataset, or --row_bytes and --rows"
        )
    elif rows is not None:
        raise ValueError(f"rows={rows}: needs --row_bytes, or a --dataset without a length")
    else:
        stores = open_stores(path)
        manifests = {name: store.manifest for name, store in stores.items()}
        table = plan_devices(manifests, counts, machine)
        notes = describe_texts(sum(map(count_text_bytes, manifests.values())))
        notes += [] if pack is None else describe_packs(stores, pack)
    Console(markup=False).print(replace(table, notes=[*table.notes, *notes]))
    return 0


@contextmanager
def _trial_folder(path: str | None) -> Iterator[Path]:
    """Yield the nearest existing folder above a store that isn't built yet, or a temporary one."""
    if path is None:
        with tempfile.TemporaryDirectory() as directory:
            yield Path(directory)
        return
    target = store_directory(path).absolute()
    if is_store(target):
        raise ValueError(f"path={path!r} is a store: omit --dataset and --row_bytes")
    yield next(folder for folder in target.parents if folder.is_dir())
