"""Runs the variants of a comparison one after the other, and reports what came out."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from datetime import datetime, timezone
from itertools import zip_longest
from math import isfinite
from pathlib import Path
from statistics import median
from textwrap import shorten
from time import monotonic, sleep

import torch
from rich.console import Console
from rich.markup import escape

from lightning_memmap.compare.config import (
    ComparisonOptions,
    RunSpec,
    Variant,
    parse_variants,
    shared_config,
)
from lightning_memmap.compare.folder import VARIANTS, ComparisonFolder
from lightning_memmap.compare.loaders import STORES
from lightning_memmap.compare.measure import IS_READY
from lightning_memmap.compare.metrics import NO_LOAD, SPEED, Rank, figures_of
from lightning_memmap.compare.parity import CheckedRun, check_parity, default_tolerance
from lightning_memmap.compare.prepare import describe_devices, prepare
from lightning_memmap.compare.report import IN_PLACE, Report, VariantResult
from lightning_memmap.errors import describe_error
from lightning_memmap.launched import Launched

#: Runs whose processes start together, and import side by side.
_TOGETHER = min(4, len(os.sched_getaffinity(0)))


class RunError(Exception):
    """A run gave no result."""

    def __init__(self, message: str, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class Run:
    """A run in fresh processes. The first one has started: it imports, and waits to go on."""

    def __init__(self, spec: RunSpec) -> None:
        self._out = Path(spec.out)
        command = [sys.executable, "-m", "lightning_memmap.compare.worker", str(spec.write())]
        # A run is independent of whatever started this process.
        environment = {key: os.environ[key] for key in os.environ if not key.startswith("PL_")}
        log = self._out / "log.txt"
        self._launched = Launched(command, log, env=environment, stdin=subprocess.PIPE)

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until it has imported what it needs, or ended."""
        deadline_s = monotonic() + timeout_s
        while not (self._out / IS_READY).exists() and self._launched.poll() is None:
            if monotonic() > deadline_s:
                raise self._error(f"not ready after {timeout_s:g} s (--timeout_s)")
            sleep(0.01)

    def result(self, timeout_s: float) -> list[Rank]:
        """Have it go on, wait for its end, and read what its processes have measured."""
        launched = self._launched
        try:
            launched.communicate(b"go on", timeout_s)
        except subprocess.TimeoutExpired:
            raise self._error(f"not finished after {timeout_s:g} s (--timeout_s)") from None
        if launched.returncode:
            raise _read_error(self._out, launched)
        ranks = read_ranks(self._out)
        found = [rank.rank for rank in ranks]
        if found != list(range(ranks[0].world_size if ranks else 1)):
            raise self._error(f"only the ranks {found} wrote what they measured")
        return ranks

    def _error(self, what: str) -> RunError:
        return RunError(f"{what}: {' | '.join(self._launched.tail())}")

    def close(self) -> None:
        """End all of its processes."""
        # This closes its input, too.
        with self._launched:
            self._launched.kill_group()


def read_ranks(folder: Path) -> list[Rank]:
    """Read what the processes of a run have written, by rank."""
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("rank*.json")]
    return sorted((Rank(**json.loads(text)) for text in texts), key=lambda rank: rank.rank)


def _read_error(out: Path, launched: Launched) -> RunError:
    # What the first process says that failed, and wrote it down before it was ended.
    for path in sorted(out.glob("error-*.json"), key=lambda path: path.stat().st_mtime_ns):
        with suppress(ValueError):
            found = json.loads(path.read_text(encoding="utf-8"))
            return RunError(found["message"], found["refused"])
    return RunError(f"it ended with {launched.how_it_ended(12)}")


class Comparison:
    """A comparison that is under way."""

    def __init__(self, options: ComparisonOptions, console: Console, command: str = "") -> None:
        self._options, self._console, self._command = options, console, command
        self._config, self._trainer, self._left_out = shared_config(options.config)
        self._folder = ComparisonFolder(Path(options.out))
        self._runs = self._folder.path.resolve() / VARIANTS
        self._results = {
            each: VariantResult(each.name) for each in parse_variants(options.variants)
        }
        #: What the others are compared with.
        self._reference: CheckedRun | None = None

    def run(self) -> Report:
        """Do all runs. After Ctrl-C, the report, which is not written yet, has what is finished."""
        self._report, self._expected = self._prepare()
        try:
            # The single device with the store is the reference; without it, the first that runs.
            first = sorted(self._results, key=lambda each: each != Variant("auto"))
            # An ideal loader gives one batch again and again: there is nothing to check.
            self._do([each for each in first if each.loader != "ideal"], "check")
            # Variants alternate, so that whatever changes on the machine affects all of them.
            for repeat in range(1, self._options.repeats + 1):
                self._do([*self._results], f"timed{repeat}")
        except KeyboardInterrupt:
            self._report.interrupted = True
            self._console.print("[yellow]interrupted: the report has what is finished[/]")
        self._finish()
        return self._report

    def _prepare(self) -> tuple[Report, list[int]]:
        """Build the store, learn what all variants need, and remove an earlier comparison."""
        options, started_s = self._options, monotonic()
        self._folder.check()
        is_asked = self._trainer.get("accelerator", "auto") in ("auto", "gpu", "cuda")
        precision = str(self._trainer.get("precision", "32-true"))
        given = options.tolerance
        facts = prepare(self._config, options.devices, options.check_steps)
        expected = facts.pop("expected")
        report = Report(
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            command=self._command,
            settings={
                **asdict(options),
                "accelerator": "cuda" if is_asked and torch.cuda.is_available() else "cpu",
                "tolerance": default_tolerance(precision) if given is None else given,
                "precision": precision,
                "seed": self._config["seed_everything"],
                "global_batch": facts["data"]["batch_size"] * options.devices,
            },
            reference="",
            variants=[*self._results.values()],
            left_out=self._left_out,
            **facts,
        )
        self._folder.clear()
        self._note_run("store, model and data", "done", started_s)
        return report, expected

    def _spec(self, variant: Variant, name: str) -> RunSpec:
        options, settings, is_timed = self._options, self._report.settings, name != "check"
        mine = variant.trainer_options(options.devices)
        return RunSpec(
            kind="timed" if is_timed else "check",
            config=self._config,
            trainer={**self._trainer, "accelerator": settings["accelerator"], **mine},
            variant=variant.name,
            devices=options.devices,
            global_batch=settings["global_batch"],
            num_shards=self._report.data["num_shards"],
            warmup_steps=options.warmup_steps if is_timed else 0,
            steps=options.steps if is_timed else options.check_steps,
            transform_is_random=self._report.data["transform_is_random"],
            out=str(self._runs / variant.name / name),
        )

    def _note_run(self, title: str, outcome: str, started_s: float) -> None:
        seconds = f"[dim]{monotonic() - started_s:.1f} s[/]"
        self._console.print(f"{escape(title):<42} {outcome}  {seconds}", soft_wrap=True)

    def _do(self, variants: Sequence[Variant], name: str) -> None:
        """Do a run of each variant that nothing has stopped."""
        pending = [each for each in variants if self._results[each].status == "pending"]
        for first in range(0, len(pending), _TOGETHER):
            some = pending[first : first + _TOGETHER]
            with ExitStack() as stack:
                runs = [stack.enter_context(closing(self._try(each, name))) for each in some]
                # To import takes longer than most runs: a few do it side by side, none while
                # another one is measured. All start, all are waited for, then each is finished.
                for _ in zip_longest(*runs):
                    pass

    def _try(self, variant: Variant, name: str) -> Generator[None, None, None]:
        """Do a run, whose failure costs no other anything. Yields once started, and once ready."""
        result, spec = self._results[variant], self._spec(variant, name)
        title = f"{variant.name}: {name.replace('timed', 'timed run ')}"
        started_s, outcome = monotonic(), "[red]interrupted[/]"
        try:
            with closing(Run(spec)) as run:
                yield
                run.wait_until_ready(self._options.timeout_s)
                yield
                started_s = monotonic()
                with self._console.status(escape(title)):
                    ranks = run.result(self._options.timeout_s)
            if spec.kind == "check":
                self._compare(result, ranks, Path(spec.out))
            figures = figures_of(ranks, spec.kind)
            result.add(figures)
            outcome = f"{figures[SPEED]:,.0f} samples/s" if SPEED in figures else "done"
        except Exception as error:
            # Also where it wrote no weights, or its processes have done other numbers of steps.
            found = error if isinstance(error, RunError) else RunError(describe_error(error))
            # In its first run; the replayed batch has no check run.
            refused = found.refused and name == ("timed1" if variant.loader == "ideal" else "check")
            result.status, result.reason = "refused" if refused else "failed", str(found)
            if not refused and spec.kind == "check" and self._report.data["transform_is_random"]:
                result.reason += f" ({IN_PLACE})"
            word = "not supported" if refused else "failed"
            outcome = f"[red]{word}[/]: {escape(shorten(result.reason, 300, placeholder=' ...'))}"
        finally:
            self._note_run(title, outcome, started_s)
            shutil.rmtree(Path(spec.out) / STORES, ignore_errors=True)

    def _compare(self, result: VariantResult, ranks: list[Rank], folder: Path) -> None:
        """Compare a check run with that of the reference, whose weights alone are kept."""
        report, checked = self._report, CheckedRun.of(ranks, folder)
        result.parity = check_parity(
            checked,
            self._reference or checked,
            self._expected,
            report.settings["tolerance"],
            notes=self._notes(checked.num_parts),
        )
        result.check_losses = [loss if isfinite(loss) else None for loss in checked.losses]
        if self._reference is None:
            self._reference, report.reference = checked, result.variant

    def _notes(self, num_parts: int) -> Sequence[str]:
        batch_norms = self._report.model["batch_norms"]
        if not batch_norms or num_parts == 1 or self._trainer.get("sync_batchnorm"):
            return []
        return [
            f"the model has {', '.join(batch_norms)}: a step's rows are normalised in {num_parts}"
            " parts (processes, replicas, micro-batches), which is a different training. GroupNorm,"
            " or in several processes on GPUs sync_batchnorm, would make it the same"
        ]

    def _finish(self) -> None:
        """Say what became of variants that nothing stopped, and relate speeds to their bounds."""
        self._report.environment["devices"] = describe_devices()
        for variant, result in self._results.items():
            done, repeats = len(result.rates), self._options.repeats
            if result.status == "pending" and done == repeats:
                result.status = "ok"
            elif result.status == "pending":
                result.reason = f"interrupted after {done} of {repeats} runs"
            ideal = self._results.get(Variant(variant.strategy, "ideal"))
            if result.rates and ideal and ideal.rates:
                bound = median(ideal.rates)
                result.figures[NO_LOAD] = [rate / bound for rate in result.rates]
