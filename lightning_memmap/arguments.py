"""Command-line parsers with errors of a line or two that suggest the nearest right name."""

import inspect
import re
import sys
import traceback
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
import yaml
from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser  # type: ignore[attr-defined]
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from lightning_memmap._compat.parsers import commands_of, known_classes, option_names
from lightning_memmap.errors import DatasetError, MemmapError, nearest, nearest_file
from lightning_memmap.tables import printable

#: Messages of jsonargparse and Python about a wrong name.
_WRONG_OPTION = re.compile(r"unrecognized arguments: -*([^\s=]+)|[Oo]ption '([^']+)'")
_WRONG_CHOICE = re.compile(r"invalid choice: '([^']+)' \(choose from (.+)\)")
_WRONG_LITERAL = re.compile(r"Expected a typing\.Literal\[(.+)\]\. Got value: (.+)")
_WRONG_FILE = re.compile(
    r"File does not exist: '([^']+)'"
    r"|Expected a path but (\S+\.(?:ya?ml|json)) either not accessible or invalid"
    r"|Problem with given class_path '(\S+\.(?:ya?ml|json))':\s+No module named \S+"
)
_WRONG_CLASS = re.compile(
    r"class_path '([^']+)':\s+(?:No module named|module '\S+' has no attribute) '[^']+'"
    r"|Expected a dot import path string: (\S+)"
)
_NO_CLASS = re.compile(r"Expected an instantiatable class, but (\S+) is abstract")
_NO_DATASET = re.compile("does not correspond to a subclass of Dataset")
#: Lines of jsonargparse about a value that fits no type of a union, except the reasons.
_NOISE = re.compile(
    r"Does not val|Subtypes|Errors:|Given value|Subclass types|a class path|a dict with"
    r"|Expected a path but|.*NoneType'>"
)
#: Arguments of a fit that are its config, or a part of it.
_OF_CONFIG = re.compile(r"--(config|seed_everything|model|data|trainer|optimizer|lr_scheduler)\b")
#: What a type says that knows nothing of a value.
_ANOTHER_KIND = re.compile(r"Expected (a <class|a typing|an inst)|give the class_path")
_CALLABLE = re.compile(r"Type collections\S.* expects a function or a callable class: ")


class BriefParser(ArgumentParser):
    """A parser that says what is wrong and suggests the nearest name, without its usage."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # A beginning that is unique now need not be so in the next version.
        super().__init__(*args, **kwargs, allow_abbrev=False)
        self._parser: ArgumentParser = self

    @override
    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the arguments, and note their command: not all errors tell it."""
        given, commands = (*args, kwargs.get("args"))[0], commands_of(self)
        words = sys.argv[1:] if given is None else given
        self._parser = commands.get(next(filter(commands.__contains__, words), ""), self)
        return super().parse_args(*args, **kwargs)

    def parse_config(self, config: Any) -> Any:
        """Parse a config that is a dict of values."""
        try:
            return self.parse_object(config)
        except ArgumentError as error:
            raise ValueError(f"config: {first_reason(str(error))}") from error

    @override
    def instantiate(self, *args: Any, **kwargs: Any) -> Any:
        """Make the objects of a config, or raise what a strategy raised."""
        # The Trainer takes a name or a strategy, and jsonargparse says only that it is no name.
        raised: list[Exception] = []

        def make(kind: type[Strategy], *args: Any, **kwargs: Any) -> Strategy:
            try:
                return kind(*args, **kwargs)
            except Exception as error:
                raised.append(error)
                raise

        try:
            return super().instantiate(*args, instantiators=[(make, Strategy, True)], **kwargs)
        except ValueError as error:
            raise (raised or [error])[0]  # noqa: B904

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Exit with code 2, or raise if the parser is part of another one."""
        parser = self._parser
        message = with_suggestion(message, parser)
        if not self.exit_on_error:
            super().error(message, ex)
        print(f"error: {first_reason(message)}", file=sys.stderr)
        help_of = parser.prog.replace(" [options]", "")
        print(f"{help_of} --help lists the arguments", file=sys.stderr)
        sys.exit(2)


class TrainingParser(BriefParser, LightningArgumentParser):
    """The parser of LightningCLI, with errors of a line or two."""


def training_parser(**options: Any) -> TrainingParser:
    """Make the parser of a LightningCLI, whose own ``parser_class`` came after 2.5.0."""
    options.setdefault("dump_header", [f"lightning.pytorch=={version('lightning')}"])
    parser = TrainingParser(**options)
    config_help = "Path to a configuration file in json or yaml format."
    parser.add_argument("-c", "--config", action=ActionConfigFile, help=config_help)
    return parser


def refuse_overrides(args: Iterable[str]) -> None:
    """Check the arguments of a command that reads one config, as it is."""
    given = [arg for arg in args if _OF_CONFIG.match(arg)]
    if len(given) > 1:
        raise ValueError(
            f"{' and '.join(given)}: one file is read, as it is; merge them with lightning-memmap"
            " fit --config ONE --config OTHER --model.lr 0.1 --print_config > merged.yaml"
        )


def read_config(path: str, *sections: str) -> dict[str, Any]:
    """Read the config of a fit, which must have some sections."""
    try:
        config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        where = " ".join(str(error).split())
        raise ValueError(f"config={path!r} is no yaml file: {where}") from error
    found = config if isinstance(config, dict) else {}
    found = found if sections[0] in found else found.get("fit") or {}
    for name in sections:
        if not isinstance(found, dict) or not isinstance(found.get(name), dict):
            raise ValueError(
                f"config={path!r}: it has no section {name!r} with a class_path; give the config of"
                " a fit"
            )
    return found


def print_error(error: BaseException) -> None:
    """Print an error to standard error, for the person at the terminal."""
    cause = error.__cause__
    if isinstance(error, DatasetError) and not isinstance(cause, MemmapError | None):
        # Of the user's own code.
        traceback.print_exception(cause)
    text = str(error)
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        text = f"there is no file {str(error.filename)!r}{nearest_file(error.filename)}"
        if not (folder := Path(error.filename).parent).is_dir():
            text = f"there is no directory {str(folder)!r}{nearest_file(folder)}"
    # In one piece, and with the rank, as torch does with tracebacks: others may print the same.
    rank = f"[rank{dist.get_rank()}]: " if dist.is_available() and dist.is_initialized() else ""
    sys.stderr.write(f"{rank}error: " + "\n".join(map(printable, text.splitlines())) + "\n")


def with_suggestion(message: str, parser: ArgumentParser) -> str:
    """Add the name that may have been meant to a message of a parser, behind the wrong one."""
    if "did you mean" in message:
        # A parser within this one has added it.
        return message
    near = ""
    if match := _WRONG_OPTION.search(message):
        known = option_names(parser)
        near = nearest(match[1] or match[2], [*known, "init_args"])
    elif match := _WRONG_CHOICE.search(message):
        near = nearest(match[1], re.findall(r"[\w.-]+", match[2]))
    elif match := _WRONG_LITERAL.search(message):
        near = nearest(match[2], re.findall(r"[\w.-]+", match[1]))
    elif match := _WRONG_FILE.search(message):
        path = match[1] or match[2] or match[3]
        return f"{message.partition(':')[0]}: there is no file {path!r}{nearest_file(path)}"
    elif match := _WRONG_CLASS.search(message):
        module, _, name = (match[1] or match[2]).rpartition(".")
        paths = {path.rpartition(".")[2]: path for path in known_classes(parser)}
        members = vars(sys.modules.get(module, object)).items()
        names = [key for key, each in members if key[0] != "_" and not inspect.ismodule(each)]
        # Of the right name in the wrong module, the whole path.
        near = nearest(name, [*paths, *names], lambda each: {name: paths.get(name)}.get(each, each))
    elif match := _NO_CLASS.search(message):
        return _NO_CLASS.sub(
            r"give the class_path of a \1, and its arguments as init_args", message
        )
    elif match := _NO_DATASET.search(message):
        near = ": let its class inherit from torch.utils.data.Dataset"
    if not near or match is None or near in message:
        return message
    end = (message + "\n").index("\n", match.end())
    return message[:end].removesuffix(".") + near + message[end:]


def first_reason(message: str) -> str:
    """Of a value that fits none of its types, where it is and the best reason, in one line."""
    kept = [line for line in _CALLABLE.sub("", message).splitlines() if line.strip()]
    lines = [(len(line) - len(line.lstrip(" -")), line.strip(" -")) for line in kept]
    above: list[int] = []
    reasons: list[tuple[list[int], int]] = []
    for index, (depth, line) in enumerate(lines):
        # What ends in a colon says where all is that stands further to the right below it.
        above = [each for each in above if lines[each][0] < depth]
        if line[-1:] == ":" and not _NOISE.match(line):
            above = [*above, index]
        elif not _NOISE.match(line):
            reasons.append((above, index))

    def knowledge(reason: tuple[list[int], int]) -> tuple[object, ...]:
        """The type whose arguments are wrong knows more of a value than one that it is not of."""
        where, index = reason
        line = lines[index][1]
        is_own = not _ANOTHER_KIND.match(line)
        return len(where), is_own, "subclass of" not in line, "class_path" in line

    where, index = max(reasons or [(above, -1)], key=knowledge)
    words = [lines[each][1] for each in (*where, index)]
    if not re.search("value|did you mean", words[-1]):
        words += [line for _, line in lines[index:] if line.startswith("Given value: ")][:1]
    return " ".join(words)
