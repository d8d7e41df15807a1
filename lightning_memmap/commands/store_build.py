"""``lightning-memmap store build`` and ``store append``."""

from inspect import signature
from typing import Any

from rich.console import Console

from lightning_memmap.arguments import BriefParser
from lightning_memmap.commands.store_check import print_info
from lightning_memmap.commands.store_options import add_dataset, make_function_parser
from lightning_memmap.store import append_store, build_part, build_store, finish_store

_DATASET_HELP = "The dataset: the name or path of its class."
_BUILD_FLAGS = {
    "overwrite": "Replace a store of another dataset.",
    "finish": "Complete a store when all of its parts are written.",
}
_PART_HELP = "Write part i of n, counted from 0, such as 0/8; then --finish."


def make_build_parser() -> BriefParser:
    """Make the parser of ``store build``."""
    parser = make_function_parser(build_store, flags=_BUILD_FLAGS, skip=("dataset", "progress"))
    add_dataset(parser, _DATASET_HELP)
    parser.add_argument("--part", type=str, metavar="i/n", help=_PART_HELP)
    return parser


def build(*, part: str | None, finish: bool, **options: Any) -> int:
    """Store a dataset."""
    if finish:
        _check_finish(part, options)
        store = finish_store(options["path"], overwrite=options["overwrite"])
    elif options["dataset"] is None:
        raise ValueError("dataset is missing: pass --dataset with the class path of the dataset")
    elif part is None:
        store = build_store(**options)
    else:
        build_part(part=_parse_part(part), **options)
        return 0
    print_info(store, Console(markup=False))
    return 0


def _check_finish(part: str | None, options: dict[str, Any]) -> None:
    """Check that ``--finish`` is used with the path and ``--overwrite`` alone."""
    defaults = {
        name: parameter.default for name, parameter in signature(build_store).parameters.items()
    }
    changed = {name for name, value in options.items() if value not in (None, defaults[name])}
    if part is not None:
        changed.add("part")
    if unused := changed - {"path", "overwrite"}:
        raise ValueError(
            f"--finish with --{min(unused)}: only the path and --overwrite can be set with --finish"
        )


def _parse_part(part: str) -> tuple[int, int]:
    index, _, count = part.partition("/")
    try:
        return int(index), int(count)
    except ValueError:
        raise ValueError(
            f"part={part!r}: must be a part and the number of parts, such as 0/8"
        ) from None


def make_append_parser() -> BriefParser:
    """Make the parser of ``store append``."""
    parser = make_function_parser(append_store, skip=("dataset", "progress"))
    add_dataset(parser, _DATASET_HELP, required=True)
    return parser


def append(**options: Any) -> int:
    """Add the rows of a dataset to a store."""
    print_info(append_store(**options), Console(markup=False))
    return 0
