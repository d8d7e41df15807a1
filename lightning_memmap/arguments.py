"""Command-line parsers with errors of a line or two that suggest the nearest right name."""

import ast
import re
import sys
from argparse import Action
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from lightning_memmap._compat.parsers import commands_of, known_classes, options_of
from lightning_memmap.tables import printable

#: Messages of jsonargparse and Python about a wrong name; the groups give the name.
_WRONG_OPTION = re.compile(r"unrecognized arguments: -*([^\s=]+)|[Oo]ption '([^']+)'")
_WRONG_CHOICE = re.compile(r"invalid choice: '([^']+)' \(choose from (.+)\)")
_WRONG_ATTRIBUTE = re.compile(r"module '([^']+)' has no attribute '([^']+)'")
_WRONG_MODULE = re.compile(r"No module named '([^']+)'")
_WRONG_CLASS = re.compile(r"Expected a dot import path string: (\S+)")
_WRONG_FILE = re.compile(
    r"File does not exist: '([^']+)'"
    r"|Expected a path but (\S+\.(?:ya?ml|json)) either not accessible"
    r"|Problem with given class_path '(\S+\.(?:ya?ml|json))':\s+No module named"
)
#: Types, values to choose from, and what was given instead.
_EXPECTED = re.compile(
    r"Expected an? (?:<class '(?:\w+\.)*(\w+)'>|typing\.Literal\[(.+)\])(?:\. Got value: (.+))?"
)
#: The value where a class is expected.
_CLASS_VALUE = re.compile(r"(?:Got value: |Given value: |but got )(\{.*\})")
_BESIDE = "a class has a class_path and init_args, and nothing beside them"
#: What jsonargparse says of a value that is no class and no function, before the reason.
_NO_CALLABLE = re.compile(r"Type \S*Callable\[.*\] expects a function or a callable class: ")
_NO_SUBCLASS = re.compile(r"Import path (?:\S+ )?does not correspond to a subclass of (\w+)")
_IS_ABSTRACT = re.compile(r"Expected an instantiatable class, but (?:\S+ )?is abstract")
_CLASS_PATH = re.compile(r"class_path'?[:=] ?'([\w.]+)'")
#: Other messages in which it names types, and what to say.
_IN_WORDS = (
    (r'Parser key "([^"]+)":', r"\1:"),
    (r"Expected ('\S+') to be a subclass of <class '(\w+)'>", r"\1 is no subclass of \2"),
    (
        r"Expected ('\S+') to be a function that returns <class '(\w+)'>",
        r"\1 has no annotation that it returns a \2",
    ),
    (
        r"Expected ('\S+') to be a class that instantiates into callable.*",
        r"the objects of \1 cannot be called",
    ),
    (
        r"(?:Unexpected import object|Expected an import path or a subclass spec, but got) (.*)",
        r"\1 is no function and no class",
    ),
)
_NO_COMMAND = re.compile(r'expected "subcommand" to be one of .+ not provided\.')
_NO_ARGUMENT = re.compile(r"the following arguments are required: (.+)")
#: Lines of jsonargparse about a value that fits no type of a union, except the reason.
_NOISE = re.compile(
    r"Does not validate against|Subtypes:|Errors:|Given value|Expected a <class 'NoneType'>"
    r"|Expected a path but|Subclass types expect|Not a valid subclass|a (class path|dict) "
    r"|in \"<unicode string>\""
)
#: Datasets of other packages that come with imports, and that nobody stores.
_NOT_DATASETS = re.compile(r", (torch\.utils\.data\.(datapipes\.|\w+Pipe\b)|torchmetrics\.)[\w.]*")

#: A type as Python writes it.
_CLASS = re.compile(r"<class '(\w+)'>")


class BriefFormatter(DefaultHelpFormatter):
    """The help of jsonargparse, without marks of code and without classes that nobody means."""

    @override
    def _expand_help(self, action: Action) -> str:
        text = _NOT_DATASETS.sub("", super()._expand_help(action)).replace("`", "")
        return _CLASS.sub(r"\1", text).replace(", default: )", ")")


class BriefParser(ArgumentParser):
    """A parser that says what is wrong and suggests the nearest name, without printing its usage.

    Its subcommands, and the classes that are named in a config, have parsers of this class too.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": BriefFormatter, **kwargs})
        self._parser: ArgumentParser = self

    @override
    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the arguments, and note their command: not all errors tell it."""
        given, commands = (*args, kwargs.get("args"))[0], commands_of(self)
        words = sys.argv[1:] if given is None else given
        self._parser = commands.get(next(filter(commands.__contains__, words), ""), self)
        return super().parse_args(*args, **kwargs)

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Exit with code 2, or raise if the parser is part of another one."""
        parser = getattr(ex, "subcommand_parser", self)
        if match := _NO_ARGUMENT.search(message):
            # jsonargparse names those of a command after the command.
            command, _, name = match[1].partition(".")
            if command in commands_of(parser):
                message = message.replace(match[1], name)
        parser = self._parser if parser is self else parser
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


def read_config(path: str) -> Any:
    """Read a config that is given with ``--config``.

    Args:
        path: The file.

    Returns:
        What it holds, which has not been checked.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no yaml file.
    """
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        where = " ".join(str(error).split())
        raise ValueError(f"config={path!r} is no yaml file: {where}") from error


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


def print_error(error: BaseException) -> None:
    """Print an error to standard error, for the person at the terminal.

    Args:
        error: The error. Control codes of the terminal in its text are replaced.
    """
    text = str(error)
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        text = f"there is no file {str(error.filename)!r}{nearest_file(error.filename)}"
        if not (folder := Path(error.filename).parent).is_dir():
            text = f"there is no directory {str(folder)!r}{nearest_file(folder)}"
    print("error: " + "\n".join(map(printable, text.splitlines())), file=sys.stderr)


def nearest_file(path: str | Path) -> str:
    """A suggestion for a misspelt path: see `nearest`.

    Args:
        path: A path that does not exist.

    Returns:
        The suggestion, of the files and folders that lie where it would.
    """
    folder = Path(path).parent
    try:
        names = [str(folder / child.name) for child in folder.iterdir()]
    except OSError:
        return ""
    return nearest(str(Path(path)), names)


def nearest(name: str, names: Iterable[str]) -> str:
    """A suggestion for a misspelt name.

    Args:
        name: The name.
        names: The names that there are.

    Returns:
        ``; did you mean ...?`` with the nearest of the names, or an empty text if none is near.
    """
    folded = {other.casefold(): other for other in names}
    found = get_close_matches(name.casefold(), folded, n=1, cutoff=0.6)
    return f"; did you mean {folded[found[0]]!r}?" if found else ""


def with_suggestion(message: str, parser: ArgumentParser) -> str:
    """Add the name that may have been meant to an error message.

    Args:
        message: A message of jsonargparse.
        parser: The parser that it comes from, whose options are searched.

    Returns:
        The message, with a suggestion if there is one.
    """
    if "did you mean" in message or _BESIDE in message:
        # A parser within this one has added it.
        return message
    if stray := _beside_class_path(message):
        return f"{message.splitlines()[0]}\n{stray} stands beside class_path: {_BESIDE}"
    if message.startswith("Unexpected config:"):
        found = message.partition(":")[2].strip()
        what = f"has no options, only {found!r:.80}" if found else "is empty"
        return f"a config {what}: write names of options and their values"
    where = message.partition(":")[0]
    if _NO_COMMAND.search(message):
        return f"name a command: {', '.join(commands_of(parser))}"
    if match := _NO_ARGUMENT.search(message):
        return f"{match[1]} {'are' if ',' in match[1] else 'is'} missing"
    if match := _WRONG_OPTION.search(message):
        name = match[1] or match[2]
        if name == "class_path":
            return _BESIDE
        beside_class_path = nearest(name.partition(".")[0], ["init_args"])
        return message + (nearest(name, options_of(parser)) or beside_class_path)
    if match := _WRONG_CHOICE.search(message):
        return message + nearest(match[1], re.findall(r"[\w.-]+", match[2]))
    if match := _WRONG_ATTRIBUTE.search(message):
        near = nearest(match[2], dir(sys.modules.get(match[1])))
        return message.replace(match[0], match[0] + near)
    if match := _WRONG_FILE.search(message):
        path = match[1] or match[2] or match[3]
        return f"{where}:\nthere is no file {path!r}{nearest_file(path)}"
    if match := _WRONG_MODULE.search(message):
        return message.replace(match[0], match[0] + nearest(match[1], list(sys.modules)))
    if match := _WRONG_CLASS.search(message):
        names = [path.rpartition(".")[2] for path in known_classes(parser)]
        return f"{where}:\nthere is no class {match[1]!r}{nearest(match[1], names)}"
    return message


def _beside_class_path(message: str) -> str:
    """What is given beside the class_path of a class, and is none of its keys."""
    for match in _CLASS_VALUE.finditer(message):
        with suppress(SyntaxError, ValueError):
            found = ast.literal_eval(match[1])
            stray = [key for key in found if key not in ("class_path", "init_args", "dict_kwargs")]
            if "class_path" in found and stray:
                return ", ".join(map(repr, stray))
    return ""


def shortened(message: str, length: int = 600) -> str:
    """Reduce a message of jsonargparse to one line: where the mistake is, and the reasons.

    Args:
        message: A message of any number of lines.
        length: The most characters to keep.
    """
    lines = [line.strip().removeprefix("- ") for line in _without_other_members(message)]
    given = next((line[13:] for line in lines if line.startswith("Given value: ")), "")
    named = match[1] if (match := _CLASS_PATH.search(given)) else given
    parts: list[str] = []
    classes: list[str] = []
    where = 0
    expected: dict[str, None] = {}
    # Members of a union often fail for the same reason.
    for line in dict.fromkeys(lines):
        if not line or _NOISE.match(line):
            continue
        if match := _EXPECTED.fullmatch(line):
            choices = [match[1]] if match[1] else match[2].split(", ")
            expected |= dict.fromkeys(choice.strip("'") for choice in choices)
            given = match[3] or given
        elif _IS_ABSTRACT.match(line):
            return " ".join([*parts, f"{named!r} is abstract: name a class that is not"])
        elif match := _NO_SUBCLASS.match(line):
            # Before further reasons.
            where = where if classes else len(parts)
            classes.append(match[1])
        else:
            parts.append(_in_words(line))
    if classes:
        kinds = " and no ".join([*classes, *expected])
        parts.insert(where, f"{named!r} is no {kinds}" + ";" * (where < len(parts)))
    elif expected:
        *others, last = expected
        allowed = f"{', '.join(others)} or {last}" if others else last
        parts.append(f"must be {allowed}, not {given!r}{nearest(given, expected)}")
    elif len(parts) == 1 and parts[0].endswith(":"):
        # A value that fits no type of a union, without a reason: say what was given.
        parts.append(f"this cannot be {given!r}")
    text = " ".join(parts)
    return text if len(text) <= length else text[:length] + " ..."


def _in_words(line: str) -> str:
    """A line of jsonargparse, without the names of its types."""
    if _NO_CALLABLE.match(line):
        line = _NO_CALLABLE.sub("", line).partition(". Got value:")[0].rstrip(".")
    for pattern, words in _IN_WORDS:
        line = re.sub(pattern, words, line)
    return line


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
