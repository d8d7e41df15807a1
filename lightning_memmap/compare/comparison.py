"""Runs the arms of a comparison one after the other, and makes the report of what came out."""

import json
import math
import shutil
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

import torch
import yaml

from lightning_memmap.compare.arms import Arm, Machine, ModelFacts, parse_arms
from lightning_memmap.compare.child import ConfigCheck
from lightning_memmap.compare.launch import RunResult, run
from lightning_memmap.compare.measure import LEAST_CHECK_STEPS
from lightning_memmap.compare.parity import TOLERANCES, Check, global_losses, judge
from lightning_memmap.compare.report import Report, ScalingPoint
from lightning_memmap.compare.results import ArmResult, cost_of, holding_of, read_trace
from lightning_memmap.compare.spec import RunKind, RunSpec, shared_config
from lightning_memmap.errors import MemmapError

_RUNS = "arms"


class ComparisonError(MemmapError):
    """The comparison cannot begin: model or data cannot be made, or the store not built."""


@dataclass(frozen=True)
class Settings:
    """What the command is told.

    Args:
        config: Path of a config, as for ``lightning-memmap fit``. Its model and data are used,
            its seed, and the options of the Trainer that can be the same for all arms.
        arms: Arms, separated by commas. An arm is a strategy, of this pack or ``auto``, ``ddp``,
            ``fsdp`` or ``model_parallel``; ``+workersN`` feeds it by a DataLoader with N workers,
            ``+ideal`` replays one batch. ``all`` stands for all strategies and, on one device,
            all feeds.
        devices: Devices of each arm; on a CPU processes or logical data devices. A step has
            ``batch_size`` of the config times this many rows, in every arm.
        repeats: Timed runs of each arm.
        steps: Steps that are measured in each of them.
        warmup_steps: Steps before those.
        check_steps: Steps that are checked for parity, in a run of their own.
        scaling: Numbers of devices to measure the speed on as well, such as ``1,2,4``.
        accelerator: ``auto``, ``cpu`` or ``cuda``.
        tolerance: How far losses and weights may differ, relatively; by default as docs/compare.md
            says for the precision.
        timeout_s: A run that takes longer has failed.
        out: Folder of the report.

    Raises:
        ValueError: A number is out of range, or an arm unknown.
    """

    config: str = ""
    arms: str = "all"
    devices: int = 2
    repeats: int = 3
    steps: int = 100
    warmup_steps: int = 10
    check_steps: int = 10
    scaling: str = ""
    accelerator: str = "auto"
    tolerance: float | None = None
    timeout_s: float = 1800.0
    out: str = "runs/compare"

    def __post_init__(self) -> None:
        if not self.config:
            raise ValueError("--config: name the config to run, as for lightning-memmap fit")
        for name in ("devices", "repeats", "warmup_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1 is needed")
        if self.steps < 2:
            raise ValueError(f"steps={self.steps}: at least 2 are needed for a rate")
        if self.check_steps < LEAST_CHECK_STEPS:
            raise ValueError(
                f"check_steps={self.check_steps}: at least {LEAST_CHECK_STEPS} are needed, since"
                " most of them look at one thing more"
            )
        if self.accelerator not in ("auto", "cpu", "cuda"):
            raise ValueError(f"accelerator={self.accelerator!r}: choose auto, cpu or cuda")
        # Written so that NaN is refused, too.
        if self.tolerance is not None and not 0 <= self.tolerance < math.inf:
            raise ValueError(f"tolerance={self.tolerance}: 0 or more, and finite")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s={self.timeout_s}: more than 0 seconds")
        parse_arms(self.arms)
        assert self.scaling_counts is not None

    @property
    def scaling_counts(self) -> tuple[int, ...]:
        """The numbers of devices of ``scaling``."""
        try:
            counts = tuple(int(part) for part in self.scaling.split(",") if part.strip())
        except ValueError:
            counts = (0,)
        if any(count < 1 for count in counts):
            raise ValueError(f"scaling={self.scaling!r}: write numbers of devices, like 1,2,4")
        return counts

    @property
    def split_steps(self) -> int:
        """Steps after those that are measured, in which each part of a step is waited for."""
        return min(10, self.steps)


class Progress(Protocol):
    """Where a comparison shows how far it is."""

    def run(self, title: str, total_steps: int) -> AbstractContextManager["RunProgress"]:
        """A run begins."""

    def note(self, text: str) -> None:
        """Something to be told."""


class RunProgress(Protocol):
    """Where one run shows how far it is."""

    def steps(self, done: int) -> None:
        """So many steps are done."""

    def end(self, text: str) -> None:
        """What came out, in a few words."""


class Comparison:
    """A comparison that is under way.

    Args:
        settings: What to do.
        progress: Where to show how far it is.
        command: The command line, for the report.

    Raises:
        ValueError: The config has no model or no data, or ``out`` holds something else.
    """

    def __init__(self, settings: Settings, progress: Progress, command: str = "") -> None:
        self.settings = settings
        self.arms = parse_arms(settings.arms)
        try:
            config = yaml.safe_load(Path(settings.config).read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            where = " ".join(str(error).split())
            raise ValueError(f"config={settings.config!r} is no yaml file: {where}") from error
        self._config, self._trainer, self._left_out = shared_config(config)
        accelerator = settings.accelerator
        if accelerator == "auto":
            asked = str(self._trainer.get("accelerator", "auto"))
            has_cuda = torch.cuda.is_available() and asked in ("auto", "gpu", "cuda")
            accelerator = "cuda" if has_cuda else "cpu"
        self._trainer["accelerator"] = accelerator
        # Counted without a context on any device, whose memory the arms are to have.
        count = torch.cuda.device_count() if accelerator == "cuda" else settings.devices
        self.machine = Machine(accelerator, count)
        self._progress = progress
        self._command = command
        self._out = Path(settings.out)
        self._created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._facts: dict[str, Any] = {}
        self._results = {
            arm.name: ArmResult(
                arm.name, arm.strategy, str(arm.feed), arm.description, "pending", "not run"
            )
            for arm in self.arms
        }
        self._checks: dict[str, RunResult] = {}
        self._timed: dict[str, list[RunResult]] = {arm.name: [] for arm in self.arms}
        self._scaling: dict[tuple[str, int], ScalingPoint] = {}
        self._interrupted = False

    def run(self) -> Report:
        """Do all runs. Ctrl-C ends them; what is finished is in the report.

        Raises:
            ComparisonError: Model or data cannot be made, or the store not built.
            ValueError: The config has a name or a value that the classes do not take, or ``out``
                holds something else.
        """
        ConfigCheck(self._spec("prepare", None, "prepare"))
        self._clear()
        try:
            self._prepare()
            self._find_obstacles()
            self._check_arms()
            # Arms take turns, so that what changes on the machine meanwhile meets all of them.
            for repeat in range(1, self.settings.repeats + 1):
                for arm in self._going():
                    self._time_arm(arm, repeat)
            self._scale()
        except KeyboardInterrupt:
            self._interrupted = True
            self._progress.note("[yellow]interrupted: the report has what is finished[/]")
        return self._report()

    def _clear(self) -> None:
        out = self._out
        if (
            out.is_dir()
            and any(out.iterdir())
            and not (out / "report.json").exists()
            and not ((out / _RUNS).is_dir())
        ):
            raise ValueError(
                f"out={self.settings.out!r} holds something else than a comparison: choose"
                " another folder"
            )
        shutil.rmtree(out / _RUNS, ignore_errors=True)
        for name in ("report.json", "report.html"):
            (out / name).unlink(missing_ok=True)
        out.mkdir(parents=True, exist_ok=True)

    def _spec(self, kind: RunKind, arm: Arm | None, folder: str, devices: int = 0) -> RunSpec:
        settings = self.settings
        devices = devices or settings.devices
        options = arm.trainer_options(devices) if arm is not None else {"devices": 1}
        timed = kind == "timed"
        return RunSpec(
            kind=kind,
            config=self._config,
            trainer={**self._trainer, **options},
            arm=arm.name if arm is not None else "",
            devices=devices,
            global_batch=int(self._facts.get("batch_size", 0)) * devices,
            warmup_steps=settings.warmup_steps if timed else 0,
            steps=settings.steps if timed else settings.check_steps,
            split_steps=settings.split_steps if timed else 0,
            calm=kind == "check",
            transform_is_random=bool(self._facts.get("transform_is_random", False)),
            out=str((self._out / _RUNS / folder).resolve()),
        )

    def _run(self, title: str, spec: RunSpec) -> RunResult:
        with self._progress.run(title, spec.total_steps) as progress:
            result = run(spec, self.settings.timeout_s, progress.steps)
            progress.end(_outcome(result, spec))
        return result

    def _prepare(self) -> None:
        spec = self._spec("prepare", None, "prepare")
        result = self._run("store, model and data", spec)
        if result.error is not None:
            raise ComparisonError(f"{result.error.message} (see {result.out / 'log.txt'})")
        text = (result.out / "facts.json").read_text(encoding="utf-8")
        self._facts = json.loads(text)

    def _find_obstacles(self) -> None:
        model = ModelFacts(configures_itself=self._facts["configures_itself"])
        for arm in self.arms:
            obstacle = arm.obstacle(self.machine, self.settings.devices, model)
            if obstacle is not None:
                self._stop(arm, "unavailable", obstacle)
                self._progress.note(f"[yellow]{arm.name}: cannot run here: {obstacle}[/]")

    def _check_arms(self) -> None:
        for arm in self._going():
            if arm.feed.kind == "ideal":
                # It trains on one batch again and again: there is nothing to check.
                continue
            result = self._run(f"{arm.name}: check", self._spec("check", arm, f"{arm.name}/check"))
            if result.error is not None:
                self._stop(
                    arm, "refused" if result.error.refused else "failed", result.error.message
                )
            else:
                self._checks[arm.name] = result

    def _time_arm(self, arm: Arm, repeat: int) -> None:
        spec = self._spec("timed", arm, f"{arm.name}/timed{repeat}")
        title = f"{arm.name}: timed run {repeat} of {self.settings.repeats}"
        result = self._run(title, spec)
        if result.error is not None:
            self._stop(arm, "failed", result.error.message)
        else:
            self._timed[arm.name].append(result)

    def _scale(self) -> None:
        batch = int(self._facts["batch_size"])
        model = ModelFacts(configures_itself=self._facts["configures_itself"])
        for devices in self.settings.scaling_counts:
            for arm in self._going():
                if arm.strategy == "auto":
                    continue
                obstacle = arm.obstacle(self.machine, devices, model)
                point = ScalingPoint(arm.name, devices, batch * devices, reason=obstacle or "")
                if obstacle is None and devices == self.settings.devices:
                    rates = tuple(
                        cost_of(
                            [result], point.global_batch, self.settings.steps
                        ).samples_per_s.median
                        for result in self._timed[arm.name]
                    )
                    point = replace(point, samples_per_s=rates)
                elif obstacle is None:
                    spec = self._spec("timed", arm, f"{arm.name}/scaling{devices}", devices)
                    result = self._run(f"{arm.name}: on {devices} devices", spec)
                    if result.error is not None:
                        point = replace(point, reason=result.error.message)
                    else:
                        cost = cost_of([result], point.global_batch, self.settings.steps)
                        point = replace(point, samples_per_s=cost.samples_per_s.values)
                self._scaling[arm.name, devices] = point

    def _going(self) -> list[Arm]:
        """The arms that nothing has stopped."""
        return [arm for arm in self.arms if self._results[arm.name].status == "pending"]

    def _stop(self, arm: Arm, status: str, reason: str) -> None:
        self._results[arm.name] = replace(self._results[arm.name], status=status, reason=reason)

    def _report(self) -> Report:
        reference = self._reference()
        facts = self._facts
        results = [self._result(arm, reference) for arm in self.arms]
        results = _with_shares(results, reference, facts.get("global_batch") or 1)
        names = ("store_path", "num_rows", "num_shards", "row_bytes", "num_bytes", "fields",
                 "store_s", "check_store_s", "steps_per_epoch", "batch_size", "data_class",
                 "has_transform", "transform_is_random", "has_eval_transform")  # fmt: skip
        model = ("model_class", "num_parameters", "parameter_bytes", "dropouts", "batch_norms",
                 "configures_itself", "automatic_optimization")  # fmt: skip
        settings = asdict(self.settings) | {
            "global_batch": facts.get("global_batch"),
            "split_steps": self.settings.split_steps,
            "accelerator": self.machine.accelerator,
            "precision": str(self._trainer.get("precision", "32-true")),
            "seed": self._config["seed_everything"],
            "tolerance": self._tolerance,
        }
        return Report(
            created=self._created,
            command=self._command,
            environment=facts.get("environment", {}),
            settings=settings,
            data={name: facts.get(name) for name in names},
            model={name: facts.get(name) for name in model},
            reference=reference.name if reference is not None else "",
            arms=tuple(results),
            scaling=tuple(self._scaling.values()),
            left_out=tuple(self._left_out),
            interrupted=self._interrupted,
        )

    def _reference(self) -> Arm | None:
        """The single device with the rows of the store where it was run, else the first arm."""
        checked = [arm for arm in self.arms if arm.is_compared and arm.name in self._checks]
        return next((arm for arm in checked if arm == Arm("auto")), next(iter(checked), None))

    @property
    def _tolerance(self) -> float:
        if self.settings.tolerance is not None:
            return self.settings.tolerance
        precision = str(self._trainer.get("precision", "32"))
        return next(value for key, value in {**TOLERANCES, "": 1e-3}.items() if key in precision)

    def _result(self, arm: Arm, reference: Arm | None) -> ArmResult:
        result = self._results[arm.name]
        check, timed = self._checks.get(arm.name), self._timed[arm.name]
        logs = sorted((self._out / _RUNS / arm.name).glob("*/log.txt"))
        result = replace(result, logs=tuple(str(path.relative_to(self._out)) for path in logs))
        if check is not None:
            result = replace(
                result,
                holding=holding_of(check, arm, self._facts),
                check_losses=tuple(global_losses(check.ranks)) if arm.is_compared else (),
                trace=read_trace(check),
            )
            if arm.is_compared and reference is not None:
                parity = judge(
                    Check.of(check),
                    Check.of(self._checks[reference.name]),
                    self._facts["expected"],
                    self._tolerance,
                    is_random=self._facts["transform_is_random"]
                    and not self._facts["has_eval_transform"],
                    notes=self._notes(arm, check),
                )
                result = replace(result, parity=parity)
        if timed:
            result = replace(
                result,
                cost=cost_of(timed, self._facts["global_batch"], self.settings.steps),
                timed_losses=tuple(global_losses(timed[0].ranks)),
            )
        if result.status == "pending" and len(timed) == self.settings.repeats:
            result = replace(result, status="ok", reason="")
        elif result.status == "pending":
            result = replace(
                result, reason=f"interrupted after {len(timed)} of {self.settings.repeats} runs"
            )
        return result

    def _notes(self, arm: Arm, check: RunResult) -> list[str]:
        parts = {rank["data_rank"] for rank in check.ranks}
        batch_norms = self._facts["batch_norms"]
        if batch_norms and len(parts) > 1 and not self._trainer.get("sync_batchnorm"):
            return [
                f"the model has {', '.join(batch_norms)}: each of the {len(parts)} processes"
                " normalises by its own rows, which is another training. GroupNorm, or"
                " sync_batchnorm on GPUs, would make it the same"
            ]
        return []


def _with_shares(
    results: list[ArmResult], reference: Arm | None, global_batch: int
) -> list[ArmResult]:
    """Add what follows from other arms: the share of the ideal loader's speed, where the same
    strategy was run with it, and operations a second, counted in the reference."""
    name = reference.name if reference is not None else ""
    flops = [arm.holding.flops_per_step for arm in results if arm.arm == name and arm.holding]
    ideals = {
        result.strategy: result.cost.samples_per_s.median
        for result in results
        if result.feed == "ideal" and result.cost is not None
    }
    found = []
    for result in results:
        if result.cost is not None:
            rate = result.cost.samples_per_s.median
            ideal = ideals.get(result.strategy)
            cost = replace(
                result.cost,
                ideal_share=rate / ideal if ideal else None,
                flops_per_s=flops[0] / global_batch * rate if flops else None,
            )
            result = replace(result, cost=cost)
        found.append(result)
    return found


def _outcome(result: RunResult, spec: RunSpec) -> str:
    if result.error is not None:
        word = "cannot do this" if result.error.refused else "failed"
        return f"[red]{word}[/]: {_shortened(result.error.message)}"
    if spec.kind == "timed":
        rate = cost_of([result], spec.global_batch, spec.steps).samples_per_s.median
        return f"{rate:,.0f} samples/s"
    return "done"


def _shortened(text: str, length: int = 300) -> str:
    line = " ".join(text.split()).replace("[", "\\[")
    return line if len(line) <= length else line[:length] + " ..."
