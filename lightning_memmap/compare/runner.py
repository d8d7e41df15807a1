"""Runs the variants of a comparison one at a time, and collects a report."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from math import isfinite
from pathlib import Path
from statistics import median
from textwrap import shorten
from time import monotonic

import torch
from rich.console import Console
from rich.markup import escape

from lightning_memmap.compare.config import (
    ComparisonOptions,
    Variant,
    parse_variants,
    shared_config,
)
from lightning_memmap.compare.figures import NO_LOAD, SPEED, compute_figures
from lightning_memmap.compare.folder import VARIANTS, WEIGHTS, check_folder, clear_folder
from lightning_memmap.compare.parity import (
    check_parity,
    count_separate_batches,
    default_tolerance,
    global_losses,
)
from lightning_memmap.compare.prepare import describe_devices, prepare
from lightning_memmap.compare.report import IN_PLACE, Report, VariantResult
from lightning_memmap.compare.run_files import (
    RankRecord,
    RunError,
    RunSpec,
    read_error,
    read_records,
)
from lightning_memmap.compare.variant_data import STORES
from lightning_memmap.errors import describe_error
from lightning_memmap.logged_process import LoggedProcess


def run_in_processes(spec: RunSpec, timeout_s: float) -> list[RankRecord]:
    """Run a variant in new processes, and return their records by rank.

    Raises:
        RunError: The run failed or took too long. All of its processes are ended.
    """
    out = Path(spec.out)
    command = [sys.executable, "-m", "lightning_memmap.compare.worker", str(spec.write())]
    # A run is independent of the process that starts it.
    environment = {key: os.environ[key] for key in os.environ if not key.startswith("PL_")}
    with LoggedProcess(command, out / "log.txt", env=environment) as process:
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            lines = " | ".join(process.tail())
            raise RunError(f"not finished after {timeout_s:g} s (--timeout_s): {lines}") from None
        finally:
            process.kill_group()
    if process.returncode:
        raise read_error(out) or RunError(f"it ended with {process.describe_exit(12)}")
    records = read_records(out)
    ranks = [record.rank for record in records]
    if ranks != list(range(records[0].world_size if records else 1)):
        raise RunError(f"only the ranks {ranks} wrote a record: {' | '.join(process.tail())}")
    return records


class Comparison:
    """A comparison in progress."""

    def __init__(self, options: ComparisonOptions, console: Console, command: str = "") -> None:
        self._options = options
        self._console = console
        self._command = command
        self._config, self._trainer_options, self._unused = shared_config(options.config)
        self._out = Path(options.out)
        self._results = {
            variant: VariantResult(variant.name) for variant in parse_variants(options.variants)
        }
        #: The records of the reference's check run, and the file of its weights.
        self._reference: list[RankRecord] | None = None
        self._weights_path: Path | None = None

    def run(self) -> Report:
        """Run all variants and return the report, unwritten. Ctrl-C keeps what is finished."""
        self._report, self._expected = self._prepare()
        try:
            # The single device with the store is the reference; otherwise the first that runs.
            by_reference = sorted(self._results, key=lambda variant: variant != Variant("auto"))
            try:
                for variant in by_reference:
                    # An ideal loader replays one batch: there is nothing to check.
                    if variant.loader != "ideal":
                        self._run_variant(variant, "check")
            finally:
                if self._weights_path is not None:
                    self._weights_path.unlink(missing_ok=True)
            # Variants alternate, so that changes in the machine's load affect all of them.
            for repeat in range(1, self._options.repeats + 1):
                for variant in self._results:
                    self._run_variant(variant, f"timed{repeat}")
        except KeyboardInterrupt:
            self._report.interrupted = True
            self._console.print("[yellow]interrupted: the report has what is finished[/]")
        self._finish()
        return self._report

    def _prepare(self) -> tuple[Report, list[int]]:
        """Build the store, describe what all variants share, and remove an earlier comparison."""
        options = self._options
        started_s = monotonic()
        check_folder(self._out)
        wants_gpu = self._trainer_options.get("accelerator", "auto") in ("auto", "gpu", "cuda")
        precision = str(self._trainer_options.get("precision", "32-true"))
        tolerance = options.tolerance
        facts = prepare(self._config, options.devices, options.check_steps)
        expected = facts.pop("expected")
        report = Report(
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            command=self._command,
            settings={
                **asdict(options),
                "accelerator": "cuda" if wants_gpu and torch.cuda.is_available() else "cpu",
                "tolerance": default_tolerance(precision) if tolerance is None else tolerance,
                "precision": precision,
                "seed": self._config["seed_everything"],
                "global_batch": facts["data"]["batch_size"] * options.devices,
            },
            reference="",
            variants=[*self._results.values()],
            left_out=self._unused,
            **facts,
        )
        clear_folder(self._out)
        self._print_outcome("store, model and data", "done", started_s)
        return report, expected

    def _spec(self, variant: Variant, name: str) -> RunSpec:
        options = self._options
        settings = self._report.settings
        is_timed = name != "check"
        shared = {**self._trainer_options, "accelerator": settings["accelerator"]}
        return RunSpec(
            kind="timed" if is_timed else "check",
            config=self._config,
            trainer=shared | variant.variant_options(options.devices),
            variant=variant.name,
            devices=options.devices,
            global_batch=settings["global_batch"],
            num_shards=self._report.data["num_shards"],
            warmup_steps=options.warmup_steps if is_timed else 0,
            steps=options.steps if is_timed else options.check_steps,
            transform_is_random=self._report.data["transform_is_random"],
            out=str(self._out.resolve() / VARIANTS / variant.name / name),
            reference=None if self._weights_path is None else str(self._weights_path),
        )

    def _print_outcome(self, title: str, outcome: str, started_s: float) -> None:
        seconds = f"[dim]{monotonic() - started_s:.1f} s[/]"
        self._console.print(f"{escape(title):<42} {outcome}  {seconds}", soft_wrap=True)

    def _run_variant(self, variant: Variant, name: str) -> None:
        """Run a variant, unless an earlier run of it failed. A failure does not end the others."""
        result = self._results[variant]
        if result.status != "pending":
            return
        spec = self._spec(variant, name)
        title = f"{variant.name}: {name.replace('timed', 'timed run ')}"
        started_s = monotonic()
        outcome = "[red]interrupted[/]"
        try:
            with self._console.status(escape(title)):
                records = run_in_processes(spec, self._options.timeout_s)
            if spec.kind == "check":
                self._compare(result, records, Path(spec.out))
            figures = compute_figures(records, spec.kind)
            result.add(figures)
            outcome = f"{figures[SPEED]:,.0f} samples/s" if SPEED in figures else "done"
        except Exception as error:
            # Records may also be inconsistent, for example with different numbers of steps.
            run_error = error if isinstance(error, RunError) else RunError(describe_error(error))
            outcome = self._fail(result, spec, run_error)
        finally:
            self._print_outcome(title, outcome, started_s)
            shutil.rmtree(Path(spec.out) / STORES, ignore_errors=True)
            if Path(spec.out) / WEIGHTS != self._weights_path:
                # A reference that failed: the next variant takes its place.
                (Path(spec.out) / WEIGHTS).unlink(missing_ok=True)

    def _fail(self, result: VariantResult, spec: RunSpec, error: RunError) -> str:
        """Record why a run failed, and return its outcome for the console."""
        # A variant is not supported if its first run raises. A replayed batch has no check run.
        is_first = spec.kind == "check" or (not result.rates and result.parity is None)
        result.status = "refused" if error.refused and is_first else "failed"
        result.reason = str(error)
        if result.status == "failed" and spec.kind == "check" and spec.transform_is_random:
            result.reason += f" ({IN_PLACE})"
        word = "not supported" if result.status == "refused" else "failed"
        return f"[red]{word}[/]: {escape(shorten(result.reason, 300, placeholder=' ...'))}"

    def _compare(self, result: VariantResult, records: list[RankRecord], out: Path) -> None:
        """Compare a check run with the reference. The first one becomes the reference."""
        result.parity = check_parity(
            records,
            self._reference or records,
            self._expected,
            self._report.settings["tolerance"],
            notes=self._notes(count_separate_batches(records)),
        )
        result.check_losses = [loss if isfinite(loss) else None for loss in global_losses(records)]
        if self._reference is None:
            self._reference = records
            self._weights_path = out / WEIGHTS
            self._report.reference = result.variant

    def _notes(self, num: int) -> Sequence[str]:
        """Return known reasons for a difference of a variant with ``num`` separate batches."""
        norms = self._report.model["batch_norms"]
        if not norms or num == 1 or self._trainer_options.get("sync_batchnorm"):
            return []
        return [
            f"the model has {', '.join(norms)}: a step's rows are normalised in {num} parts"
            " (processes, replicas, micro-batches), which is a different training. Use GroupNorm,"
            " or sync_batchnorm with several processes on GPUs, to train the same"
        ]

    def _finish(self) -> None:
        """Set the status of variants that did not fail, and relate speeds to their bounds."""
        self._report.environment["devices"] = describe_devices()
        for variant, result in self._results.items():
            num_done = len(result.rates)
            repeats = self._options.repeats
            if result.status == "pending" and num_done == repeats:
                result.status = "ok"
            elif result.status == "pending":
                result.reason = f"interrupted after {num_done} of {repeats} runs"
            ideal = self._results.get(Variant(variant.strategy, "ideal"))
            if result.rates and ideal and ideal.rates:
                bound = median(ideal.rates)
                result.figures[NO_LOAD] = [rate / bound for rate in result.rates]
