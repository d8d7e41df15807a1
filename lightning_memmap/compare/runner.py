"""Runs the variants of a comparison one after the other, and reports what came out."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_memmap.arguments import read_config
from lightning_memmap.compare.config import ComparisonOptions, RunKind, RunSpec, shared_config
from lightning_memmap.compare.metrics import Rank, Run, figures_of, rate_of, shares_of
from lightning_memmap.compare.parity import CheckedRun, check_parity, default_tolerance
from lightning_memmap.compare.report import Report, ScalingPoint, Status, VariantResult
from lightning_memmap.compare.variants import Machine, Variant, parse_variants
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


def run(spec: RunSpec, timeout_s: float, on_step: Callable[[int], None]) -> list[Rank]:
    """Do a run in fresh processes, and wait for it. In any case all of them have ended afterwards.

    Args:
        spec: The run.
        timeout_s: A run that takes longer has failed.
        on_step: Called with the number of steps done, a few times a second.

    Returns:
        What its processes wrote, by rank; nothing for ``prepare``.

    Raises:
        RunError: It gave no result.
        KeyboardInterrupt: The user interrupted; the run has been ended.
    """
    try:
        path = spec.write()
        out = path.parent
        kept = {
            key: value
            for key, value in os.environ.items()
            if key not in _LAUNCHER and not key.startswith("PL_")
        }
        command = [sys.executable, "-m", "lightning_memmap.compare.worker", str(path)]
        launched = Launched(command, out / "log.txt", env=kept)
        try:
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
    checked: CheckedRun | None = None
    timed: list[list[Rank]] = field(default_factory=list)

    def stop(self, error: RunError) -> None:
        """Do no further runs of this variant."""
        self.status, self.reason = "refused" if error.refused else "failed", str(error)


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
        accelerator = options.accelerator
        if accelerator == "auto":
            asked = str(self._trainer.get("accelerator", "auto"))
            has_cuda = torch.cuda.is_available() and asked in ("auto", "gpu", "cuda")
            accelerator = "cuda" if has_cuda else "cpu"
        self._trainer["accelerator"] = accelerator
        # Counting makes no context on a device: the variants need all of its memory.
        count = torch.cuda.device_count() if accelerator == "cuda" else options.devices
        self._machine = Machine(accelerator, count)
        self._out = Path(options.out)
        self._created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._variants = [_Variant(variant) for variant in parse_variants(options.variants)]
        self._scaling: list[ScalingPoint] = []
        self._facts: dict[str, Any] = {}

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
        is_interrupted = False
        try:
            for each in self._variants:
                each.reason = self._obstacle(each.variant, self._options.devices)
                if each.reason:
                    each.status = "unavailable"
                    self._note(f"[yellow]{each.variant.name}: cannot run here: {each.reason}[/]")
            for each in self._pending():
                self._check(each)
            # Variants alternate, so that whatever changes on the machine affects all of them.
            for repeat in range(1, self._options.repeats + 1):
                for each in self._pending():
                    self._time(each, repeat)
            self._scale()
        except KeyboardInterrupt:
            is_interrupted = True
            self._note("[yellow]interrupted: the report has what is finished[/]")
        return self._report(is_interrupted)

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

    def _spec(
        self, kind: RunKind, folder: str, variant: Variant | None = None, devices: int | None = None
    ) -> RunSpec:
        options, data = self._options, self._facts.get("data", {})
        devices = devices or options.devices
        mine = {"devices": 1} if variant is None else variant.trainer_options(devices)
        timed = kind == "timed"
        return RunSpec(
            kind=kind,
            config=self._config,
            trainer={**self._trainer, **mine},
            variant="" if variant is None else variant.name,
            devices=devices,
            global_batch=data.get("batch_size", 0) * devices,
            warmup_steps=options.warmup_steps if timed else 0,
            steps=options.steps if timed else options.check_steps,
            transform_is_random=data.get("transform_is_random", False),
            out=str((self._out / RUNS / folder).resolve()),
        )

    def _run(self, title: str, spec: RunSpec) -> list[Rank]:
        """Do a run, with a progress bar and then a line that says what came out."""
        with self._progress(title, spec) as (on_step, end):
            try:
                ranks = run(spec, self._options.timeout_s, on_step)
            except RunError as error:
                word = "cannot do this" if error.refused else "failed"
                end(f"[red]{word}[/]: {escape(shorten(str(error), 300, placeholder=' ...'))}")
                raise
            rate = spec.kind == "timed" and rate_of(Run(ranks, spec.global_batch))
            end(f"{rate:,.0f} samples/s" if rate else "done")
        return ranks

    @contextmanager
    def _progress(
        self, title: str, spec: RunSpec
    ) -> Iterator[tuple[Callable[[int], None], Callable[[str], None]]]:
        bar = Progress(
            TextColumn("  {task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        task = bar.add_task(escape(title), total=spec.total_steps)
        started_s, outcome = monotonic(), ["[red]interrupted[/]"]
        try:
            with bar:
                yield lambda done: bar.update(task, completed=done), outcome.append
        finally:
            seconds = f"[dim]{monotonic() - started_s:.1f} s[/]"
            self._note(f"{escape(title):<42} {outcome[-1]}  {seconds}")

    def _note(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False)

    def _obstacle(self, variant: Variant, devices: int) -> str:
        configures_itself = self._facts["model"]["configures_itself"]
        return variant.obstacle(self._machine, devices, configures_itself)

    def _check(self, each: _Variant) -> None:
        name = each.variant.name
        if each.variant.loader == "ideal":
            # It trains on one batch again and again: there is nothing to check.
            return
        spec = self._spec("check", f"{name}/check", each.variant)
        try:
            ranks = self._run(f"{name}: check", spec)
            # Now: a run whose records do not fit is this variant's failure, and no other's.
            each.checked, each.check = CheckedRun.of(ranks, Path(spec.out)), ranks
        except RunError as error:
            each.stop(error)
        except Exception as error:
            each.stop(RunError(f"its check run cannot be evaluated: {error!r}"))

    def _time(self, each: _Variant, repeat: int) -> None:
        name = each.variant.name
        spec = self._spec("timed", f"{name}/timed{repeat}", each.variant)
        title = f"{name}: timed run {repeat} of {self._options.repeats}"
        try:
            each.timed.append(self._run(title, spec))
        except RunError as error:
            each.stop(RunError(str(error)))

    def _scale(self) -> None:
        batch_size = self._facts["data"]["batch_size"]
        for devices in self._options.scaling_counts:
            for each in self._pending():
                variant, name = each.variant, each.variant.name
                if variant.strategy == "auto":
                    continue
                reason, done = self._obstacle(variant, devices), each.timed
                if not reason and devices != self._options.devices:
                    spec = self._spec("timed", f"{name}/scaling{devices}", variant, devices)
                    try:
                        done = [self._run(f"{name}: on {devices} devices", spec)]
                    except RunError as error:
                        reason = str(error)
                batch = batch_size * devices
                rates = [] if reason else [rate_of(Run(ranks, batch)) for ranks in done]
                self._scaling.append(ScalingPoint(name, devices, batch, rates, reason))

    def _pending(self) -> list[_Variant]:
        """The variants that nothing has stopped."""
        return [each for each in self._variants if each.status == "pending"]

    @property
    def _reference(self) -> _Variant | None:
        """The single device with the memory-mapped store if it was checked, else the first."""
        checked = [each for each in self._variants if each.variant.is_compared and each.checked]
        preferred = [each for each in checked if each.variant == Variant("auto")]
        return next(iter(preferred + checked), None)

    def _report(self, is_interrupted: bool) -> Report:
        options = self._options
        precision = str(self._trainer.get("precision", "32-true"))
        tolerance = options.tolerance
        settings = {
            **asdict(options),
            "accelerator": self._machine.accelerator,
            "tolerance": default_tolerance(precision) if tolerance is None else tolerance,
            "global_batch": self._facts["data"]["batch_size"] * options.devices,
            "precision": precision,
            "seed": self._config["seed_everything"],
        }
        reference = self._reference
        return Report(
            created=self._created,
            command=self._command,
            environment=self._facts["environment"],
            settings=settings,
            data=self._facts["data"],
            model=self._facts["model"],
            reference="" if reference is None else reference.variant.name,
            variants=[self._result_of(each, settings) for each in self._variants],
            scaling=self._scaling,
            left_out=self._left_out,
            interrupted=is_interrupted,
        )

    def _result_of(self, each: _Variant, settings: dict[str, Any]) -> VariantResult:
        try:
            return self._result(each, settings)
        except Exception as error:
            # Whatever its records have that no other's have costs the others nothing.
            reason = f"its runs cannot be evaluated: {error!r}"
            return self._result(_Variant(each.variant, "failed", reason), settings)

    def _result(self, each: _Variant, settings: dict[str, Any]) -> VariantResult:
        variant, status, reason, checked = each.variant, each.status, each.reason, each.checked
        batch, repeats, reference = settings["global_batch"], settings["repeats"], self._reference
        if status == "pending":
            done = len(each.timed)
            status = "ok" if done == repeats else status
            reason = "" if status == "ok" else f"interrupted after {done} of {repeats} runs"
        ideal = Variant(variant.strategy, "ideal")
        ideals = [rate_of(Run(ranks, batch)) for other in self._variants for ranks in other.timed
                  if other.variant == ideal]  # fmt: skip
        ideal_rate = median(ideals) if ideals else None
        flops = sum(rank.values["flops"] for rank in reference.check) / batch if reference else None
        timed = [Run(ranks, batch, ideal_rate, flops) for ranks in each.timed]
        parity = None
        if checked is not None and variant.is_compared and reference and reference.checked:
            data = self._facts["data"]
            parity = check_parity(
                checked,
                reference.checked,
                self._facts["expected"],
                settings["tolerance"],
                is_random=data["transform_is_random"] and not data["has_eval_transform"],
                notes=self._notes(len(shares_of(each.check))),
            )
        losses = checked.losses if checked is not None and variant.is_compared else []
        logs = sorted((self._out / RUNS / variant.name).glob("*/log.txt"))
        return VariantResult(
            variant=variant.name,
            strategy=variant.strategy,
            loader=variant.loader_name,
            description=variant.description,
            status=status,
            reason=reason,
            parity=parity,
            figures=figures_of(timed, Run(each.check, batch) if each.check else None),
            model_bytes={
                f"rank {rank.rank}, {device}": sizes
                for rank in each.check
                for device, sizes in rank.values["state"].items()
            },
            check_losses=[loss if isfinite(loss) else None for loss in losses],
            logs=[str(path.relative_to(self._out)) for path in logs],
        )

    def _notes(self, num_shares: int) -> Sequence[str]:
        batch_norms = self._facts["model"]["batch_norms"]
        if not batch_norms or num_shares == 1 or self._trainer.get("sync_batchnorm"):
            return []
        return [
            f"the model has {', '.join(batch_norms)}: each of the {num_shares} processes normalises"
            " by its own rows, which is a different training. GroupNorm, or sync_batchnorm on"
            " GPUs, would make it the same"
        ]
