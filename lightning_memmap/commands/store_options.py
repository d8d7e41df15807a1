"""Options that several subcommands of ``lightning-memmap store`` have."""

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from torch.utils.data import Dataset

from lightning_memmap.arguments import BriefParser
from lightning_memmap.tables import printable


def make_function_parser(
    function: Callable[..., Any],
    *,
    flags: Mapping[str, str] | None = None,
    skip: tuple[str, ...] = (),
) -> BriefParser:
    """Make a parser for the arguments of a function. A flag takes no value."""
    parser = BriefParser()
    flags = flags or {}
    skipped: set[str | int] = {*flags, *skip}
    parser.add_function_arguments(function, as_group=False, as_positional=True, skip=skipped)
    for flag, meaning in flags.items():
        parser.add_argument(f"--{flag}", action="store_true", help=meaning)
    return parser


def add_dataset(parser: BriefParser, help_text: str, required: bool = False) -> None:
    """Add ``--dataset`` to a parser."""
    action = parser.add_argument("--dataset", type=Dataset, required=required, help=help_text)
    # A dataset's own arguments need no type hints.
    action.sub_add_kwargs = {"fail_untyped": False}


def print_line(line: object, style: str = "") -> None:
    """Print a line without breaking it."""
    Console(markup=False).print(printable(line), style=style, soft_wrap=True)
