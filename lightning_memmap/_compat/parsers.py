"""What a parser of argparse knows, of which argparse has no public list."""

import argparse
import re
from collections.abc import Iterator, Mapping
from typing import Any


def arguments_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """List the arguments of a parser, without those that stand for further commands."""
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            yield action


def commands_of(parser: argparse.ArgumentParser) -> Mapping[str, Any]:
    """Find the parsers of the further commands of a parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action._name_parser_map
    return {}


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    """List the names of the arguments of a parser."""
    names = (name for action in arguments_of(parser) for name in action.option_strings)
    return [name.lstrip("-") for name in names]


def known_classes(parser: argparse.ArgumentParser) -> list[str]:
    """List the classes that values of a parser may have, of those that are imported."""
    values = (action for action in arguments_of(parser) if hasattr(action, "extra_help"))
    return re.findall(r"[\w.]+\.\w+", " ".join(str(action.extra_help()) for action in values))
