"""Commands, options and classes of an argparse parser, which has no public list of them."""

import argparse
import re
from collections.abc import Mapping
from typing import Any


def commands_of(parser: argparse.ArgumentParser) -> Mapping[str, Any]:
    """Find the parsers of the further commands of a parser."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action._name_parser_map
    return {}


def option_names(parser: argparse.ArgumentParser) -> list[str]:
    """List the options of a parser, without dashes."""
    return [name.lstrip("-") for name in parser._option_string_actions]


def known_classes(parser: argparse.ArgumentParser) -> list[str]:
    """List the classes that values of a parser may have, of those that are imported."""
    values = (action for action in parser._actions if hasattr(action, "extra_help"))
    return re.findall(r"[\w.]+\.\w+", " ".join(str(action.extra_help()) for action in values))
