"""What a parser of argparse knows, of which argparse has no public list."""

import argparse
from collections.abc import Iterator, Mapping
from typing import Any


def arguments_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """List the arguments of a parser, without those that stand for further commands.

    Args:
        parser: The parser.

    Yields:
        The arguments, in the order in which they were added.
    """
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            yield action


def commands_of(parser: argparse.ArgumentParser) -> Mapping[str, Any]:
    """Find the parsers of the further commands of a parser.

    Args:
        parser: The parser.

    Returns:
        The parser of each command by name; none where it has no commands.
    """
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action._name_parser_map
    return {}
