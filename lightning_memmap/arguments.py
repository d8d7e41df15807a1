"""Command-line parsers with errors of one line that suggest the nearest name."""

import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten
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

#: Encloses the error of a parser within a parser, which is shown without the errors around it.
_INNER = "\x1f"
#: Words of jsonargparse's messages that a user may have misspelt: options and keys, classes, files.
_OPTION = re.compile(r"(?P<dashes>--)(?P<name>[\w.]+)|'(?P<key>[\w.]+)'")
_CLASS = re.compile(r"(?:class_path'?:? '|Given value: |string: )([\w.]+)\b(?!\()")
_CONFIG_FILE = re.compile(r"[^\s'\"]+\.(?:yaml|yml|json)\b")
#: The options of a fit that set its config, or a part of it.
_CONFIG_OPTIONS = (
    "config", "seed_everything", "model", "data", "trainer", "optimizer", "lr_scheduler",
)  # fmt: skip


class BriefParser(ArgumentParser):
    """A parser whose errors are one line with the nearest name, without the usage."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # A prefix that is unique now may be ambiguous in the next version.
        super().__init__(*args, **kwargs, allow_abbrev=False)
        self._parser: ArgumentParser = self

    @override
    def parse_args(self, *args: Any, **kwargs: Any) -> Any:
        """Parse the arguments, and remember their command, which some errors don't name."""
        argv = (*args, kwargs.get("args"))[0]
        words = sys.argv[1:] if argv is None else argv
        commands = commands_of(self)
        self._parser = commands.get(next(filter(commands.__contains__, words), ""), self)
        return super().parse_args(*args, **kwargs)

    def parse_config(self, config: Any) -> Any:
        """Parse a config that is a dict of values."""
        try:
            return self.parse_object(config)
        except ArgumentError as error:
            raise ValueError(f"config: {brief_reason(str(error))}") from error

    @override
    def instantiate(self, *args: Any, **kwargs: Any) -> Any:
        """Make the objects of a config, or raise the error of a strategy."""
        # The Trainer takes a name or a strategy: jsonargparse only reports that it isn't a name.
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
        """Exit with code 2; in a parser within another one, raise."""
        line = brief_reason(message)
        if _INNER not in message:
            line += _suggest(message, self._parser, is_value=isinstance(ex, TypeError))
        if not self.exit_on_error:
            super().error(f"{_INNER}{line}{_INNER}", ex)
        print(f"error: {line}", file=sys.stderr)
        program = self._parser.prog.replace(" [options]", "")
        print(f"{program} --help lists the arguments", file=sys.stderr)
        sys.exit(2)


class TrainingParser(BriefParser, LightningArgumentParser):
    """The parser of LightningCLI, with errors of one line."""


def training_parser(**options: Any) -> TrainingParser:
    """Make the parser of a LightningCLI, whose own ``parser_class`` came after 2.5.0."""
    options.setdefault("dump_header", [f"lightning.pytorch=={version('lightning')}"])
    parser = TrainingParser(**options)
    config_help = "Path to a configuration file in json or yaml format."
    parser.add_argument("-c", "--config", action=ActionConfigFile, help=config_help)
    return parser


def reject_overrides(args: Iterable[str]) -> None:
    """Check the arguments of a command that reads one config without changing it."""
    options = [
        arg
        for arg in args
        if arg.startswith("--") and arg[2:].partition("=")[0].partition(".")[0] in _CONFIG_OPTIONS
    ]
    if len(options) > 1:
        raise ValueError(
            f"{' and '.join(options)}: this command reads one config file, unchanged. Merge them"
            " with lightning-memmap fit --config ONE --config OTHER --model.lr 0.1 --print_config"
            " > merged.yaml"
        )


def read_config(path: str, *sections: str) -> dict[str, Any]:
    """Read the config of a fit, which must have some sections."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"config={path!r} isn't a yaml file: {reason}") from error
    config = content if isinstance(content, dict) else {}
    if sections[0] not in config:
        config = config.get("fit") or {}
    for name in sections:
        if not isinstance(config, dict) or not isinstance(config.get(name), dict):
            raise ValueError(
                f"config={path!r} has no section {name!r} with a class_path. Pass the config of a"
                " fit"
            )
    return config


def print_error(error: BaseException) -> None:
    """Print an error to standard error, with the traceback of a dataset's own error."""
    cause = error.__cause__
    if isinstance(error, DatasetError) and not isinstance(cause, MemmapError | None):
        traceback.print_exception(cause)
    text = str(error)
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        text = f"there is no file {str(error.filename)!r}{nearest_file(error.filename)}"
        if not (folder := Path(error.filename).parent).is_dir():
            text = f"there is no directory {str(folder)!r}{nearest_file(folder)}"
    # One write, with the rank as torch prints it: other processes may print the same.
    rank = f"[rank{dist.get_rank()}]: " if dist.is_available() and dist.is_initialized() else ""
    sys.stderr.write(f"{rank}error: " + "\n".join(map(printable, text.splitlines())) + "\n")


def is_from_user_code(error: BaseException, libraries: Sequence[str]) -> bool:
    """Check whether user code raised an error, itself or through an installed package.

    Args:
        error: The error.
        libraries: Packages whose errors need no traceback, although user code may call them.
    """
    installed = [
        *map(Path, (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
    ]
    for frame, _ in reversed([*traceback.walk_tb(error.__traceback__)]):
        file = frame.f_code.co_filename
        if str(frame.f_globals.get("__name__")).partition(".")[0] in libraries:
            return False
        if file[0] != "<" and not any(Path(file).is_relative_to(folder) for folder in installed):
            return True
    return False


def brief_reason(message: str) -> str:
    """Shorten a message of jsonargparse to one line: its argument, its reason and its last line."""
    lines = [line.strip(" -") for line in message.splitlines() if line.strip()]
    for previous, line in zip(["", *lines], lines, strict=False):
        if _INNER in line:
            prefix = f"{previous} " if previous.endswith(":") else ""
            return prefix + line.split(_INNER)[1]
    if len(lines) > 4:
        lines = [*lines[:3], lines[-1]]
    return " ".join(
        line if line[-1] in ":.," or index == len(lines) - 1 else f"{line}."
        for index, line in enumerate(shorten(line, 300, placeholder=" ...") for line in lines)
    )


def _suggest(message: str, parser: ArgumentParser, is_value: bool) -> str:
    """Find the nearest file, class or option to a word of a message."""
    for path in map(Path, _CONFIG_FILE.findall(message)):
        if not path.exists():
            return nearest_file(path)
    if is_value:
        suggestions = (_nearest_class(word, parser) for word in _CLASS.findall(message))
    else:
        suggestions = (
            _nearest_option(word["name"] or word["key"], parser, word["dashes"] or "")
            for word in _OPTION.finditer(message)
        )
    return next(filter(None, suggestions), "")


def _nearest_option(word: str, parser: ArgumentParser, dashes: str) -> str:
    names = [*option_names(parser), *commands_of(parser), "class_path", "init_args"]
    if word in names:
        return ""
    nearest_names = (nearest(name, names, dashes.__add__) for name in (word, word.split(".")[0]))
    return next(filter(None, nearest_names), "")


def _nearest_class(word: str, parser: ArgumentParser) -> str:
    module, _, name = word.rpartition(".")
    members = vars(sys.modules.get(module, object))
    if not name[:1].isupper() or name in members:
        return ""
    paths = {path.rpartition(".")[2]: path for path in known_classes(parser)}
    if name in paths:
        # The right class in the wrong module.
        return "" if word == paths[name] else nearest(name, [name], paths.__getitem__)
    return nearest(name, [*paths, *(member for member in members if member[:1].isupper())])
