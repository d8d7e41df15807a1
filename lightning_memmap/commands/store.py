"""``lightning-memmap store``: build, describe, check, plan for, show and copy stores."""

from collections.abc import Callable
from functools import partial

from lightning_memmap.arguments import BriefParser, print_error
from lightning_memmap.commands.store_build import (
    append,
    build,
    make_append_parser,
    make_build_parser,
)
from lightning_memmap.commands.store_check import info, verify
from lightning_memmap.commands.store_copy import pull, push
from lightning_memmap.commands.store_options import make_function_parser
from lightning_memmap.commands.store_plan import make_plan_parser, plan
from lightning_memmap.commands.store_show import show
from lightning_memmap.errors import MemmapError

_copy_parser = partial(make_function_parser, flags={"overwrite": "Replace existing stores."})
#: For each subcommand, the function that makes its parser.
_SUBCOMMANDS: dict[Callable[..., int], Callable[[], BriefParser]] = {
    build: make_build_parser,
    append: make_append_parser,
    info: partial(make_function_parser, info),
    verify: partial(make_function_parser, verify),
    plan: make_plan_parser,
    show: partial(make_function_parser, show),
    push: partial(_copy_parser, push),
    pull: partial(_copy_parser, pull),
}


def store_command(args: list[str]) -> int:
    """Run the command with these arguments."""
    parser = BriefParser(prog="lightning-memmap store", description="Work on stores.")
    subcommands = parser.add_subcommands()
    functions = {function.__name__: function for function in _SUBCOMMANDS}
    for name, function in functions.items():
        summary = str(function.__doc__).partition("\n")[0]
        subcommands.add_subcommand(name, _SUBCOMMANDS[function](), help=summary)
    config = parser.parse_args(list(map(_with_underscores, args)))
    options = parser.instantiate(config)[config.subcommand]
    try:
        return functions[config.subcommand](**vars(options))
    except (MemmapError, OSError, ValueError, TypeError) as error:
        print_error(error)
        return 2


def _with_underscores(argument: str) -> str:
    """Accept ``--row-bytes`` for ``--row_bytes``: no option has a dash in its name."""
    name, equals, value = argument.partition("=")
    is_option = name.startswith("--")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if is_option else argument
