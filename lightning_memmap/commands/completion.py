"""``lightning-memmap completion``: what makes a shell complete the commands."""

import argparse
from collections.abc import Mapping
from typing import Any

from lightning_memmap._compat.parsers import arguments_of, commands_of
from lightning_memmap.arguments import BriefParser

#: What shtab makes scripts for.
SHELLS = ("bash", "zsh", "tcsh")


def completion_parser() -> BriefParser:
    """Make the parser of the command."""
    parser = BriefParser(
        prog="lightning-memmap completion",
        description="Print what makes a shell complete commands, options and the names of files."
        " For bash: lightning-memmap completion bash >"
        " ~/.local/share/bash-completion/completions/lightning-memmap",
    )
    parser.add_argument("shell", choices=SHELLS, help="The shell.")
    return parser


def completion_script(shell: str, parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """Make the script. Needs shtab.

    It has the names as they are now, so that a shell need not start Python, and import torch, to
    complete a word.

    Args:
        shell: One of `SHELLS`.
        parsers: The parser of each command.

    Raises:
        ValueError: shtab is not installed.
    """
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise ValueError(
            "completion needs shtab: pip install 'lightning_memmap[completion]'"
        ) from error
    root = argparse.ArgumentParser(prog="lightning-memmap")
    commands = root.add_subparsers()
    for name, parser in parsers.items():
        _copy(parser, commands.add_parser(name, help=name), shtab.FILE)
    script: str = shtab.complete(root, shell)
    return script


def _copy(parser: argparse.ArgumentParser, plain: argparse.ArgumentParser, file: Any) -> None:
    """Copy names and choices alone: types and defaults say nothing to a shell."""
    seen = {"-h", "--help"}
    for action in arguments_of(parser):
        names = [name for name in action.option_strings if name not in seen]
        seen.update(names)
        help_text = _first_words(action.help)
        if action.help == argparse.SUPPRESS or (action.option_strings and not names):
            continue
        if action.nargs == 0:
            plain.add_argument(*names, help=help_text, action="store_true")
        else:
            _complete(plain.add_argument(*(names or [action.dest]), help=help_text), action, file)
    if found := commands_of(parser):
        commands = plain.add_subparsers()
        for name, each in found.items():
            _copy(each, commands.add_parser(name, help=name), file)


def _complete(copied: Any, action: argparse.Action, file: Any) -> None:
    """Let a value be completed from its choices, or as the name of a file."""
    if action.choices:
        copied.choices = list(map(str, action.choices))
    else:
        copied.complete = file


def _first_words(text: str | None) -> str:
    return str(text or "").replace("%", "%%").partition(". ")[0][:80]
