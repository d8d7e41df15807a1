"""Runs the variants of a comparison one after the other, and reports what came out."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
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

from lightning_memmap.arguments import read_config
from lightning_memmap.compare.config import (
    ComparisonOptions,
    RunKind,
    RunSpec,
    Variant,
    parse_variants,
    shared_config,
)
from lightning_memmap.compare.facts import describe_devices, prepare
from lightning_memmap.compare.loaders import STORES
from lightning_memmap.compare.metrics import NO_LOAD, SPEED, Rank, figures_of, shares_of
from lightning_memmap.compare.parity import CheckedRun, check_parity, default_tolerance
from lightning_memmap.compare.report import Report, VariantResult
from lightning_memmap.launched import Launched

RUNS = "variants"
_POLL_S = 0.1
#: What a launcher sets for its processes. A run is independent of whatever started this process.
_LAUNCHER = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


class RunError(Exception):
    """A run gave no result."""

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
    """Do a run in fresh processes, and wait for it."""
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
        if found != list(range(ranks[0].world_size if ranks else 1)):
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


class Comparison:
    """A comparison that is under way."""

    def __init__(self, options: ComparisonOptions, console: Console, command: str = "") -> None:
        self._options, self._console = options, console
        self._config, self._trainer, left_out = shared_config(read_config(options.config))
        is_asked = self._trainer.get("accelerator", "auto") in ("auto", "gpu", "cuda")
        accelerator = "cuda" if is_asked and torch.cuda.is_available() else "cpu"
        precision = str(self._trainer.get("precision", "32-true"))
        given = options.tolerance
        self._runs = Path(options.out).resolve() / RUNS
        self._results = {
            each: VariantResult(each.name) for each in parse_variants(options.variants)
        }
        self._report = Report(
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            command=command,
            environment={},
            settings={
                **asdict(options),
                "accelerator": accelerator,
                "tolerance": default_tolerance(precision) if given is None else given,
                "precision": precision,
                "seed": self._config["seed_everything"],
                "global_batch": 0,  # Known once the data is.
            },
            data={},
            model={},
            reference="",
            variants=[*self._results.values()],
            left_out=left_out,
        )
        self._expected: list[int] = []
        #: What the others are compared with.
        self._reference: CheckedRun | None = None
        #: By folder the runs that have been started, and wait for their spec.
        self._ahead: dict[str, Launched] = {}

    def run(self) -> Report:
        """Do all runs. After Ctrl-C, the report, which is not written yet, has what is finished."""
        try:
            self._prepare()
            self._do_runs()
        except KeyboardInterrupt:
            if not self._report.data:
                raise
            self._report.interrupted = True
            self._note("[yellow]interrupted: the report has what is finished[/]")
        finally:
            for launched in self._ahead.values():
                launched.kill_group()
        self._finish()
        return self._report

    def _do_runs(self) -> None:
        # An ideal loader gives one batch again and again: there is nothing to check.
        runs = [(each, "check") for each in self._pending() if each.loader != "ideal"]
        # The single device with the store is the reference; without it, the first that runs.
        runs.sort(key=lambda run: run[0] != Variant("auto"))
        # Variants alternate, so that whatever changes on the machine affects all of them.
        for repeat in range(1, self._options.repeats + 1):
            runs += [(each, f"timed{repeat}") for each in self._pending()]
        for index, (variant, name) in enumerate(runs):
            if variant in self._pending():
                later = (run for run in runs[index + 1 :] if run[0] in self._pending())
                self._try(variant, name, next(later, None))

    def _prepare(self) -> None:
        """Build the store, learn what all variants need, and remove an earlier comparison."""
        report, out, started_s = self._report, self._runs.parent, monotonic()
        is_ours = (out / "report.json").exists() or self._runs.is_dir()
        if out.is_dir() and any(out.iterdir()) and not is_ours:
            raise ValueError(
                f"out={self._options.out!r} holds something other than a comparison: choose"
                " another folder"
            )
        facts = prepare(self._config, self._options.devices, self._options.check_steps)
        report.environment, report.data = facts["environment"], facts["data"]
        report.model, self._expected = facts["model"], facts["expected"]
        report.settings["global_batch"] = report.data["batch_size"] * self._options.devices
        shutil.rmtree(self._runs, ignore_errors=True)
        for name in ("report.json", "report.html"):
            (out / name).unlink(missing_ok=True)
        self._note_run("store, model and data", "done", started_s)

    def _spec(self, kind: RunKind, folder: str, variant: Variant) -> RunSpec:
        options, settings, is_timed = self._options, self._report.settings, kind == "timed"
        mine = variant.trainer_options(options.devices)
        return RunSpec(
            kind=kind,
            config=self._config,
            trainer={**self._trainer, "accelerator": settings["accelerator"], **mine},
            variant=variant.name,
            devices=options.devices,
            global_batch=settings["global_batch"],
            warmup_steps=options.warmup_steps if is_timed else 0,
            steps=options.steps if is_timed else options.check_steps,
            transform_is_random=self._report.data["transform_is_random"],
            out=str(self._runs / folder),
        )

    def _launch_ahead(self, folder: str) -> None:
        """Half of a short run is imports: have the next do them while nothing is timed."""
        self._ahead[folder] = launch(self._runs / folder)

    def _run(self, title: str, spec: RunSpec, started: Launched | None = None) -> list[Rank]:
        """Do a run, and print a line that says what came out."""
        started_s, outcome = monotonic(), "[red]interrupted[/]"
        try:
            with self._console.status(escape(title)) as status:

                def show(done: int) -> None:
                    status.update(f"{escape(title)}, step {done} of {spec.total_steps}")

                ranks = run(spec, self._options.timeout_s, show, started)
            is_timed = spec.kind == "timed"
            outcome = f"{figures_of(ranks, 'timed')[SPEED]:,.0f} samples/s" if is_timed else "done"
        except RunError as error:
            word = "not supported" if error.refused else "failed"
            outcome = f"[red]{word}[/]: {escape(shorten(str(error), 300, placeholder=' ...'))}"
            raise
        finally:
            self._note_run(title, outcome, started_s)
        return ranks

    def _note_run(self, title: str, outcome: str, started_s: float) -> None:
        seconds = f"[dim]{monotonic() - started_s:.1f} s[/]"
        self._note(f"{escape(title):<42} {outcome}  {seconds}")

    def _note(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False)

    def _pending(self) -> list[Variant]:
        """The variants that nothing has stopped."""
        return [each for each, result in self._results.items() if result.status == "pending"]

    def _try(self, variant: Variant, name: str, later: tuple[Variant, str] | None) -> None:
        """Do a run of a variant, or stop the variant: its failure costs no other anything."""
        kind: RunKind = "check" if name == "check" else "timed"
        result, folder = self._results[variant], f"{variant.name}/{name}"
        started = self._ahead.pop(folder, None)
        try:
            # If this run fails, a later one of the same variant will not come.
            if kind == "check" and later and later[0] != variant:
                self._launch_ahead(f"{later[0].name}/{later[1]}")
            spec = self._spec(kind, folder, variant)
            title = f"{variant.name}: {name.replace('timed', 'timed run ')}"
            ranks = self._run(title, spec, started)
            if kind == "check" and variant.is_compared:
                self._compare(result, ranks, Path(spec.out))
            result.add(figures_of(ranks, kind))
        except RunError as error:
            # In its first run; the replayed batch has no check run.
            refused = error.refused and name == ("timed1" if variant.loader == "ideal" else "check")
            result.status, result.reason = "refused" if refused else "failed", str(error)
        except Exception as error:
            # Its weights may not be there, or its processes may have done other numbers of steps.
            result.status = "failed"
            result.reason = f"what it wrote cannot be evaluated: {error!r}"
        finally:
            shutil.rmtree(self._runs / folder / STORES, ignore_errors=True)

    def _compare(self, result: VariantResult, ranks: list[Rank], folder: Path) -> None:
        """Compare a check run with that of the reference, whose weights alone are kept."""
        report, checked = self._report, CheckedRun.of(ranks, folder)
        result.parity = check_parity(
            checked,
            self._reference or checked,
            self._expected,
            report.settings["tolerance"],
            is_random=report.data["transform_is_random"] and not report.data["has_eval_transform"],
            notes=self._notes(len(shares_of(ranks))),
        )
        result.check_losses = [loss if isfinite(loss) else None for loss in checked.losses]
        if self._reference is None:
            self._reference, report.reference = checked, result.variant

    def _notes(self, num_shares: int) -> Sequence[str]:
        batch_norms = self._report.model["batch_norms"]
        if not batch_norms or num_shares == 1 or self._trainer.get("sync_batchnorm"):
            return []
        return [
            f"the model has {', '.join(batch_norms)}: each of the {num_shares} processes normalises"
            " by its own rows, which is a different training. GroupNorm, or sync_batchnorm on"
            " GPUs, would make it the same"
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
            if result.rates and ideal is not None and ideal.rates:
                bound = median(ideal.rates)
                result.figures[NO_LOAD] = [rate / bound for rate in result.rates]
