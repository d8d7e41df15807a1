"""The report of a comparison: ``report.json``, what changed since an earlier one, and tables."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from textwrap import shorten
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from lightning_memmap.compare.metrics import METRICS, SPEED, TABLES, Metric, Unit
from lightning_memmap.compare.parity import Parity
from lightning_memmap.tables import Cell, Column, Mood, Table

#: Goes up when a field changes its meaning or goes away. See docs/compare.md.
SCHEMA_VERSION = 4
_SCHEMA = "lightning_memmap.compare"
#: A change of less than this share counts as none, however narrow the ranges are: two starts of
#: one program differ by as much, depending on where its memory happens to lie.
_LEAST_CHANGE = 0.02
#: Of three runs before and three now that differ by noise alone (normal, simulated 20,000 times),
#: 4 % are taken for a change; of four and four 1 %; of two and two it would be 20 %.
_LEAST_RUNS = 3
#: What must be equal for figures to be comparable, by section of the report.
_CONDITIONS = {
    "environment": ("processor", "cores", "omp_num_threads", "devices", "packages"),
    "settings": ("accelerator", "devices", "global_batch", "precision", "steps", "warmup_steps"),
    "model": ("model_class", "num_parameters"),
    "data": ("num_rows", "row_bytes"),
}

Status = Literal["ok", "unavailable", "refused", "failed", "pending"]
Verdict = Literal["better", "same", "worse", "unclear"]


@dataclass(frozen=True)
class VariantResult:
    """All that is known of a variant.

    Args:
        variant: Its name: its strategy, and after a ``+`` what supplied its rows.
        description: What it is, in one line.
        status: ``ok``; ``unavailable``: it cannot run on this machine; ``refused``: the strategy
            or the data said that it cannot do this; ``failed``; ``pending``: not finished.
        reason: Why it is not ``ok``.
        parity: None for a variant that is not compared, or did not get so far.
        figures: Its known figures by key, with a value for each run or one in all; see `METRICS`.
        check_losses: The loss of each global batch of the check run; None is not finite.
    """

    variant: str
    description: str
    status: Status
    reason: str = ""
    parity: Parity | None = None
    figures: dict[str, Annotated[list[float], Meta(min_length=1)]] = field(default_factory=dict)
    check_losses: list[float | None] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Rows per second, the median of the runs; 0 where there were none."""
        return median(self.figures.get(SPEED, (0.0,)))


@dataclass(frozen=True)
class Change:
    """How the median of one figure of one variant changed since a baseline."""

    variant: str
    figure: str
    old: float
    new: float
    verdict: Verdict


@dataclass(frozen=True)
class Regression:
    """What changed since a baseline.

    Args:
        baseline: Path of the old report.
        changes: Of the variants that both reports have.
        only_baseline: Variants that only the baseline has figures of.
        only_new: Variants that only the new report has figures of.
        warnings: What else differs, so that figures may not be comparable.
    """

    baseline: str
    changes: list[Change]
    only_baseline: list[str]
    only_new: list[str]
    warnings: list[str]

    @property
    def is_slower(self) -> bool:
        """Whether the speed of a variant became worse."""
        return any(each.figure == SPEED and each.verdict == "worse" for each in self.changes)


@dataclass(frozen=True)
class Report:
    """A comparison.

    Args:
        created: When it began, ISO 8601.
        command: The command line.
        environment: Machine and versions.
        settings: The options as they were used, and what followed from them.
        data: The store.
        model: The model.
        reference: Name of the variant that the others are compared with; empty where none finished.
        variants: In the order in which they were asked for.
        left_out: Parts of the config that a comparison does not use.
        interrupted: Whether the user stopped it.
        regression: What changed since a baseline; None where none was given.
    """

    created: str
    command: str
    environment: dict[str, Any]
    settings: dict[str, Any]
    data: dict[str, Any]
    model: dict[str, Any]
    reference: str
    variants: list[VariantResult]
    left_out: list[str] = field(default_factory=list)
    interrupted: bool = False
    regression: Regression | None = None

    @property
    def measured(self) -> list[VariantResult]:
        """The variants with figures, the fastest first."""
        return sorted((each for each in self.variants if each.figures), key=lambda each: -each.rate)

    @property
    def parity_holds(self) -> bool:
        """Whether no variant was found to differ."""
        return not any(each.parity and each.parity.holds is False for each in self.variants)

    @property
    def exit_code(self) -> int:
        """The exit code of the command.

        - 0: every variant that ran agrees.
        - 1: a variant differs.
        - 3: a variant failed or could not be compared, or nothing ran.
        - 4: all is well, but a variant is slower than in the baseline.
        - 130: the user interrupted.
        """
        if self.interrupted:
            return 130
        if not self.parity_holds:
            return 1
        ran = [each for each in self.variants if each.status == "ok"]
        is_open = any(each.parity and each.parity.holds is None for each in ran)
        if is_open or not ran or any(v.status in ("failed", "pending") for v in self.variants):
            return 3
        return 4 if self.regression is not None and self.regression.is_slower else 0

    def write(self, path: Path) -> None:
        """Write the report as JSON, in which NaN is null. The file is replaced as a whole."""
        values = {
            "schema": _SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "parity_holds": self.parity_holds,
            "exit_code": self.exit_code,
            "metrics": {key: f"{each.label}: {each.meaning}" for key, each in METRICS.items()},
            **asdict(self),
        }
        partial = path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(values), indent=1))
        partial.replace(path)


def read_report(path: str | Path) -> Report:
    """Read a ``report.json``.

    Raises:
        ValueError: The file is not a report, is one of another version, or lacks something.
        OSError: It cannot be read.
    """
    path = Path(path)
    # Reading a pipe could wait forever.
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file: name the report.json of a comparison")
    try:
        values = msgspec.json.decode(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON file: {error}") from error
    if not isinstance(values, dict) or values.get("schema") != _SCHEMA:
        raise ValueError(f"{path} is not the report of a comparison")
    if (version := values.get("schema_version")) != SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema version {version!r:.50}, and this version of the package reads"
            f" {SCHEMA_VERSION}: run the comparison again"
        )
    try:
        return msgspec.convert(values, Report)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"{path} is not a whole report, run the comparison again: {error}"
        ) from error


def verdict_on(old: Sequence[float], new: Sequence[float], more_is_better: bool) -> Verdict:
    """Whether runs are better or worse than others, or the same within their noise.

    ``better`` or ``worse`` where each run now lies on that side of each run before, and the medians
    are further apart than the runs of either report, and than 2 %; else ``same``. ``unclear`` where
    a report has fewer than three runs, too few to know the noise.
    """
    before, now = median(old), median(new)
    if abs(now - before) <= _LEAST_CHANGE * abs(before):
        return "same"
    if min(len(old), len(new)) < _LEAST_RUNS:
        return "unclear"
    noise = max(max(old) - min(old), max(new) - min(new))
    are_apart = min(new) > max(old) or max(new) < min(old)
    if not are_apart or abs(now - before) <= noise:
        return "same"
    return "better" if (now > before) == more_is_better else "worse"


def check_regression(old: Report, new: Report, baseline: str) -> Regression:
    """Compare a report with the one at ``baseline``, in all figures that can be better or worse."""
    before, now = ({v.variant: v.figures for v in report.measured} for report in (old, new))
    changes = [
        Change(
            variant,
            metric.key,
            median(then[metric.key]),
            median(figures[metric.key]),
            verdict_on(then[metric.key], figures[metric.key], metric.better == "more"),
        )
        for variant, figures in now.items()
        if (then := before.get(variant)) is not None
        for metric in METRICS.values()
        if metric.better and metric.key in then and metric.key in figures
    ]
    return Regression(
        baseline=baseline,
        changes=changes,
        only_baseline=[name for name in before if name not in now],
        only_new=[name for name in now if name not in before],
        warnings=list(_warnings(old, new)),
    )


def _warnings(old: Report, new: Report) -> Iterator[str]:
    for section, names in _CONDITIONS.items():
        for name in names:
            before, now = (getattr(report, section).get(name) for report in (old, new))
            if isinstance(before, dict) and isinstance(now, dict):
                for key in sorted({*before, *now}):
                    if before.get(key) != now.get(key):
                        yield f"{key} was {before.get(key)} and is {now.get(key)}"
            elif before != now:
                yield f"{name} was {before} and is {now}"


_VARIANT = Column("variant")
_UNKNOWN = Cell("-")
_BOUND = "no_load_share"
#: Beyond its upper bound a figure is noise, and from here on it is said.
_NOISY_SHARE = 1.05


def all_tables(report: Report) -> Iterator[Table]:
    """The tables of a report: parity, then figures, then what did not run and what changed.

    Those without rows are left out.
    """
    yield from (
        table
        for table in (
            parity_table(report),
            *(figure_table(report, key) for key in TABLES),
            missing_table(report),
            *([regression_table(report.regression)] if report.regression else []),
        )
        if table.rows
    )


def parity_table(report: Report) -> Table:
    """Whether variants train the same; as notes, what differs and what to know."""
    verdicts = {
        True: Cell("equal", "good"),
        False: Cell("DIFFERS", "bad"),
        None: Cell("open", "unsure"),
    }
    compared = [(each.variant, each.parity) for each in report.variants if each.parity is not None]
    rows = [
        [
            Cell(name),
            Cell("{}/{}".format(*parity.rows), "" if len({*parity.rows}) == 1 else "bad"),
            Cell("same bytes" if parity.same_content else "other bytes"),
            _difference(parity.loss_difference, parity.tolerance),
            _difference(parity.weight_difference, parity.tolerance),
            Cell(f"{parity.tolerance:.0e}"),
            verdicts[parity.holds],
        ]
        for name, parity in compared
    ]
    columns = [
        _VARIANT,
        Column("rows", "steps that had the rows of their global batch, as the store has them"),
        Column("batches", "whether the model was given the same bytes after transform and casts"),
        Column("losses", "maximum difference, relative to the largest loss"),
        Column("weights", "distance after the last step, relative to how far training moved them"),
        Column("tolerance", "how far losses and weights may differ"),
        Column(""),
    ]
    notes = [
        *(Cell(f"{name}: {text}", "bad") for name, found in compared for text in found.problems),
        *(Cell(f"{name}: {text}", "unsure") for name, found in compared for text in found.notes),
    ]
    return Table(f"Parity with {report.reference or 'a reference'}", columns, rows, notes)


def _difference(value: float | None, tolerance: float) -> Cell:
    if value is None:
        return _UNKNOWN
    return Cell("0" if value == 0 else f"{value:.1e}", "" if value <= tolerance else "bad")


def figure_table(report: Report, key: str) -> Table:
    """One of `TABLES`, with a row for each measured variant and no figure that none of them has."""
    title, unit = TABLES[key]
    metrics = [
        metric
        for metric in METRICS.values()
        if metric.table == key and any(metric.key in each.figures for each in report.measured)
    ]
    columns = [_VARIANT, *(column for metric in metrics for column in _columns(metric, unit))]
    rows = [
        [Cell(each.variant), *(cell for metric in metrics for cell in _cells(metric, each))]
        for each in report.measured
    ]
    notes = _noise(report) if key == METRICS[_BOUND].table else ()
    return Table(title, columns, rows if metrics else [], [Cell(note, "unsure") for note in notes])


def _noise(report: Report) -> Iterator[str]:
    """What says that speeds of this report are not to be compared."""
    load, cores = report.environment["load_before"], report.environment["cores"]
    if load > cores:
        yield (
            f"the machine was busy, with a load of {load:.1f} on {cores} cores before the runs:"
            " these speeds say little. Repeat when it is idle"
        )
    for each in report.measured:
        if (share := median(each.figures.get(_BOUND, [0.0]))) > _NOISY_SHARE:
            yield (
                f"{each.variant}: {share:.0%} of its upper bound. No loader is faster than none:"
                " the machine was slower in some runs than in others, and differences of"
                f" {share - 1:.0%} are noise here. Repeat with more --steps and --repeats"
            )


def _columns(metric: Metric, unit: Unit | None) -> Iterator[Column]:
    name = "" if metric.unit is unit else f" {metric.unit.name}"
    yield Column(f"{metric.label}{name}".strip(), metric.meaning)
    if metric.shows_range:
        yield Column("range", "the lowest and the highest run")


def _cells(metric: Metric, variant: VariantResult) -> Iterator[Cell]:
    values, write = variant.figures.get(metric.key), metric.unit.write
    yield Cell(write(median(values))) if values else _UNKNOWN
    if metric.shows_range:
        yield Cell(f"{write(min(values))}..{write(max(values))}") if values else _UNKNOWN


def missing_table(report: Report) -> Table:
    """The variants without a result, and why they have none."""
    words: dict[str, tuple[str, Mood]] = {
        "unavailable": ("cannot run here", "unsure"),
        "refused": ("not supported", "unsure"),
        "failed": ("FAILED", "bad"),
        "pending": ("not finished", "unsure"),
    }
    rows = [
        [
            Cell(each.variant),
            Cell(*words[each.status]),
            Cell(shorten(each.reason, 500, placeholder="…")),
        ]
        for each in report.variants
        if each.status != "ok"
    ]
    columns = [_VARIANT, Column("", is_text=True), Column("reason", is_text=True)]
    return Table("Variants without a result", columns, rows)


def regression_table(regression: Regression) -> Table:
    """What changed since a baseline; as notes, what else differs between the two reports."""
    moods: dict[str, Mood] = {"better": "good", "worse": "bad", "same": "soft", "unclear": "unsure"}
    rows = []
    for each in regression.changes:
        metric = METRICS[each.figure]
        texts = (
            each.variant,
            f"{metric.label} {metric.unit.name}".strip(),
            metric.unit.write(each.old),
            metric.unit.write(each.new),
            f"{each.new / each.old - 1:+.1%}" if each.old else "new",
        )
        rows.append([*map(Cell, texts), Cell(each.verdict, moods[each.verdict])])
    columns = [_VARIANT, Column("figure", is_text=True)]
    columns += [Column(label) for label in ("old", "new", "change", "")]
    notes = [f"not the same: {warning}" for warning in regression.warnings]
    for words, names in (
        ("only in the baseline", regression.only_baseline),
        ("only in the new report", regression.only_new),
    ):
        notes += [f"{words}: {', '.join(names)}"] if names else []
    title = f"Compared with {regression.baseline}"
    return Table(title, columns, rows, [Cell(note, "unsure") for note in notes])
