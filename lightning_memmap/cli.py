"""The command ``lightning-memmap``.

``fit``, ``validate``, ``test`` and ``predict`` are LightningCLI with the strategy names of this
pack registered. ``store`` works on stores: ``build``, ``append``, ``info``, ``verify``, ``plan``,
``show``, ``push``, ``pull``.
``compare`` trains under several strategies and reports what each one costs.
``rows`` lists the rows of any step, and ``doctor`` says what will work on this machine.
"""

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from itertools import chain, count
from typing import Any

import lightning as L
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.strategies import StrategyRegistry
from typing_extensions import override

from lightning_memmap._compat.parsers import commands_of, known_classes
from lightning_memmap.arguments import (
    brief_reason,
    is_from_user_code,
    print_error,
    training_parser,
)
from lightning_memmap.commands.doctor import doctor
from lightning_memmap.commands.rows import rows_command
from lightning_memmap.commands.store import store_command
from lightning_memmap.compare.command import compare
from lightning_memmap.errors import MemmapError, nearest
from lightning_memmap.strategies import STRATEGIES

_DESCRIPTION = "Train with data that stays resident on every device."
_HELP = f"""usage: lightning-memmap COMMAND [arguments]

{_DESCRIPTION}

train, from a config (these are the commands of LightningCLI):
  fit         train, and validate in between
  validate    validate once
  test        test once
  predict     predict

before and after:
  store       build, describe, check, plan for, show and copy stores
  compare     train under several strategies: do they agree, and what does each cost?
  rows        list the rows of any step
  doctor      say what will work on this machine

lightning-memmap COMMAND --help describes a command. A first run:
  lightning-memmap fit --config examples/configs/digits.yaml"""


#: Packages whose errors name an argument of the user.
_LIBRARIES = ("lightning_memmap", "lightning", "jsonargparse", "fsspec")
#: Errors that end the command with exit code 2.
_WRONG_ARGUMENTS = (
    TypeError,
    ValueError,
    MisconfigurationException,
    FileNotFoundError,
    NotADirectoryError,
    IsADirectoryError,
)


class SaveConfig(SaveConfigCallback):
    """Saves the config with the logs of a run, and never replaces another file.

    Some loggers write to the folder of the user, who may have a ``config.yaml`` there.
    """

    @override
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not trainer.loggers:
            return
        if not self.already_saved and trainer.log_dir is not None:  # On all ranks: a broadcast.
            self.config_filename = _free_name(trainer.log_dir, self.config_filename)
        super().setup(trainer, pl_module, stage)


def _free_name(directory: str, name: str) -> str:
    """Return a file name that is free in a directory: ``config.yaml``, ``config-2.yaml``, ..."""
    system = get_filesystem(directory)
    stem, suffix = os.path.splitext(name)
    candidates = chain([name], (f"{stem}-{number}{suffix}" for number in count(2)))
    return next(file for file in candidates if not system.exists(os.path.join(directory, file)))


class TrainingCLI(LightningCLI):
    """LightningCLI that suggests the nearest name when a strategy is misspelt."""

    @override
    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        return training_parser(**kwargs)

    @override
    def before_instantiate_classes(self) -> None:
        strategy = self.config[self.subcommand].trainer.strategy
        names = ["auto", *StrategyRegistry.available_strategies()]
        if isinstance(strategy, str) and strategy.lower() not in names:
            parser = commands_of(self.parser)[str(self.subcommand)]
            near = nearest(strategy, [*names, *known_classes(parser)])
            ours = ", ".join(name for name, *_ in STRATEGIES)
            parser.error(
                f"trainer.strategy: unknown strategy {strategy!r}{near or '.'} This pack has {ours}"
            )


def main(args: Sequence[str] | None = None) -> None:
    """Run the command."""
    try:
        try:
            _dispatch(args)
        finally:
            # An error of flushing can be caught here, but not when the interpreter ends.
            sys.stdout.flush()
    except KeyboardInterrupt as interrupt:
        print(str(interrupt) or "interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of the output is gone: discard what is still in the buffer.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        reason = _unwrap(error)
        is_ours = isinstance(reason, MemmapError | MisconfigurationException)
        is_argument = isinstance(reason, TypeError | ValueError | OSError)
        if not is_ours and (not is_argument or is_from_user_code(reason, _LIBRARIES)):
            raise
        print_error(reason)
        # A damaged store, or processes that differ, aren't a wrong argument.
        sys.exit(2 if isinstance(reason, _WRONG_ARGUMENTS) else 1)


def _dispatch(args: Sequence[str] | None) -> None:
    argv = list(sys.argv[1:] if args is None else args)
    # A class_path may name a module in the working directory, as with `python -m`.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    commands = {"store": store_command, "compare": compare, "rows": rows_command, "doctor": doctor}
    if not argv or argv[0] in ("--help", "-h"):
        print(_HELP, file=sys.stdout if argv else sys.stderr)
        sys.exit(0 if argv else 2)
    if argv[0] in commands:
        # Hide the Trainer's messages about devices and other packages.
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        sys.exit(commands[argv[0]](argv[1:]))
    if not argv[0].startswith("-") and argv[0] not in TrainingCLI.subcommands():
        near = nearest(argv[0], (*commands, *TrainingCLI.subcommands()))
        print(f"error: unknown command {argv[0]!r}{near}", file=sys.stderr)
        print("lightning-memmap --help lists the commands", file=sys.stderr)
        sys.exit(2)
    TrainingCLI(
        args=None if args is None else argv,
        save_config_callback=SaveConfig,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={
            "prog": "lightning-memmap",
            "description": _DESCRIPTION,
            "version": version("lightning_memmap"),
        },
    )


def _unwrap(error: BaseException) -> BaseException:
    """Return the error that jsonargparse wrapped when it made an object of a config."""
    while _is_from_jsonargparse(error) and (inner := error.__cause__ or error.__context__):
        error = inner
    if _is_from_jsonargparse(error) and isinstance(error, ValueError):
        return ValueError(brief_reason(str(error))).with_traceback(error.__traceback__)
    return error


def _is_from_jsonargparse(error: BaseException) -> bool:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith("jsonargparse")
