"""``lightning-memmap store``: build, describe, check, plan for, show and copy stores."""

from collections.abc import Callable

from lightning_memmap.arguments import BriefParser, print_error
from lightning_memmap.commands.store_build import (
    append,
    build,
    make_append_parser,
    make_build_parser,
)
from lightning_memmap.commands.store_check import (
    info,
    make_info_parser,
    make_verify_parser,
    verify,
)
from lightning_memmap.commands.store_copy import (
    make_pull_parser,
    make_push_parser,
    pull,
    push,
)
from lightning_memmap.commands.store_plan import make_plan_parser, plan
from lightning_memmap.commands.store_show import make_show_parser, show
from lightning_memmap.errors import MemmapError

#: For each subcommand, its function and the function that makes its parser.
_SUBCOMMANDS: dict[str, tuple[Callable[..., int], Callable[[], BriefParser]]] = {
    "build": (build, make_build_parser),
    "append": (append, make_append_parser),
    "info": (info, make_info_parser),
    "verify": (verify, make_verify_parser),
    "plan": (plan, make_plan_parser),
    "show": (show, make_show_parser),
    "push": (push, make_push_parser),
    "pull": (pull, make_pull_parser),
}


def store_command(args: list[str]) -> int:
    """Run the command with these arguments."""
    parser = BriefParser(prog="lightning-memmap store", description="Work on stores.")
    subcommands = parser.add_subcommands()
    for name, (function, make_parser) in _SUBCOMMANDS.items():
        summary = str(function.__doc__).partition("\n")[0]
        subcommands.add_subcommand(name, make_parser(), help=summary)
    config = parser.parse_args(list(map(_with_underscores, args)))
    options = parser.instantiate(config)[config.subcommand]
    function, _ = _SUBCOMMANDS[config.subcommand]
    try:
        return function(**vars(options))
    except (MemmapError, OSError, ValueError, TypeError) as error:
        print_error(error)
        return 2


def _with_underscores(argument: str) -> str:
    """Accept ``--row-bytes`` for ``--row_bytes``: no option has a dash in its name."""
    name, equals, value = argument.partition("=")
    is_option = name.startswith("--")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if is_option else argument
