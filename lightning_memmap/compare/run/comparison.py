"""Runs the variants of a comparison one after the other, and reports what came out."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from textwrap import shorten

import msgspec
import torch
from rich.console import Console
from rich.markup import escape

from lightning_memmap.arguments import read_config
from lightning_memmap.compare.report.figures import rate_of
from lightning_memmap.compare.report.parity import default_tolerance
from lightning_memmap.compare.report.records import AnyRank, CheckRank, Rank, TimedRank
from lightning_memmap.compare.report.report import Report, ScalingPoint, Settings
from lightning_memmap.compare.run.findings import Findings, VariantRuns
from lightning_memmap.compare.run.launch import RunError, RunResult, run
from lightning_memmap.compare.run.plan import ComparisonOptions, RunKind, RunSpec, shared_config
from lightning_memmap.compare.run.progress import ComparisonProgress
from lightning_memmap.compare.run.variants import Machine, Variant, parse_variants
from lightning_memmap.compare.run.worker import ConfigCheck, Facts
from lightning_memmap.errors import MemmapError

RUNS = "variants"


class ComparisonError(MemmapError):
    """The comparison cannot begin: model or data cannot be made, or the store not built."""


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
        self._options = options
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
        self._progress = ComparisonProgress(console)
        self._command = command
        self._out = Path(options.out)
        self._created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._runs = [VariantRuns(variant) for variant in parse_variants(options.variants)]

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
        # Before anything of an earlier comparison is removed.
        ConfigCheck(self._spec("prepare", "prepare"))
        self._clear()
        facts = self._prepare()
        scaling: list[ScalingPoint] = []
        is_interrupted = False
        try:
            self._find_obstacles(facts)
            for runs in self._pending():
                self._check(runs, facts)
            # Variants alternate, so that whatever changes on the machine affects all of them.
            for repeat in range(1, self._options.repeats + 1):
                for runs in self._pending():
                    self._time(runs, repeat, facts)
            self._scale(facts, scaling)
        except KeyboardInterrupt:
            is_interrupted = True
            self._progress.note("[yellow]interrupted: the report has what is finished[/]")
        return self._report(facts, scaling, is_interrupted)

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
        self,
        kind: RunKind,
        folder: str,
        variant: Variant | None = None,
        facts: Facts | None = None,
        devices: int | None = None,
    ) -> RunSpec:
        options = self._options
        devices = devices or options.devices
        mine = {"devices": 1} if variant is None else variant.trainer_options(devices)
        timed = kind == "timed"
        return RunSpec(
            kind=kind,
            config=self._config,
            trainer={**self._trainer, **mine},
            variant="" if variant is None else variant.name,
            devices=devices,
            global_batch=0 if facts is None else facts.data.batch_size * devices,
            warmup_steps=options.warmup_steps if timed else 0,
            steps=options.steps if timed else options.check_steps,
            transform_is_random=facts is not None and facts.data.transform_is_random,
            out=str((self._out / RUNS / folder).resolve()),
        )

    def _run(
        self,
        title: str,
        spec: RunSpec,
        record: type[AnyRank],
        outcome: Callable[[RunResult[AnyRank]], str] = lambda result: "done",
    ) -> RunResult[AnyRank]:
        with self._progress.run(title, spec.total_steps) as progress:
            try:
                result = run(spec, record, self._options.timeout_s, progress.steps)
            except OSError as error:
                # What others have measured is worth more than this run.
                result = RunResult(Path(spec.out), error=RunError(f"it did not start: {error}"))
            if result.error is None:
                progress.end(outcome(result))
            else:
                reason = shorten(result.error.message, 300, placeholder=" ...")
                word = "cannot do this" if result.error.refused else "failed"
                progress.end(f"[red]{word}[/]: {escape(reason)}")
        return result

    def _prepare(self) -> Facts:
        result = self._run("store, model and data", self._spec("prepare", "prepare"), Rank)
        if result.error is not None:
            raise ComparisonError(f"{result.error.message} (see {result.folder / 'log.txt'})")
        return msgspec.json.decode((result.folder / "facts.json").read_bytes(), type=Facts)

    def _find_obstacles(self, facts: Facts) -> None:
        for runs in self._runs:
            obstacle = self._obstacle(runs.variant, self._options.devices, facts)
            if obstacle:
                runs.stop("unavailable", obstacle)
                self._progress.note(f"[yellow]{runs.variant.name}: cannot run here: {obstacle}[/]")

    def _obstacle(self, variant: Variant, devices: int, facts: Facts) -> str:
        return variant.obstacle(self._machine, devices, facts.model.configures_itself)

    def _check(self, runs: VariantRuns, facts: Facts) -> None:
        name = runs.variant.name
        if runs.variant.loader == "ideal":
            # It trains on one batch again and again: there is nothing to check.
            return
        spec = self._spec("check", f"{name}/check", runs.variant, facts)
        result = self._run(f"{name}: check", spec, CheckRank)
        if result.error is not None:
            runs.stop("refused" if result.error.refused else "failed", result.error.message)
        else:
            runs.checks.append(result)

    def _time(self, runs: VariantRuns, repeat: int, facts: Facts) -> None:
        name = runs.variant.name
        spec = self._spec("timed", f"{name}/timed{repeat}", runs.variant, facts)
        title = f"{name}: timed run {repeat} of {self._options.repeats}"
        result = self._run(title, spec, TimedRank, _rate)
        if result.error is not None:
            runs.stop("failed", result.error.message)
        else:
            runs.timed.append(result)

    def _scale(self, facts: Facts, points: list[ScalingPoint]) -> None:
        for devices in self._options.scaling_counts:
            for runs in self._pending():
                variant, name = runs.variant, runs.variant.name
                if variant.strategy == "auto":
                    continue
                reason, done = self._obstacle(variant, devices, facts), runs.timed
                if not reason and devices != self._options.devices:
                    spec = self._spec("timed", f"{name}/scaling{devices}", variant, facts, devices)
                    result = self._run(f"{name}: on {devices} devices", spec, TimedRank, _rate)
                    reason = result.error.message if result.error is not None else ""
                    done = [result]
                rates = () if reason else tuple(rate_of(result.ranks) for result in done)
                batch = facts.data.batch_size * devices
                points.append(ScalingPoint(name, devices, batch, rates, reason))

    def _pending(self) -> list[VariantRuns]:
        """The variants that nothing has stopped."""
        return [runs for runs in self._runs if runs.status == "pending"]

    def _report(
        self, facts: Facts, scaling: Sequence[ScalingPoint], is_interrupted: bool
    ) -> Report:
        options = self._options
        precision = str(self._trainer.get("precision", "32-true"))
        tolerance = options.tolerance
        settings = Settings(
            **{
                **asdict(options),
                "accelerator": self._machine.accelerator,
                "tolerance": default_tolerance(precision) if tolerance is None else tolerance,
            },
            global_batch=facts.data.batch_size * options.devices,
            precision=precision,
            seed=self._config["seed_everything"],
        )
        findings = Findings(
            self._runs,
            facts,
            settings,
            syncs_batch_norm=bool(self._trainer.get("sync_batchnorm")),
            logs=self._out / RUNS,
        )
        reference = findings.reference
        return Report(
            created=self._created,
            command=self._command,
            environment=facts.environment,
            settings=settings,
            data=facts.data,
            model=facts.model,
            reference="" if reference is None else reference.variant.name,
            variants=findings.results,
            scaling=tuple(scaling),
            left_out=tuple(self._left_out),
            interrupted=is_interrupted,
        )


def _rate(result: RunResult[TimedRank]) -> str:
    return f"{rate_of(result.ranks):,.0f} samples/s"
