"""Command-line parsers with errors of a line or two that suggest the nearest right name."""

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

#: Messages of jsonargparse and Python about a wrong name; the groups give the name.
_WRONG_OPTION = re.compile(r"unrecognized arguments: -*([^\s=]+)|[Oo]ption '([^']+)'")
_WRONG_CHOICE = re.compile(r"invalid choice: '([^']+)' \(choose from (.+)\)")
_WRONG_ATTRIBUTE = re.compile(r"module '([^']+)' has no attribute '([^']+)'")
_WRONG_MODULE = re.compile(r"No module named '([^']+)'")
#: Lines of jsonargparse about a value that fits no type of a union, except the reason.
_NOISE = re.compile(
    r"Does not validate against|Subtypes:|Errors:|Given value|Expected a <class 'NoneType'>"
    r"|Subclass types expect|Not a valid subclass|a (class path|dict) |in \"<unicode string>\""
)


class BriefParser(ArgumentParser):
    """A parser that says what is wrong and suggests the nearest name, without printing its usage.

    Its subcommands, and the classes that are named in a config, have parsers of this class too.
    """

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Exit with code 2, or raise if the parser is part of another one."""
        parser = getattr(ex, "subcommand_parser", self)
        message = with_suggestion(message, parser)
        if not self.exit_on_error:
            super().error(message, ex)
        print(f"error: {shortened(message)}", file=sys.stderr)
        help_of = parser.prog.replace(" [options]", "")
        print(f"{help_of} --help lists the arguments", file=sys.stderr)
        sys.exit(2)

    @override
    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Namespace:
        """Parse a file.

        Raises:
            TypeError: The file is not UTF-8.
        """
        try:
            parsed: Namespace = super().parse_path(path, *args, **kwargs)
        except UnicodeDecodeError as error:
            raise TypeError(f"{str(path)!r} is not a text file in UTF-8: {error}") from error
        return parsed


class TrainingParser(BriefParser, LightningArgumentParser):
    """The parser of LightningCLI, with errors of a line or two."""


def refuse_several_configs(args: Iterable[str]) -> None:
    """Check the arguments of a command that would use only the last of several ``--config``.

    Args:
        args: The arguments of the command line.

    Raises:
        ValueError: ``--config`` is given more than once.
    """
    count = sum(arg.partition("=")[0] == "--config" for arg in args)
    if count > 1:
        raise ValueError(
            f"--config is given {count} times, and only one file is read: merge them with"
            " lightning-memmap fit --config ONE --config OTHER --print_config > merged.yaml"
        )


@contextmanager
def imports_for_pages() -> Iterator[None]:
    """Import in this block what makes pages of HTML.

    Raises:
        ValueError: A package is missing that only pages need.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("jinja2", "PIL"):
            raise
        raise ValueError(
            f"the page needs {error.name}: pip install 'lightning_memmap[compare]'"
        ) from error


def nearest(name: str, names: Iterable[str]) -> str:
    """A suggestion for a misspelt name.

    Args:
        name: The name.
        names: The names that there are.

    Returns:
        ``; did you mean ...?`` with the nearest of the names, or an empty text if none is near.
    """
    found = get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; did you mean {found[0]!r}?" if found else ""


def with_suggestion(message: str, parser: ArgumentParser) -> str:
    """Add the name that may have been meant to an error message.

    Args:
        message: A message of jsonargparse.
        parser: The parser that it comes from, whose options are searched.

    Returns:
        The message, with a suggestion if there is one.
    """
    if "did you mean" in message:
        # A parser within this one has added it.
        return message
    if message.startswith("Unexpected config:"):
        found = message.partition(":")[2].strip()
        what = f"has no options, only {found!r:.80}" if found else "is empty"
        return f"a config {what}: write names of options and their values"
    if match := _WRONG_OPTION.search(message):
        options = set(parser.get_defaults(skip_validation=True).keys())
        return message + nearest(match[1] or match[2], options)
    if match := _WRONG_CHOICE.search(message):
        return message + nearest(match[1], re.findall(r"[\w.-]+", match[2]))
    if match := _WRONG_ATTRIBUTE.search(message):
        near = nearest(match[2], dir(sys.modules.get(match[1])))
        return message.replace(match[0], match[0] + near)
    if match := _WRONG_MODULE.search(message):
        return message.replace(match[0], match[0] + nearest(match[1], list(sys.modules)))
    return message


def shortened(message: str, length: int = 600) -> str:
    """Reduce a message of jsonargparse to one line: where the mistake is, and the reasons.

    Args:
        message: A message of any number of lines.
        length: The most characters to keep.

    Returns:
        The line.
    """
    lines = [line.strip().removeprefix("- ") for line in _without_other_members(message)]
    kept = [line for line in lines if line and not _NOISE.match(line)]
    # A value that fits no type of a union, without a reason: say what was given.
    if len(kept) == 1 and kept[0].endswith(":"):
        kept += [line for line in lines if line.startswith("Given value:")]
    # Members of a union often fail for the same reason.
    text = " ".join(dict.fromkeys(kept))
    return text if len(text) <= length else text[:length] + " ..."


def _without_other_members(message: str) -> list[str]:
    """The lines of a message, without what the other members of a union say of a value of which one
    member says that there is a problem within it."""
    lines: list[str] = []
    problems: list[int] = []
    is_dropped = False
    for line in message.splitlines():
        indent = len(line) - len(line.lstrip())
        if not is_dropped or indent <= problems[-1]:
            problems = [problem for problem in problems if problem <= indent]
            is_dropped = bool(problems) and problems[-1] == indent
        if is_dropped:
            continue
        lines.append(line)
        if line.lstrip().startswith("- Problem with"):
            problems.append(indent)
    return lines
