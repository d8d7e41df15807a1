"""Makes the results of a report from the runs of the variants."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from statistics import median

import msgspec

from lightning_memmap.compare.report.figures import Measured, Run, figures_of, rate_of
from lightning_memmap.compare.report.footprint import Footprint, footprint_of
from lightning_memmap.compare.report.parity import CheckedRun, Parity, check_parity, global_losses
from lightning_memmap.compare.report.records import CheckRank, DevicePeak, TimedRank, by_data_rank
from lightning_memmap.compare.report.report import Losses, Process, Settings, Status, VariantResult
from lightning_memmap.compare.run.launch import RunResult
from lightning_memmap.compare.run.variants import Variant
from lightning_memmap.compare.run.worker import Facts


@dataclass
class VariantRuns:
    """The runs of a variant so far.

    Args:
        variant: The variant.
        status: As in `VariantResult`; ``pending`` until all runs are done.
        reason: Why it was stopped.
        checks: Its check run, if that succeeded.
        timed: Its timed runs that succeeded.
    """

    variant: Variant
    status: Status = "pending"
    reason: str = ""
    checks: list[RunResult[CheckRank]] = field(default_factory=list)
    timed: list[RunResult[TimedRank]] = field(default_factory=list)

    def stop(self, status: Status, reason: str) -> None:
        """Do no further runs of this variant.

        Args:
            status: As in `VariantResult`.
            reason: Why, for the report.
        """
        self.status, self.reason = status, reason

    @property
    def runs(self) -> list[Run]:
        """The records of the timed runs."""
        return [result.ranks for result in self.timed]

    def footprint(self, global_batch: int) -> Footprint | None:
        """Return the footprint of the check run; None where there was no such run.

        Args:
            global_batch: Rows of a step.

        Returns:
            The footprint of the first check run, or None.
        """
        found = [footprint_of(c.ranks, self.variant.loader, global_batch) for c in self.checks]
        return found[0] if found else None


@dataclass(frozen=True)
class Findings:
    """Makes the results of all variants.

    Args:
        variants: Their runs.
        facts: What was found out about model and data.
        settings: The options as they are used.
        syncs_batch_norm: Whether the Trainer has ``sync_batchnorm``.
        logs: Folder of the runs, in that of the report.
    """

    variants: Sequence[VariantRuns]
    facts: Facts
    settings: Settings
    syncs_batch_norm: bool
    logs: Path

    @property
    def reference(self) -> VariantRuns | None:
        """The variant that the others are compared with; None where no check run succeeded.

        It is the single device with the memory-mapped store if that was checked, else the first
        checked variant.
        """
        checked = [each for each in self.variants if each.variant.is_compared and each.checks]
        preferred = [each for each in checked if each.variant == Variant("auto")]
        return next(iter(preferred + checked), None)

    @property
    def results(self) -> tuple[VariantResult, ...]:
        """What the report says of the variants."""
        return tuple(map(self._result_or_failure, self.variants))

    def _result_or_failure(self, runs: VariantRuns) -> VariantResult:
        """A variant whose records fit no other's has failed, and costs the others nothing."""
        try:
            return self._result(runs)
        except Exception as error:
            reason = f"what it measured cannot be evaluated: {type(error).__name__}: {error}"
            return self._result(VariantRuns(runs.variant, "failed", reason))

    def _result(self, runs: VariantRuns) -> VariantResult:
        variant, status, reason = runs.variant, runs.status, runs.reason
        if status == "pending":
            done = len(runs.timed)
            status = "ok" if done == self.settings.repeats else status
            reason = (
                ""
                if status == "ok"
                else f"interrupted after {done} of {self.settings.repeats} runs"
            )
        logs = sorted((self.logs / variant.name).glob("*/log.txt"))
        result = VariantResult(
            variant=variant.name,
            strategy=variant.strategy,
            loader=variant.loader_name,
            description=variant.description,
            status=status,
            reason=reason,
            figures=figures_of(self._measured(runs)),
            logs=tuple(str(path.relative_to(self.logs.parent)) for path in logs),
        )
        if runs.checks:
            (check,) = runs.checks
            losses = global_losses(check.ranks) if variant.is_compared else []
            result = msgspec.structs.replace(
                result,
                parity=self._parity(check) if variant.is_compared else None,
                footprint=runs.footprint(self.settings.global_batch),
                check_losses=_known(losses),
                trace=_read_trace(check.folder),
            )
        if runs.timed:
            result = msgspec.structs.replace(
                result,
                processes=tuple(_processes(runs.runs[-1])),
                device_peaks=_device_peaks(runs.runs),
                timed_losses=_known(global_losses(runs.runs[0])),
            )
        return result

    def _measured(self, runs: VariantRuns) -> Measured:
        rows = self.settings.global_batch
        ideals = [
            each.runs
            for each in self.variants
            if each.variant == Variant(runs.variant.strategy, "ideal") and each.runs
        ]
        reference = self.reference and self.reference.footprint(rows)
        return Measured(
            runs=runs.runs,
            footprint=runs.footprint(rows),
            global_batch=rows,
            steps=self.settings.steps,
            ideal_rate=median(map(rate_of, ideals[0])) if ideals else None,
            flops_per_row=reference.flops_per_step / rows if reference else None,
        )

    def _parity(self, check: RunResult[CheckRank]) -> Parity | None:
        if self.reference is None:
            return None
        (reference,) = self.reference.checks
        data = self.facts.data
        return check_parity(
            CheckedRun.of(check.ranks, check.folder),
            CheckedRun.of(reference.ranks, reference.folder),
            self.facts.expected,
            self.settings.tolerance,
            is_random=data.transform_is_random and not data.has_eval_transform,
            notes=self._notes(len(by_data_rank(check.ranks))),
        )

    def _notes(self, num_shares: int) -> list[str]:
        batch_norms = self.facts.model.batch_norms
        if not batch_norms or num_shares == 1 or self.syncs_batch_norm:
            return []
        return [
            f"the model has {', '.join(batch_norms)}: each of the {num_shares} processes normalises"
            " by its own rows, which is a different training. GroupNorm, or sync_batchnorm on"
            " GPUs, would make it the same"
        ]


def _known(losses: Sequence[float]) -> Losses:
    return tuple(loss if isfinite(loss) else None for loss in losses)


def _read_trace(folder: Path) -> dict[str, tuple[float, ...]]:
    """The memory trace of a check run on rank 0; empty where there is none."""
    path = folder / "memory_trace_rank0.json"
    if not path.exists():
        return {}
    return msgspec.json.decode(path.read_bytes(), type=dict[str, tuple[float, ...]])


def _processes(run: Run) -> Iterator[Process]:
    """All processes of a run once: ranks see their own children, and rank 0 the other ranks."""
    names = {rank.pid: f"rank {rank.rank}" for rank in run}
    found = {process.pid: process for rank in reversed(run) for process in rank.memory}

    def name(pid: int) -> str:
        if pid in names:
            return names[pid]
        parent = found[pid].parent
        return f"worker of {name(parent)}" if parent in found else "worker"

    for pid, process in sorted(found.items(), key=lambda item: (name(item[0]), item[0])):
        yield Process(name(pid), process.rss, process.own, process.shared)


def _device_peaks(runs: Sequence[Run]) -> dict[str, DevicePeak]:
    """The highest peak of each device over runs; processes on one device add up."""
    peaks: dict[str, DevicePeak] = {}
    for run in runs:
        for device in dict.fromkeys(name for rank in run for name in rank.device_peaks):
            found = [rank.device_peaks[device] for rank in run if device in rank.device_peaks]
            before = peaks.get(device, DevicePeak(0, 0))
            peaks[device] = DevicePeak(
                max(before.allocated, sum(peak.allocated for peak in found)),
                max(before.reserved, sum(peak.reserved for peak in found)),
            )
    return peaks
