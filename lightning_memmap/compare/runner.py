"""Runs the variants of a comparison one after the other, and reports what came out."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from math import isfinite
from pathlib import Path
from statistics import median
from textwrap import shorten
from time import monotonic
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from lightning_memmap.arguments import read_config
from lightning_memmap.compare.config import (
    ComparisonOptions,
    RunKind,
    RunSpec,
    Variant,
    parse_variants,
    shared_config,
)
from lightning_memmap.compare.metrics import Rank, Run, figures_of, rate_of, shares_of
from lightning_memmap.compare.parity import CheckedRun, Parity, check_parity, default_tolerance
from lightning_memmap.compare.report import Report, Status, VariantResult
from lightning_memmap.compare.worker import ConfigCheck
from lightning_memmap.errors import MemmapError
from lightning_memmap.launched import Launched

RUNS = "variants"
_POLL_S = 0.1
#: What a launcher sets for its processes. A run is independent of whatever started this process.
_LAUNCHER = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


class ComparisonError(MemmapError):
    """The comparison cannot begin: model or data cannot be made, or the store not built."""


class RunError(Exception):
    """A run gave no result.

    Args:
        message: What to tell the user.
        refused: Whether a strategy or the data refused the run before its first step, since it
            cannot work here. Otherwise something broke.
    """

    def __init__(self, message: str, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


def launch(out: Path) -> Launched:
    """Start a run, which imports what it needs and then waits for its spec in this folder."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in _LAUNCHER and not key.startswith("PL_")
    }
    given = [str(out / "spec.json"), str(os.getpid())]
    command = [sys.executable, "-m", "lightning_memmap.compare.worker", *given]
    return Launched(command, out / "log.txt", env=kept)


def run(
    spec: RunSpec,
    timeout_s: float,
    on_step: Callable[[int], None],
    started: Launched | None = None,
) -> list[Rank]:
    """Do a run in fresh processes, and wait for it. In any case all of them have ended afterwards.

    Args:
        spec: The run.
        timeout_s: A run that takes longer has failed.
        on_step: Called with the number of steps done, a few times a second.
        started: What `launch` has started for it; by default it is started now.

    Returns:
        What its processes wrote, by rank; nothing for ``prepare``.

    Raises:
        RunError: It gave no result.
        KeyboardInterrupt: The user interrupted; the run has been ended.
    """
    out = Path(spec.out)
    try:
        launched = started or launch(out)
        try:
            spec.write()
            deadline = monotonic() + timeout_s
            while not (is_over := launched.ends_within(_POLL_S)) and monotonic() < deadline:
                on_step(_read_progress(out))
        finally:
            launched.kill_group()
        if not is_over:
            tail = " | ".join(launched.tail())
            raise RunError(f"not finished after {timeout_s:g} s (--timeout_s): {tail}")
        if launched.returncode:
            raise _read_error(out, launched)
        ranks = read_ranks(out)
        found = [rank.rank for rank in ranks]
        if spec.kind != "prepare" and found != list(range(ranks[0].world_size if ranks else 1)):
            tail = " | ".join(launched.tail())
            raise RunError(f"only the ranks {found} wrote what they measured: {tail}")
        return ranks
    except (OSError, ValueError, TypeError) as error:
        # What others have measured is worth more than this run.
        raise RunError(f"its files cannot be written or read: {error}") from error


def read_ranks(folder: Path) -> list[Rank]:
    """Read what the processes of a run have written, by rank."""
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("rank*.json")]
    return sorted((Rank(**json.loads(text)) for text in texts), key=lambda rank: rank.rank)


def _read_progress(out: Path) -> int:
    try:
        return int((out / "progress").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):  # Not begun, or being written.
        return 0


def _read_error(out: Path, launched: Launched) -> RunError:
    try:
        found = json.loads((out / "error.json").read_text(encoding="utf-8"))
        return RunError(found["message"], found["refused"])
    except (OSError, ValueError, KeyError, TypeError):  # It is missing, or damaged.
        return RunError(f"it ended with {launched.how_it_ended(12)}")


@dataclass
class _Variant:
    """What is known of a variant so far."""

    variant: Variant
    status: Status = "pending"
    reason: str = ""
    check: list[Rank] = field(default_factory=list)
    parity: Parity | None = None
    losses: list[float] = field(default_factory=list)
    timed: list[list[Rank]] = field(default_factory=list)


class Comparison:
    """A comparison that is under way.

    Args:
        options: What to compare, and how.
        console: Where to show the progress.
        command: The command line, for the report.

    Raises:
        OSError: The config cannot be read.
        ValueError: The config is not a yaml file, or has no model or no data; or a variant is
            unknown.
    """

    def __init__(self, options: ComparisonOptions, console: Console, command: str = "") -> None:
        self._options, self._console, self._command = options, console, command
        shared = shared_config(read_config(options.config))
        self._config, self._trainer, self._left_out = shared
        self._accelerator = options.accelerator
        if self._accelerator == "auto":
            asked = str(self._trainer.get("accelerator", "auto"))
            has_cuda = torch.cuda.is_available() and asked in ("auto", "gpu", "cuda")
            self._accelerator = "cuda" if has_cuda else "cpu"
        precision = str(self._trainer.get("precision", "32-true"))
        given = options.tolerance
        self._settings = {
            **asdict(options),
            "accelerator": self._accelerator,
            "tolerance": default_tolerance(precision) if given is None else given,
            "precision": precision,
            "seed": self._config["seed_everything"],
            "global_batch": 0,  # Known once the data is.
        }
        self._out = Path(options.out)
        self._created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._variants = [_Variant(variant) for variant in parse_variants(options.variants)]
        self._facts: dict[str, Any] = {}
        #: What the others are compared with, and its weights.
        self._reference: tuple[_Variant, CheckedRun] | None = None
        #: The next run, which is started while the one before it is not timed, and its folder.
        self._ahead: tuple[str, Launched | None] = "", None

    def run(self) -> Report:
        """Do all runs. After Ctrl-C, the report has what is finished.

        Returns:
            The report, which is not written yet.

        Raises:
            ComparisonError: Model or data cannot be made, or the store not built.
            KeyboardInterrupt: The user interrupted before anything was measured.
            ValueError: The config has a name or a value that the classes do not accept, or ``out``
                contains something other than a comparison.
        """
        spec = self._spec("prepare", "prepare")
        # Before anything of an earlier comparison is removed.
        ConfigCheck(spec)
        self._clear()
        try:
            self._run("store, model and data", spec)
        except RunError as error:
            raise ComparisonError(f"{error} (see {Path(spec.out) / 'log.txt'})") from error
        self._facts = json.loads((Path(spec.out) / "facts.json").read_text(encoding="utf-8"))
        devices = self._options.devices
        self._settings["global_batch"] = self._facts["data"]["batch_size"] * devices
        is_interrupted = False
        try:
            # Counting makes no context on a device: the variants need all of its memory.
            count = torch.cuda.device_count() if self._accelerator == "cuda" else devices
            for each in self._variants:
                each.reason = each.variant.unsupported_reason(
                    self._accelerator, count, devices, self._facts["model"]["configures_itself"]
                )
                if each.reason:
                    each.status = "unavailable"
                    self._note(f"[yellow]{each.variant.name}: cannot run here: {each.reason}[/]")
            # The single device with the store is the reference; without it, the first that runs.
            ordered = sorted(self._pending(), key=lambda each: each.variant != Variant("auto"))
            # An ideal loader gives one batch again and again: there is nothing to check.
            runs = [(each, "check") for each in ordered if each.variant.loader != "ideal"]
            # Variants alternate, so that whatever changes on the machine affects all of them.
            for repeat in range(1, self._options.repeats + 1):
                runs += [(each, f"timed{repeat}") for each in self._pending()]
            for index, (each, name) in enumerate(runs):
                if each.status == "pending":
                    later = [run for run in runs[index + 1 :] if run[0].status == "pending"][:1]
                    self._try(each, name, "".join(f"{v.variant.name}/{n}" for v, n in later))
        except KeyboardInterrupt:
            is_interrupted = True
            self._note("[yellow]interrupted: the report has what is finished[/]")
        finally:
            self._take("")
        return Report(
            created=self._created,
            command=self._command,
            environment=self._facts["environment"],
            settings=self._settings,
            data=self._facts["data"],
            model=self._facts["model"],
            reference="" if self._reference is None else self._reference[0].variant.name,
            variants=[self._result(each) for each in self._variants],
            left_out=self._left_out,
            interrupted=is_interrupted,
        )

    def _clear(self) -> None:
        out, runs = self._out, self._out / RUNS
        is_ours = (out / "report.json").exists() or runs.is_dir()
        if out.is_dir() and any(out.iterdir()) and not is_ours:
            raise ValueError(
                f"out={self._options.out!r} holds something other than a comparison: choose"
                " another folder"
            )
        shutil.rmtree(runs, ignore_errors=True)
        for name in ("report.json", "report.html"):
            (out / name).unlink(missing_ok=True)
        out.mkdir(parents=True, exist_ok=True)

    def _spec(self, kind: RunKind, folder: str, variant: Variant | None = None) -> RunSpec:
        options, devices, is_timed = self._options, self._options.devices, kind == "timed"
        mine = {"devices": 1} if variant is None else variant.trainer_options(devices)
        return RunSpec(
            kind=kind,
            config=self._config,
            trainer={**self._trainer, "accelerator": self._accelerator, **mine},
            variant="" if variant is None else variant.name,
            devices=devices,
            global_batch=self._settings["global_batch"],
            warmup_steps=options.warmup_steps if is_timed else 0,
            steps=options.steps if is_timed else options.check_steps,
            transform_is_random=self._facts.get("data", {}).get("transform_is_random", False),
            out=str((self._out / RUNS / folder).resolve()),
        )

    def _take(self, folder: str) -> Launched | None:
        """What was started ahead for a folder; for another one, it is ended."""
        (name, ahead), self._ahead = self._ahead, ("", None)
        if ahead is not None and name != folder:
            ahead.kill_group()
            ahead = None
        return ahead

    def _run(self, title: str, spec: RunSpec, started: Launched | None = None) -> list[Rank]:
        """Do a run, and print a line that says what came out."""
        started_s, outcome = monotonic(), "[red]interrupted[/]"
        try:
            with self._console.status(escape(title)) as status:

                def show(done: int) -> None:
                    status.update(f"{escape(title)}, step {done} of {spec.total_steps}")

                ranks = run(spec, self._options.timeout_s, show, started)
            rate = spec.kind == "timed" and rate_of(Run(ranks, spec.global_batch))
            outcome = f"{rate:,.0f} samples/s" if rate else "done"
        except RunError as error:
            word = "not supported" if error.refused else "failed"
            outcome = f"[red]{word}[/]: {escape(shorten(str(error), 300, placeholder=' ...'))}"
            raise
        finally:
            seconds = f"[dim]{monotonic() - started_s:.1f} s[/]"
            self._note(f"{escape(title):<42} {outcome}  {seconds}")
        return ranks

    def _note(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False)

    def _pending(self) -> list[_Variant]:
        """The variants that nothing has stopped."""
        return [each for each in self._variants if each.status == "pending"]

    def _try(self, each: _Variant, run_name: str, later: str) -> None:
        """Do a run of a variant, or stop the variant: its failure costs no other anything."""
        kind: RunKind = "check" if run_name == "check" else "timed"
        words = run_name.replace("timed", "timed run ")
        spec = self._spec(kind, f"{each.variant.name}/{run_name}", each.variant)
        started = self._take(f"{each.variant.name}/{run_name}")
        try:
            if kind == "check" and later:
                # Half of a short run is imports. Those of the next disturb nothing that is timed.
                self._ahead = later, launch(self._out.resolve() / RUNS / later)
            ranks = self._run(f"{each.variant.name}: {words}", spec, started)
            if kind == "check":
                self._compare(each, ranks, Path(spec.out))
            else:
                each.timed.append(ranks)
        except RunError as error:
            refused = error.refused and kind == "check"
            each.status, each.reason = "refused" if refused else "failed", str(error)
        except Exception as error:
            # Its weights may not be there, or its processes may have done other numbers of steps.
            each.status, each.reason = "failed", f"what it wrote cannot be evaluated: {error!r}"

    def _compare(self, each: _Variant, ranks: list[Rank], folder: Path) -> None:
        """Compare a check run with that of the reference, whose weights alone are kept."""
        if each.variant.is_compared:
            checked = CheckedRun.of(ranks, folder)
            _, reference = self._reference or (each, checked)
            data = self._facts["data"]
            each.parity = check_parity(
                checked,
                reference,
                self._facts["expected"],
                self._settings["tolerance"],
                is_random=data["transform_is_random"] and not data["has_eval_transform"],
                notes=self._notes(len(shares_of(ranks))),
            )
            each.losses = checked.losses
            self._reference = self._reference or (each, checked)
        each.check = ranks

    def _notes(self, num_shares: int) -> Sequence[str]:
        batch_norms = self._facts["model"]["batch_norms"]
        if not batch_norms or num_shares == 1 or self._trainer.get("sync_batchnorm"):
            return []
        return [
            f"the model has {', '.join(batch_norms)}: each of the {num_shares} processes normalises"
            " by its own rows, which is a different training. GroupNorm, or sync_batchnorm on"
            " GPUs, would make it the same"
        ]

    def _result(self, each: _Variant) -> VariantResult:
        status, reason, batch = each.status, each.reason, self._settings["global_batch"]
        if status == "pending":
            done, repeats = len(each.timed), self._options.repeats
            status = "ok" if done == repeats else status
            reason = "" if status == "ok" else f"interrupted after {done} of {repeats} runs"
        ideal = Variant(each.variant.strategy, "ideal")
        replays = [
            ranks for other in self._variants if other.variant == ideal for ranks in other.timed
        ]
        ideal_rate = median(rate_of(Run(ranks, batch)) for ranks in replays) if replays else None
        timed = [Run(ranks, batch, ideal_rate) for ranks in each.timed]
        return VariantResult(
            variant=each.variant.name,
            description=each.variant.description,
            status=status,
            reason=reason,
            parity=each.parity,
            figures=figures_of(timed, Run(each.check, batch) if each.check else None),
            check_losses=[loss if isfinite(loss) else None for loss in each.losses],
        )
